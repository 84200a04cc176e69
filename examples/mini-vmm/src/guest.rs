//! [`Guest`]: one guest, and what its thread lets it do.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::content::PageSpec;
use crate::cpu::Cpu;
use crate::discard::{Discard, DiscardDesk};
use crate::forks::Forks;
use crate::image::Image;
use crate::kvm_slots::SlottedVm;
use crate::layout::{Command, SKIPPED, mail};
use crate::lockstep::Lockstep;
use crate::plan::Plan;
use crate::ram::Ram;
use crate::verify::wrong_pages;

/// Pages that are filled or checked by one command: well below a millisecond,
/// so that a guest soon hears of what else there is to do.
pub(crate) const CHUNK: u64 = 128;
/// Chunks that a guest checks between being discarded from and filling again.
const CHUNKS_BEFORE_REFILL: u32 = 20;

/// What a guest and the threads around it both see.
#[derive(Debug, Default)]
pub(crate) struct GuestSide {
    /// Commands that the guest has carried out: it stands still if it hangs.
    pub(crate) commands: AtomicU64,
    /// Discards to be agreed on.
    pub(crate) desk: DiscardDesk,
}

/// A guest, with all that its thread needs.
pub(crate) struct Guest {
    index: usize,
    ram: Ram,
    plan: Plan,
    /// What its memory was loaded from, if it is not for the guest to fill.
    image: Option<Image>,
    cpu: Box<dyn Cpu>,
    side: Arc<GuestSide>,
    /// Increments of each slice of the lockstep list.
    increments: Vec<u64>,
    /// Where the walk of checks stands.
    next_check: u64,
    /// Chunks checked since pages were discarded.
    since_discard: u32,
}

/// What a guest says of itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// Pages whose content the guest has checked.
    pub(crate) pages_checked: u64,
    /// Stores whose effect the guest has checked.
    pub(crate) stores_checked: u64,
    /// Pages that it found wrong.
    pub(crate) lost_pages: u64,
}

impl Tally {
    /// The tally in a guest's mailbox, which may be running.
    pub(crate) fn of(ram: &Ram) -> anyhow::Result<Self> {
        Ok(Self {
            pages_checked: ram.mail(mail::PAGES_CHECKED)?,
            stores_checked: ram.mail(mail::STORES_CHECKED)?,
            lost_pages: ram.mail(mail::LOST_PAGES)?,
        })
    }
}

/// What guests do until they are stopped.
#[derive(Debug)]
pub(crate) struct Work {
    /// Who rewrites when.
    pub(crate) lockstep: Lockstep,
    /// Increments of a page in one tick.
    pub(crate) times: u64,
    /// How much of the time a guest works, in percent.
    pub(crate) busy_percent: u32,
    /// Set when guests are to stop where they are, since something failed. A
    /// run ends by [`Lockstep::close`].
    pub(crate) stop: AtomicBool,
}

impl Guest {
    /// A guest that has not filled its memory yet, unless it is loaded from an
    /// image.
    pub(crate) fn new(
        index: usize,
        ram: Ram,
        plan: Plan,
        image: Option<Image>,
        cpu: Box<dyn Cpu>,
        side: Arc<GuestSide>,
    ) -> anyhow::Result<Self> {
        ram.write_plan(&plan)?;
        Ok(Self {
            index,
            ram,
            plan,
            image,
            cpu,
            side,
            increments: Vec::new(),
            next_check: 0,
            since_discard: 0,
        })
    }

    fn run(&mut self, command: Command) -> anyhow::Result<()> {
        self.cpu
            .run(command)
            .with_context(|| format!("guest {}, {command:?}", self.index))?;
        self.side.commands.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Lets the guest fill its memory.
    pub(crate) fn fill(&mut self) -> anyhow::Result<()> {
        if self.image.is_some() {
            return Ok(());
        }
        let pages = self.plan.len();
        for first in (0..pages).step_by(as_step(CHUNK)) {
            let end = (first + CHUNK).min(pages);
            self.run(Command::Fill { first, end })?;
        }
        Ok(())
    }

    /// Lets the guest check all of its memory once.
    pub(crate) fn check_all(&mut self) -> anyhow::Result<()> {
        self.next_check = 0;
        for _ in (0..self.plan.len()).step_by(as_step(CHUNK)) {
            self.check_chunk()?;
        }
        Ok(())
    }

    fn check_chunk(&mut self) -> anyhow::Result<()> {
        let first = self.next_check;
        let end = (first + CHUNK).min(self.plan.len());
        self.next_check = if end == self.plan.len() { 0 } else { end };
        self.run(Command::Check { first, end })
    }

    /// Lets the guest work until it is stopped: rewrite in lockstep when it is
    /// time, check what lies still in between.
    pub(crate) fn work(&mut self, work: &Work, forks: Option<&Forks<'_>>) -> anyhow::Result<()> {
        let slices = as_step(work.lockstep.slices());
        self.increments.resize(slices, 0);
        while !work.stop.load(Ordering::Relaxed) && !work.lockstep.is_over(self.index) {
            let begin = Instant::now();
            self.attend_discard()?;
            self.attend_forks(work, forks)?;
            match work.lockstep.due(self.index) {
                Some(slice) => self.rewrite(work, slice)?,
                None => self.check_chunk()?,
            }
            sleep(rest_after(begin.elapsed(), work.busy_percent));
        }
        self.restore(work)?;
        // A discard that was made is known to the guest when it stops.
        self.attend_discard()
    }

    /// Makes the clones that are due, when no discard is under way.
    fn attend_forks(&mut self, work: &Work, forks: Option<&Forks<'_>>) -> anyhow::Result<()> {
        let Some(forks) = forks else {
            return Ok(());
        };
        for number in forks.due(self.index) {
            if matches!(self.side.desk.state(), Discard::None | Discard::Asked(_)) {
                forks.make(self, number, work)?;
            }
        }
        Ok(())
    }

    /// A clone of this guest, which stands still meanwhile: `register` lets the work
    /// memory that it is given read as this guest's.
    pub(crate) fn fork(
        &mut self,
        index: usize,
        register: impl FnOnce(&Ram) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let ram = self.ram.clone_control()?;
        register(&ram)?;
        let cpu = self.cpu.fork(ram.clone());
        Ok(Self {
            index,
            cpu: cpu.with_context(|| format!("the vCPU of guest {} is not cloned", self.index))?,
            ram,
            plan: self.plan.clone(),
            image: self.image.clone(),
            side: Arc::default(),
            increments: self.increments.clone(),
            next_check: self.next_check,
            since_discard: 0,
        })
    }

    fn rewrite(&mut self, work: &Work, slice: u64) -> anyhow::Result<()> {
        let places = work.lockstep.places(slice);
        let times = work.times;
        self.run(Command::Rewrite {
            first: places.start,
            end: places.end,
            times,
        })?;
        self.increments[as_step(slice)] += times;
        work.lockstep.end_tick(self.index);
        Ok(())
    }

    /// Restores those pages of an image that are rewritten now.
    fn restore(&mut self, work: &Work) -> anyhow::Result<()> {
        if self.image.is_none() {
            return Ok(());
        }
        for slice in 0..work.lockstep.slices() {
            if self.increments[as_step(slice)] % 2 == 1 {
                let Range { start: first, end } = work.lockstep.places(slice);
                self.run(Command::Rewrite {
                    first,
                    end,
                    times: 1,
                })?;
                self.increments[as_step(slice)] += 1;
            }
        }
        Ok(())
    }

    /// Takes the guest's step in a discard, if there is one to be taken.
    fn attend_discard(&mut self) -> anyhow::Result<()> {
        let side = Arc::clone(&self.side);
        match side.desk.state() {
            Discard::None | Discard::Granted(_) => {}
            Discard::Asked(pages) => {
                for page in pages.clone() {
                    self.ram.set_spec(page, SKIPPED)?;
                }
                side.desk.set(Discard::Granted(pages));
            }
            Discard::Done(pages) => {
                for page in pages.clone() {
                    self.ram.set_spec(page, PageSpec::ZERO)?;
                }
                let Range { start: first, end } = pages;
                self.run(Command::Check { first, end })?;
                self.since_discard = 0;
                side.desk.set(Discard::Zero(first..end));
            }
            Discard::Zero(pages) => {
                self.since_discard += 1;
                if self.since_discard > CHUNKS_BEFORE_REFILL {
                    for page in pages.clone() {
                        self.ram.set_spec(page, self.plan.page(page))?;
                    }
                    let Range { start: first, end } = pages;
                    self.run(Command::Fill { first, end })?;
                    side.desk.set(Discard::None);
                }
            }
        }
        Ok(())
    }

    /// The pages that do not hold what they must: those that the guest found
    /// while it worked, and those that the VMM finds now.
    pub(crate) fn lost_pages(&self, work: &Work) -> anyhow::Result<BTreeSet<u64>> {
        let found = match &self.image {
            Some(image) => image.wrong_pages(&self.ram)?,
            None => self.unplanned_pages(work)?,
        };
        let mut lost: BTreeSet<u64> = found.into_iter().collect();
        for page in 0..self.plan.len() {
            if self.ram.is_marked_lost(page)? {
                lost.insert(page);
            }
        }
        Ok(lost)
    }

    /// The pages that do not hold what they must.
    fn unplanned_pages(&self, work: &Work) -> anyhow::Result<Vec<u64>> {
        let expected = self.expected(work);
        wrong_pages(&self.ram, |page| expected[as_step(page)])
    }

    /// What each page must hold, as the VMM works it out from the plan and from the
    /// commands it gave.
    pub(crate) fn expected(&self, work: &Work) -> Vec<PageSpec> {
        let mut expected = self.plan.pages.clone();
        for (slice, increments) in (0..).zip(&self.increments) {
            for place in work.lockstep.places(slice) {
                let page = self.plan.lockstep[as_step(place)];
                expected[as_step(page)].counter = *increments;
            }
        }
        let (discarded, now) = match self.side.desk.state() {
            Discard::Zero(pages) => (pages, PageSpec::ZERO),
            Discard::Granted(pages) | Discard::Done(pages) => (pages, SKIPPED),
            Discard::None | Discard::Asked(_) => (0..0, SKIPPED),
        };
        for page in discarded {
            expected[as_step(page)] = now;
        }
        expected
    }

    /// Guest-physical pages that are rewritten.
    pub(crate) fn rewritten_pages(&self) -> &[u64] {
        &self.plan.lockstep
    }

    /// Its number.
    pub(crate) const fn index(&self) -> usize {
        self.index
    }

    /// What others see of it.
    pub(crate) const fn side(&self) -> &Arc<GuestSide> {
        &self.side
    }

    /// Its machine, if it has one.
    pub(crate) fn machine(&self) -> Option<Arc<SlottedVm>> {
        self.cpu.machine()
    }

    /// The guest's memory.
    pub(crate) const fn ram(&self) -> &Ram {
        &self.ram
    }
}

/// A page number or count as an index: what it counts is held in memory.
fn as_step(number: u64) -> usize {
    usize::try_from(number).expect("pages of a guest can be counted")
}

/// How long to rest after having worked for `worked`.
pub(crate) fn rest_after(worked: Duration, busy_percent: u32) -> Duration {
    worked * (100 - busy_percent) / busy_percent
}
