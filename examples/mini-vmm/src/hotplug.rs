//! Memory and vCPUs that are added to running guests, and memory that is withdrawn
//! from them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::page::bytes_in;
use ksm_vmm_glue::{Content, Hotplug, Slots as _};
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
    GuestRegionMmap,
};

use crate::args::Args;
use crate::cpu::Cpu;
use crate::dedup::Dedup;
use crate::guest::{CHUNK, Tally, rest_after};
use crate::kvm_slots::SlottedVm;
use crate::layout::{Command, WORK_BASE, Windows, control_bytes};
use crate::plan::Plan;
use crate::ram::Ram;
use crate::recipe::Recipe;
use crate::verify::wrong_pages;
use crate::vm::KvmCpu;

/// For so many passes memory stays where it was added and filled, so that it is
/// merged; every third time it leaves at once.
const PASSES: u64 = 3;
/// How long it stays at most, however long passes take.
const STAY: Duration = Duration::from_secs(6);

/// What was added and withdrawn.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct HotplugTally {
    /// vCPUs that were added.
    pub(crate) vcpus_added: u64,
    /// Memory that was added each time.
    pub(crate) bytes: u64,
    /// How often memory was added.
    pub(crate) additions: u64,
    /// How often it was withdrawn.
    pub(crate) withdrawals: u64,
    /// Pages of it that were merged when it was to leave, in sum.
    pub(crate) pages_merged: u64,
    /// Pages of it that its vCPU checked.
    pub(crate) pages_checked: u64,
    /// Stores to it whose effect its vCPU checked.
    pub(crate) stores_checked: u64,
    /// Pages of it that did not hold what they must, as vCPU or VMM found, in or
    /// after it.
    pub(crate) lost_pages: u64,
    /// The longest that it took to add memory, in milliseconds.
    pub(crate) longest_add_millis: f64,
    /// The longest that it took to withdraw it with nothing of its content wanted.
    pub(crate) longest_drop_millis: f64,
    /// The same, where copies were made of what was shared.
    pub(crate) longest_keep_millis: f64,
}

impl HotplugTally {
    /// The sum of two.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            vcpus_added: self.vcpus_added + other.vcpus_added,
            bytes: self.bytes.max(other.bytes),
            additions: self.additions + other.additions,
            withdrawals: self.withdrawals + other.withdrawals,
            pages_merged: self.pages_merged + other.pages_merged,
            pages_checked: self.pages_checked + other.pages_checked,
            stores_checked: self.stores_checked + other.stores_checked,
            lost_pages: self.lost_pages + other.lost_pages,
            longest_add_millis: self.longest_add_millis.max(other.longest_add_millis),
            longest_drop_millis: self.longest_drop_millis.max(other.longest_drop_millis),
            longest_keep_millis: self.longest_keep_millis.max(other.longest_keep_millis),
        }
    }

    /// One line for people.
    pub(crate) fn line(&self) -> String {
        format!(
            "hotplug: {} vCPUs added; {} MiB added {} times, withdrawn {} times, {} pages of it merged | checked {} pages, {} stores, {} lost | longest add {:.1} ms, withdrawal {:.1}, with copies {:.1}",
            self.vcpus_added,
            self.bytes >> 20,
            self.additions,
            self.withdrawals,
            self.pages_merged,
            self.pages_checked,
            self.stores_checked,
            self.lost_pages,
            self.longest_add_millis,
            self.longest_drop_millis,
            self.longest_keep_millis,
        )
    }
}

/// A guest to which memory is added.
pub(crate) struct Board {
    guest: usize,
    /// Pages of its own.
    pages: u64,
    machine: Arc<SlottedVm>,
    /// What is registered of its memory.
    map: GuestMemoryAtomic<GuestMemoryMmap>,
    own_regions: usize,
}

impl Board {
    pub(crate) fn new(guest: usize, ram: &Ram, machine: Arc<SlottedVm>) -> Self {
        Self {
            guest,
            pages: ram.pages(),
            machine,
            map: GuestMemoryAtomic::new(ram.work.clone()),
            own_regions: ram.work.num_regions(),
        }
    }
}

/// What is worked with at each window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Churn<'a> {
    dedup: &'a Dedup,
    windows: Windows,
    recipe: &'a Recipe,
    seed: u64,
    busy_percent: u32,
    calm: &'a AtomicBool,
}

/// A window of a guest, and the vCPU that works at it.
struct Socket<'a> {
    churn: &'a Churn<'a>,
    board: &'a Board,
    base: u64,
    control: Arc<GuestRegionMmap>,
    cpu: KvmCpu,
    plan: Plan,
    tally: HotplugTally,
}

fn mapped(start: u64, bytes: u64) -> anyhow::Result<Arc<GuestRegionMmap>> {
    let region = GuestRegionMmap::from_range(GuestAddress(start), usize::try_from(bytes)?, None);
    Ok(Arc::new(region.context("cannot map memory to be added")?))
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

impl<'a> Churn<'a> {
    pub(crate) fn new(args: &'a Args, dedup: &'a Dedup, calm: &'a AtomicBool) -> Self {
        Self {
            dedup,
            windows: args.reshape.windows(u64::from(args.guests())),
            recipe: &args.recipe,
            seed: args.seed,
            busy_percent: u32::from(args.busy),
            calm,
        }
    }

    /// What there is of added memory just now, for people.
    pub(crate) fn line(&self, boards: &[Board]) -> String {
        let regions: Vec<usize> = boards
            .iter()
            .map(|board| board.map.memory().num_regions() - board.own_regions)
            .collect();
        let bytes = regions.iter().sum::<usize>() as u64 * bytes_in(self.windows.pages);
        format!(
            "added   : {:>5} MiB, pieces by guest {regions:?}",
            bytes >> 20
        )
    }

    /// Adds a vCPU to a guest, and memory, and withdraws that, until it is to be
    /// calm. `number` is that of the window; `who` makes contents that no other has.
    pub(crate) fn run(&self, board: &Board, number: u64, who: u64) -> anyhow::Result<HotplugTally> {
        let pages = self.windows.pages;
        let base = self.windows.base(board.pages, number);
        let control = mapped(base, control_bytes(pages))?;
        board.machine.set(&control)?;
        let ram = Ram::window(base, Arc::clone(&control), None)?;
        let machine = Arc::clone(&board.machine);
        let cpu = KvmCpu::add_to(machine, 1 + number, ram, base, pages)
            .with_context(|| format!("guest {} gets no further vCPU", board.guest))?;
        let mut socket = Socket {
            churn: self,
            board,
            base,
            control,
            cpu,
            plan: Plan::new(self.recipe, pages, who, self.seed),
            tally: HotplugTally {
                vcpus_added: 1,
                bytes: bytes_in(pages),
                ..HotplugTally::default()
            },
        };
        let mut round = who;
        while !self.calm.load(Ordering::Relaxed) {
            round += 1;
            socket.round(round)?;
        }
        let Socket {
            control,
            cpu,
            tally,
            ..
        } = socket;
        // Its vCPU ends first.
        drop(cpu);
        board.machine.remove(&control)?;
        Ok(tally)
    }
}

impl Socket<'_> {
    /// Memory comes, is worked at, checked, and leaves.
    fn round(&mut self, round: u64) -> anyhow::Result<()> {
        let hotplug = Hotplug::new(&self.board.map, self.board.machine.as_ref(), Ram::source);
        let start = self.base + WORK_BASE;
        let region = mapped(start, self.tally.bytes)?;
        let begin = Instant::now();
        let added = hotplug
            .add(
                &mut self.churn.dedup.guest(self.board.guest),
                Arc::clone(&region),
            )
            .with_context(|| format!("memory is not added to guest {}", self.board.guest))?;
        self.tally.longest_add_millis = self.tally.longest_add_millis.max(millis(begin));
        self.tally.additions += 1;

        let control = Arc::clone(&self.control);
        let ram = Ram::window(self.base, control, Some(Arc::clone(&region)))?;
        drop(region);
        let before = Tally::of(&ram)?;
        let increments = self.work(&ram, round)?;
        let stats = self.churn.dedup.ksm().region_stats(added.region)?;
        self.tally.pages_merged += stats.ksm_merging_pages;
        let mut lost = self.lost_pages(&ram, increments)?;

        let content = match round % 2 {
            0 => Content::Keep,
            _ => Content::Drop,
        };
        let begin = Instant::now();
        let (at, bytes) = (GuestAddress(start), self.tally.bytes);
        hotplug
            .withdraw(
                &mut self.churn.dedup.guest(self.board.guest),
                at,
                bytes,
                content,
            )
            .with_context(|| format!("memory does not leave guest {}", self.board.guest))?;
        let longest = match content {
            Content::Keep => &mut self.tally.longest_keep_millis,
            Content::Drop => &mut self.tally.longest_drop_millis,
        };
        *longest = longest.max(millis(begin));
        self.tally.withdrawals += 1;
        if content == Content::Keep {
            // The engine has nothing to do with it any more.
            lost += self.lost_pages(&ram, increments)?;
        }
        let now = Tally::of(&ram)?;
        self.tally.pages_checked += now.pages_checked - before.pages_checked;
        self.tally.stores_checked += now.stores_checked - before.stores_checked;
        self.tally.lost_pages += lost.max(now.lost_pages - before.lost_pages);
        Ok(())
    }

    /// Lets the vCPU fill its memory, then check and rewrite it for a while. Returns
    /// how often its counters were incremented.
    fn work(&mut self, ram: &Ram, round: u64) -> anyhow::Result<u64> {
        ram.write_plan(&self.plan)?;
        let pages = self.plan.len();
        self.in_chunks(pages, |first, end| Command::Fill { first, end })?;
        let passes = || self.churn.dedup.stats().full_scans;
        let (begin, first_pass) = (Instant::now(), passes());
        let mut increments = 0;
        loop {
            let places = self.plan.lockstep.len() as u64;
            let rewrite = |first, end| Command::Rewrite {
                first,
                end,
                times: 1,
            };
            self.in_chunks(places, rewrite)?;
            increments += 1;
            self.in_chunks(pages, |first, end| Command::Check { first, end })?;
            let enough = passes() >= first_pass + PASSES || begin.elapsed() > STAY;
            let calm = self.churn.calm.load(Ordering::Relaxed);
            if enough || calm || round.is_multiple_of(3) {
                return Ok(increments);
            }
        }
    }

    /// Does something to all of so many pages or places, resting in between.
    fn in_chunks(&mut self, all: u64, command: impl Fn(u64, u64) -> Command) -> anyhow::Result<()> {
        let mut first = 0;
        while first < all {
            let end = (first + CHUNK).min(all);
            let begin = Instant::now();
            self.cpu
                .run(command(first, end))
                .with_context(|| format!("a vCPU that was added to guest {}", self.board.guest))?;
            sleep(rest_after(begin.elapsed(), self.churn.busy_percent));
            first = end;
        }
        Ok(())
    }

    fn lost_pages(&self, ram: &Ram, increments: u64) -> anyhow::Result<u64> {
        let mut expected = self.plan.pages.clone();
        for &page in &self.plan.lockstep {
            expected[usize::try_from(page)?].counter = increments;
        }
        let at = |page| usize::try_from(page).expect("a plan is held in memory");
        let wrong = wrong_pages(ram, |page| expected[at(page)])?;
        if let Some(first) = wrong.first() {
            eprintln!(
                "memory added to guest {}: {} pages do not hold what they must, the first is page {first}",
                self.board.guest,
                wrong.len()
            );
        }
        Ok(wrong.len() as u64)
    }
}
