//! Regions: stretches of guest memory, each with a lease of its own.
//!
//! Whatever changes a region's pages holds its lease, as a [`RegionGuard`]: the
//! guard's methods are the only way to the backend's calls that change a page,
//! so that walking a region without its lease does not compile. Reading records
//! (counters, `explain`) needs no lease.
//!
//! The lease carries a [`Flight`]: what its holder has under way, written down
//! before it is done. A holder that unwinds, and one that vanishes, are ended by
//! the same function, [`RegionGuard::land`].

mod adoption;
mod anon_vma;
mod claimed;
mod flight;
mod guard;
mod holds;
mod ids;
mod interval;
mod lease;
mod page_table;
mod pins;
mod place;

pub(crate) use adoption::Adoption;
pub(crate) use anon_vma::{AnonVma, AnonVmaId, AnonVmas, WalkCost};
use claimed::Claimant;
pub(crate) use flight::{Change, Flight, Pending};
pub(crate) use guard::RegionGuard;
pub use ids::{DomainId, RegionId, SpaceId};
#[cfg(any(test, feature = "internals"))]
pub(crate) use interval::IntervalTree;
pub(crate) use lease::{HeldByThisThread, Lease, LeaseGuard};
pub(crate) use page_table::{Class, PageTable, Record, is_seam};
pub use pins::PinGuard;
pub(crate) use pins::PinnedPages;
use pins::Pins;
pub(crate) use place::Place;

use std::sync::Arc;

use crate::backend::{Backend, Memory, RegionOptions};
use crate::domain::Domain;
use crate::error::Error;
use crate::outcome::{Outcome, OutcomeCounts};
use crate::page::{PageIndex, PageRange};
use crate::stats::MemoryStats;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, ThreadId};

/// One registered stretch of guest memory.
#[derive(Debug)]
pub(crate) struct Region<B: Backend> {
    pub(crate) id: RegionId,
    pub(crate) space: SpaceId,
    pub(crate) domain: Arc<Domain<B>>,
    pub(crate) options: RegionOptions,
    pub(crate) anon_vma: Arc<AnonVma>,
    /// The linear index of its first page in the anon_vma.
    pgoff: PageIndex,
    pins: Arc<Pins>,
    memory: B::Memory,
    lease: Lease<Flight>,
    pages: Mutex<PageTable>,
    tally: Mutex<Tally>,
    /// Its pages are another region's now, or nobody's.
    gone: AtomicBool,
    /// Somebody is taking it away or replacing it.
    claimant: Mutex<Option<Claimant>>,
}

/// Why the lease of a region cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoLease {
    HeldByThisThread,
    Gone(RegionId),
}

impl From<HeldByThisThread> for NoLease {
    fn from(_: HeldByThisThread) -> Self {
        Self::HeldByThisThread
    }
}

impl From<HeldByThisThread> for Error {
    fn from(_: HeldByThisThread) -> Self {
        Self::Quiesced
    }
}

impl From<NoLease> for Error {
    fn from(why: NoLease) -> Self {
        match why {
            NoLease::HeldByThisThread => Self::Quiesced,
            NoLease::Gone(region) => Self::NoRegion(region),
        }
    }
}

/// What was counted of a region since it was registered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) cow_breaks: u64,
    pub(crate) vmas_given_back: u64,
    pub(crate) pages_given_back: u64,
    pub(crate) pages_scanned: u64,
    pub(crate) outcomes: OutcomeCounts,
}

impl<B: Backend> Region<B> {
    pub(crate) fn new(
        id: RegionId,
        space: SpaceId,
        domain: Arc<Domain<B>>,
        memory: B::Memory,
        options: RegionOptions,
        anon_vma: Arc<AnonVma>,
    ) -> Self {
        Self {
            id,
            space,
            domain,
            options,
            anon_vma,
            pgoff: PageIndex(0),
            pins: Arc::default(),
            pages: Mutex::new(PageTable::new(memory.len())),
            memory,
            lease: Lease::new(),
            tally: Mutex::default(),
            gone: AtomicBool::new(false),
            claimant: Mutex::default(),
        }
    }

    /// What is to take care of a part of this region in its place, with `memory`.
    /// The records of the part are given to it then.
    pub(crate) fn part(&self, id: RegionId, memory: B::Memory, first: PageIndex) -> Self {
        Self {
            pgoff: self.pgoff.plus(first.0),
            pins: Arc::clone(&self.pins),
            ..Self::new(
                id,
                self.space,
                Arc::clone(&self.domain),
                memory,
                self.options,
                Arc::clone(&self.anon_vma),
            )
        }
    }

    /// What a clone of this region starts from: no page yet, at the same linear
    /// indexes.
    pub(crate) fn clone_of(
        &self,
        id: RegionId,
        space: SpaceId,
        memory: B::Memory,
        options: RegionOptions,
    ) -> Self {
        Self {
            pgoff: self.pgoff,
            ..Self::new(
                id,
                space,
                Arc::clone(&self.domain),
                memory,
                options,
                Arc::clone(&self.anon_vma),
            )
        }
    }

    /// All pages.
    pub(crate) fn range(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.memory.len())
    }

    /// Its memory, for those who help the holder of the lease.
    pub(crate) const fn memory(&self) -> &B::Memory {
        &self.memory
    }

    /// A page by its anon_vma and linear index.
    pub(crate) fn place(&self, page: PageIndex) -> Place {
        Place::new(self.anon_vma.id, page.plus(self.pgoff.0))
    }

    /// The page of that linear index, if it is here.
    pub(crate) fn page_at(&self, pgoff: PageIndex) -> Option<PageIndex> {
        let page = PageIndex(pgoff.0.checked_sub(self.pgoff.0)?);
        self.range().contains(page).then_some(page)
    }

    /// All pages, by their linear index.
    pub(crate) fn linear_range(&self) -> PageRange {
        PageRange::new(self.pgoff, self.memory.len())
    }

    /// The longest run that can be stopped at once, in pages.
    pub(crate) fn max_stop(&self) -> u64 {
        self.memory.max_stop()
    }

    /// The pages of `within` that guards hold now.
    pub(crate) fn pinned(&self, within: PageRange) -> PinnedPages {
        let pgoff = self.pgoff.0;
        self.pins.held(within.plus(pgoff)).minus(pgoff)
    }

    /// A pin guard of `pages`; `None` if the region is leaving. To be called under
    /// its lease.
    pub(crate) fn pin(&self, pages: PageRange) -> Option<PinGuard> {
        self.pins.pin(self.id, pages, pages.plus(self.pgoff.0))
    }

    /// Whether its mappings can be given back at all.
    pub(crate) fn gives_back(&self) -> bool {
        self.options.dma_guarded && self.memory.rejoins()
    }

    /// Takes the lease, waiting in turn.
    pub(crate) fn lock(&self) -> Result<RegionGuard<'_, B>, NoLease> {
        self.if_here(self.guard(self.lease.lock()?))
    }

    /// Takes the lease if it is free.
    pub(crate) fn try_lock(&self) -> Result<Option<RegionGuard<'_, B>>, NoLease> {
        let Some(lease) = self.lease.try_lock()? else {
            return Ok(None);
        };
        self.if_here(self.guard(lease)).map(Some)
    }

    fn if_here<'a>(&'a self, guard: RegionGuard<'a, B>) -> Result<RegionGuard<'a, B>, NoLease> {
        match self.is_gone() {
            false => Ok(guard),
            true => Err(NoLease::Gone(self.id)),
        }
    }

    /// Its pages are not its own from here on. Whoever waits for its lease, or comes
    /// to take it, is told so: to be called by its holder.
    pub(crate) fn go(&self) {
        self.gone.store(true, Ordering::Release);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Whether somebody has the lease now, and may have pages reserved for frames
    /// whose records do not say so yet.
    pub(crate) fn is_busy(&self) -> bool {
        self.lease.is_held()
    }

    /// Takes the lease from a thread that is gone, if that has it.
    pub(crate) fn evict(&self, dead: ThreadId) -> Option<RegionGuard<'_, B>> {
        Some(self.guard(self.lease.evict(dead)?))
    }

    const fn guard<'a>(&'a self, lease: LeaseGuard<'a, Flight>) -> RegionGuard<'a, B> {
        RegionGuard {
            region: self,
            lease,
            layout: None,
        }
    }

    /// The records, to be read. Held only for short, never across a host call.
    pub(crate) fn pages(&self) -> MutexGuard<'_, PageTable> {
        self.pages.lock()
    }

    pub(crate) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock()
    }

    /// Writes down what became of a page, unless its class says more.
    pub(crate) fn note_outcome(&self, page: PageIndex, outcome: Outcome) {
        let mut pages = self.pages();
        pages.update(page, |record| {
            if record.class == Class::Unshared && outcome != Outcome::Unchanged {
                record.class = Class::Volatile;
            }
            record.outcome = outcome;
        });
    }

    /// Gives up what its mappings show and name, when they are out of our hands.
    pub(crate) fn abandon(&self) {
        let pages = std::mem::take(&mut *self.pages());
        let mut leaves = false;
        for (_, record) in pages.seen(self.range()) {
            let item = match record.class {
                Class::Merged(item) => Some(item),
                _ => None,
            };
            if let Some(frame) = record.frame {
                self.domain.abandon(frame, item);
                leaves |= item.is_some();
            }
        }
        if leaves {
            self.domain.sweep();
        }
    }

    /// The same, where pages that are still merged are somebody's: what they map
    /// stays for good.
    pub(crate) fn forsake(&self) {
        let pages = std::mem::take(&mut *self.pages());
        for (_, record) in pages.seen(self.range()) {
            match (record.frame, record.class) {
                (Some(frame), Class::Merged(_)) => self.domain.forsake(frame),
                (Some(frame), _) => self.domain.abandon(frame, None),
                (None, _) => {}
            }
        }
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let (counts, vmas) = {
            let pages = self.pages();
            (pages.counts(), pages.seams())
        };
        let tally = *self.tally();
        let lease = self.lease.counts();
        MemoryStats {
            pages: self.memory.len(),
            ksm_rmap_items: counts.seen,
            ksm_merging_pages: counts.merged,
            ksm_zero_pages: counts.zero,
            pages_unshared: counts.unshared,
            pages_volatile: counts.volatile,
            pages_copied: counts.copied,
            cow_breaks: tally.cow_breaks,
            vmas,
            vmas_given_back: tally.vmas_given_back,
            pages_given_back: tally.pages_given_back,
            lease_waits: lease.waits,
            lease_refusals: lease.refusals,
            outcomes: tally.outcomes,
        }
    }
}
