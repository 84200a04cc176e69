//! `peer churn`: merging beside threads that change the layout of memory.

mod kernel;
mod load;
mod ours;

use std::time::Duration;

use ksm_core::LockPolicy;
use ksm_core::PAGE_SIZE;

use crate::args::ChurnArgs;
use crate::content::{Order, memory_of};
use crate::figures::{Figures, Line, Printer};
use crate::host::Host;
use crate::memory::Memory;
use crate::oracle;
use kernel::Kernel;
use load::{Hotplug, Load, Weight};
use ours::Ours;

/// Contents, and pages of each: 32 MiB.
const UNIQUE: usize = 2048;
const COPIES: usize = 4;
/// Pages of what churners map: 256 MiB.
const CHURN_PAGES: usize = (256 << 20) / PAGE_SIZE;
/// Figures whose smallest and largest are told.
const SPREAD: &[&str] = &["merge_seconds"];

const POLICIES: [(LockPolicy, &str); 3] = [
    (LockPolicy::PerRegion, "per-region"),
    (LockPolicy::Global, "global"),
    (LockPolicy::TrySkip, "try-skip"),
];

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
    /// Passes that were finished before everything was merged.
    passes: u64,
    pages_scanned: u64,
    /// Times that a region was put off or left out.
    deferred: u64,
    scanner_cpu: Duration,
    /// Of the process, and ksmd where that is at work.
    cpu: Duration,
}

impl Progress {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn figures(self) -> Figures {
        let seconds = self.seconds.as_secs_f64();
        let passes = self.passes + 1;
        let cpu_us = self.scanner_cpu.as_secs_f64() * 1e6;
        let mut figures = Figures::default();
        figures.set("merge_seconds", seconds);
        figures.set("merged_pages", self.merged as f64);
        figures.set("merged_in_pass", passes as f64);
        figures.set("merged_pages_per_pass", self.merged as f64 / passes as f64);
        let rate = self.pages_scanned as f64 / seconds;
        figures.set("scanned_pages_per_second", rate);
        figures.set("deferrals", self.deferred as f64);
        figures.set("cpu_us_per_page", cpu_us / self.pages_scanned.max(1) as f64);
        figures.set("process_cpu_seconds", self.cpu.as_secs_f64());
        figures
    }
}

/// Who merges.
#[derive(Clone, Copy, Debug)]
enum Who {
    Kernel,
    Ours(LockPolicy),
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
        let runs: Vec<Figures> = (0..self.repeat)
            .map(|_| self.trial(Order::InOrder, Load::Churners, Who::Kernel))
            .collect::<anyhow::Result<_>>()?;
        Ok(Figures::median(&runs, &[]).get("layout_changes_per_second"))
    }

    fn order(&mut self, order: Order, printer: &Printer) -> anyhow::Result<()> {
        let whos = [Who::Kernel].into_iter();
        let whos: Vec<Who> = whos
            .chain(POLICIES.map(|(policy, _)| Who::Ours(policy)))
            .collect();
        // By load and by who.
        let mut medians = Vec::new();
        for load in Load::ALL {
            let mut runs = vec![Vec::new(); whos.len()];
            for _ in 0..self.repeat {
                for (who, runs) in whos.iter().zip(&mut runs) {
                    runs.push(self.trial(order, load, *who)?);
                }
            }
            let of = |runs: &Vec<Figures>| Figures::median(runs, SPREAD);
            medians.push(runs.iter().map(of).collect::<Vec<_>>());
            let [kernel, ours @ ..] = &medians[medians.len() - 1][..] else {
                continue;
            };
            for (ours, (_, policy)) in ours.iter().zip(POLICIES) {
                let case = format!("{}/{policy}/{}", order.name(), load.name());
                printer.print(&line(case, ours, kernel))?;
            }
        }
        let [_, burners, churners] = &medians[..] else {
            return Ok(());
        };
        let relative: Vec<Figures> = churners
            .iter()
            .zip(burners)
            .map(|(contended, control)| relative(contended, control))
            .collect();
        for (ours, (_, policy)) in relative[1..].iter().zip(POLICIES) {
            let case = format!("{}/{policy}/contended-over-burners", order.name());
            printer.print(&line(case, ours, &relative[0]))?;
        }
        Ok(())
    }

    fn trial(&mut self, order: Order, load: Load, who: Who) -> anyhow::Result<Figures> {
        let contents = order.contents(UNIQUE, COPIES);
        let memory = memory_of(&contents)?;
        let side: Box<dyn Merging> = match who {
            Who::Kernel => Box::new(Kernel::new(
                self.host,
                &memory,
                UNIQUE as u64,
                self.args.mergeable_churn,
            )?),
            Who::Ours(policy) => Box::new(Ours::new(self.host, policy, &memory)?),
        };
        let limit = Duration::from_secs_f64(self.args.limit_seconds);
        let weight = Weight {
            load,
            threads: self.args.threads,
            rate: self.rate,
        };
        let figures = load::beside(weight, &*side, || side.merge(limit))?;
        let what = format!("{}/{who:?}/{}", order.name(), load.name());
        self.check(&what, &memory, &contents, &figures)?;
        side.end()?;
        oracle::check_contents(&memory, &contents)?;
        Ok(figures)
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

fn line(case: String, ours: &Figures, kernel: &Figures) -> Line {
    Line {
        workload: "churn",
        case,
        ours: ours.clone(),
        kernel: kernel.clone(),
        ratio: ours.get("merge_seconds") / kernel.get("merge_seconds"),
    }
}

/// Times under churn by those beside burners.
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
