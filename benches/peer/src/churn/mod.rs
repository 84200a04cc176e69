//! `peer churn`: merging beside threads that change the layout of memory.

mod burners;
mod kernel;
mod load;
mod ours;

use std::collections::HashMap;
use std::time::Duration;

use clap::ValueEnum;
use ksm_core::LockPolicy;
use ksm_core::PAGE_SIZE;

use crate::args::ChurnArgs;
use crate::content::{Order, memory_of};
use crate::cpu::Share;
use crate::figures::{Figures, Line, Printer, name_of};
use crate::host::Host;
use crate::memory::Memory;
use crate::oracle;
pub(crate) use burners::serve_if_asked;
use kernel::Kernel;
pub(crate) use load::Load;
use load::{Hotplug, Weight};
use ours::Ours;

/// Contents, and pages of each: 32 MiB.
const UNIQUE: usize = 2048;
const COPIES: usize = 4;
/// Pages of what churners map: 256 MiB.
const CHURN_PAGES: usize = (256 << 20) / PAGE_SIZE;
/// A page is to stay the same for one pass before it is merged.
const MERGED_IN_PASS: f64 = 2.0;
/// How much more time those get who are not starved.
const PATIENCE: u32 = 15;
/// Figures whose smallest and largest are told.
const SPREAD: &[&str] = &["merge_seconds"];

/// Our lock policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    /// A lock for each region; busy ones are come back to in the same pass
    PerRegion,
    /// One lock for the whole layout
    Global,
    /// One lock, and no waiting for it
    TrySkip,
}

impl From<Policy> for LockPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::PerRegion => Self::PerRegion,
            Policy::Global => Self::Global,
            Policy::TrySkip => Self::TrySkip,
        }
    }
}

/// A side that merges what it was given.
trait Merging: Hotplug {
    /// Merges until everything is merged, or the time is up.
    fn merge(&self, limit: Duration) -> anyhow::Result<Figures>;

    /// Unmerges everything.
    fn end(&self) -> anyhow::Result<()>;
}

/// How far a side has come.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    seconds: Duration,
    merged: u64,
    /// Passes that were finished before the one in which everything was merged.
    passes: u64,
    pages_scanned: u64,
    /// Times that a region was put off or left out.
    deferred: u64,
    scanner: Share,
    /// Of the process, and ksmd where that is at work.
    cpu: Duration,
}

impl Progress {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn figures(self) -> Figures {
        let seconds = self.seconds.as_secs_f64();
        let passes = self.passes + 1;
        let cpu_us = self.scanner.ran.as_secs_f64() * 1e6;
        let mut figures = Figures::default();
        figures.set("merge_seconds", seconds);
        figures.set("merged_pages", self.merged as f64);
        figures.set("merged_in_pass", passes as f64);
        figures.set("merged_pages_per_pass", self.merged as f64 / passes as f64);
        let rate = self.pages_scanned as f64 / seconds;
        figures.set("scanned_pages_per_second", rate);
        figures.set("deferrals", self.deferred as f64);
        figures.set("cpu_us_per_page", cpu_us / self.pages_scanned.max(1) as f64);
        let (ran, queued) = (self.scanner.ran, self.scanner.queued);
        figures.set("scanner_cpu_seconds", ran.as_secs_f64());
        figures.set("scanner_queued_for_cpu_seconds", queued.as_secs_f64());
        figures.set("scanner_waits", self.scanner.waits as f64);
        figures.set("process_cpu_seconds", self.cpu.as_secs_f64());
        figures
    }
}

/// Who merges.
#[derive(Clone, Copy, Debug)]
enum Who {
    Kernel,
    Ours(Policy),
}

/// Runs it, and says what did not hold that must.
pub(crate) fn run(host: &Host, args: &ChurnArgs, printer: &Printer) -> anyhow::Result<Vec<String>> {
    let mut bench = Bench {
        host,
        args,
        repeat: if args.quick { 1 } else { args.repeat },
        rate: args.rate,
        complaints: Vec::new(),
    };
    if bench.rate.is_none() {
        bench.rate = Some(bench.highest_rate()?);
    }
    for &order in &args.orders {
        bench.order(order, printer)?;
    }
    Ok(bench.complaints)
}

struct Bench<'a> {
    host: &'a Host,
    args: &'a ChurnArgs,
    repeat: u32,
    rate: Option<f64>,
    complaints: Vec<String>,
}

impl Bench<'_> {
    /// Layout changes a second that the kernel's side reaches while ksmd merges.
    fn highest_rate(&mut self) -> anyhow::Result<f64> {
        let free = Weight {
            load: Load::Churners,
            threads: self.args.threads,
            rate: None,
            duty: 0.0,
        };
        let runs: Vec<Figures> = (0..self.repeat)
            .map(|_| self.trial(Order::Sequential, free, Who::Kernel))
            .collect::<anyhow::Result<_>>()?;
        Ok(Figures::median(&runs, &[]).get("layout_changes_per_second"))
    }

    fn order(&mut self, order: Order, printer: &Printer) -> anyhow::Result<()> {
        let order_name = name_of(&order);
        let loads = Load::value_variants().iter();
        let loads: Vec<Load> = loads
            .filter(|load| self.args.loads.contains(load))
            .copied()
            .collect();
        // The loads take turns, so that what changes on the host meanwhile changes
        // what is compared alike.
        let mut rounds: Vec<HashMap<Load, Vec<Figures>>> = Vec::new();
        for _ in 0..self.repeat {
            let mut round = HashMap::new();
            // The churners before those that are to match them.
            for &load in &loads {
                let churners = round.get(&Load::Churners).map_or(&[][..], Vec::as_slice);
                let figures = self.load(order, load, churners)?;
                round.insert(load, figures);
            }
            rounds.push(round);
        }
        for load in loads {
            let runs = rounds.iter().map(|round| round[&load].clone());
            self.print(
                &medians(runs.collect()),
                &order_name,
                &name_of(&load),
                printer,
            )?;
        }
        for control in [Load::Burners, Load::Matched] {
            let runs = rounds.iter().filter_map(|round| {
                let pairs = round.get(&Load::Churners)?.iter().zip(round.get(&control)?);
                Some(pairs.map(|(mine, other)| relative(mine, other)).collect())
            });
            let runs: Vec<Vec<Figures>> = runs.collect();
            if !runs.is_empty() {
                let case = format!("contended-over-{}", name_of(&control));
                self.print(&medians(runs), &order_name, &case, printer)?;
            }
        }
        Ok(())
    }

    /// Of the kernel's side, then of each policy. `churners` are those of the
    /// churners, in the same order.
    fn load(
        &mut self,
        order: Order,
        load: Load,
        churners: &[Figures],
    ) -> anyhow::Result<Vec<Figures>> {
        let ours = self.args.policies.iter().map(|&policy| Who::Ours(policy));
        let whos: Vec<Who> = [Who::Kernel].into_iter().chain(ours).collect();
        let run = |(at, who)| {
            let cores = churners
                .get(at)
                .map(|run: &Figures| run.get("churners_cpu_cores"));
            let weight = Weight {
                load,
                threads: self.args.threads,
                rate: self.rate,
                duty: cores.unwrap_or(0.0) / f64::from(self.args.threads),
            };
            self.trial(order, weight, who)
        };
        whos.into_iter().enumerate().map(run).collect()
    }

    /// Prints the figures of each policy beside the kernel's, which come first.
    fn print(
        &self,
        figures: &[Figures],
        order: &str,
        load: &str,
        printer: &Printer,
    ) -> anyhow::Result<()> {
        let (kernel, ours) = figures.split_first().expect("the kernel's are there");
        for (ours, policy) in ours.iter().zip(&self.args.policies) {
            printer.print(&Line {
                workload: "churn",
                case: format!("{order}/{}/{load}", name_of(policy)),
                ratio: ours.get("merge_seconds") / kernel.get("merge_seconds"),
                ours: ours.clone(),
                kernel: kernel.clone(),
            })?;
        }
        Ok(())
    }

    fn trial(&mut self, order: Order, weight: Weight, who: Who) -> anyhow::Result<Figures> {
        let contents = order.contents(UNIQUE, COPIES);
        let memory = memory_of(&contents)?;
        let side: Box<dyn Merging> = match who {
            Who::Kernel => Box::new(Kernel::new(
                self.host,
                &memory,
                UNIQUE as u64,
                self.args.mergeable_churn,
            )?),
            Who::Ours(policy) => Box::new(Ours::new(self.host, policy.into(), &memory)?),
        };
        let mut limit = Duration::from_secs_f64(self.args.limit_seconds);
        if !matches!(who, Who::Ours(Policy::TrySkip)) {
            // The others come to an end, however slow the host is.
            limit *= PATIENCE;
        }
        let figures = load::beside(weight, &*side, || side.merge(limit))?;
        let what = format!("{order:?}/{who:?}/{:?}", weight.load);
        self.check(&what, &memory, &contents, &figures)?;
        if let Who::Ours(Policy::PerRegion) = who {
            self.check_per_region(&what, contents.len(), &figures);
        }
        side.end()?;
        oracle::check_contents(&memory, &contents)?;
        Ok(figures)
    }

    /// A region that nobody changes is merged in the same pass as if nobody changed
    /// others.
    fn check_per_region(&mut self, what: &str, pages: usize, figures: &Figures) {
        let [merged, pass] = ["merged_pages", "merged_in_pass"].map(|name| figures.get(name));
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        if (merged, pass) != (pages as f64, MERGED_IN_PASS) {
            let found = format!("{what}: {merged} of {pages} pages are merged, in pass {pass}");
            self.complaints.push(found);
        }
    }

    /// What must hold: nothing is lost, and what is said to be merged is. Only
    /// starved sides may not have merged all.
    fn check(
        &mut self,
        what: &str,
        memory: &Memory,
        contents: &[usize],
        figures: &Figures,
    ) -> anyhow::Result<()> {
        oracle::check_contents(memory, contents)?;
        let shared = oracle::count_shared(memory)?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        if (shared as f64) < figures.get("merged_pages") {
            let merged = figures.get("merged_pages");
            let found = format!("{what}: {merged} pages are said to be merged, {shared} are");
            self.complaints.push(found);
        }
        Ok(())
    }
}

/// The median of each side's figures over all rounds.
fn medians(rounds: Vec<Vec<Figures>>) -> Vec<Figures> {
    let sides = rounds.first().map_or(0, Vec::len);
    let side = |at: usize| -> Vec<Figures> {
        let of_side = rounds.iter().map(|round| round[at].clone());
        of_side.collect()
    };
    let sides = (0..sides).map(|at| Figures::median(&side(at), SPREAD));
    sides.collect()
}

/// Times under churn by those beside a control, in the same round.
fn relative(contended: &Figures, control: &Figures) -> Figures {
    let mut relative = Figures::default();
    for name in ["merge_seconds", "longest_probe_ms"] {
        relative.set(name, contended.get(name) / control.get(name));
    }
    for name in ["merged_in_pass", "layout_changes_per_second"] {
        relative.set(name, contended.get(name));
    }
    relative
}
