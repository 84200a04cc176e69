//! The end of a region: of one that leaves, and of one that others have replaced.

use std::sync::Arc;

use super::Ksm;
use crate::backend::{Backend, Memory};
use crate::fault::{self, Step};
use crate::region::{Region, RegionGuard};
use crate::sync::ThreadId;
use crate::unshare;

/// A region that does not come back. What is left to be done for it is done when
/// this is dropped.
#[derive(Debug)]
#[must_use = "the region goes when this is dropped"]
pub(super) struct Departure<'g, B: Backend> {
    ksm: &'g Ksm<B>,
    region: &'g Arc<Region<B>>,
    /// There until it is dropped.
    guard: Option<RegionGuard<'g, B>>,
}

impl<B: Backend> Drop for Departure<'_, B> {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.ksm.depart(self.region, guard);
        }
    }
}

/// A region that is out of the layout. It comes back if this is dropped.
#[derive(Debug)]
#[must_use = "the region comes back when this is dropped"]
pub(super) struct Leave<'g, B: Backend> {
    ksm: &'g Ksm<B>,
    region: &'g Arc<Region<B>>,
}

impl<B: Backend> Drop for Leave<'_, B> {
    fn drop(&mut self) {
        self.ksm.retired.cancel(&self.ksm.layout, self.region);
    }
}

impl<'g, B: Backend> Leave<'g, B> {
    /// It does not come back: its pages are out of our hands.
    pub(super) fn for_good(self, guard: RegionGuard<'g, B>) -> Departure<'g, B> {
        self.region.go();
        let departure = Departure::new(self.ksm, self.region, guard);
        std::mem::forget(self);
        departure
    }
}

impl<'g, B: Backend> Departure<'g, B> {
    pub(super) const fn new(
        ksm: &'g Ksm<B>,
        region: &'g Arc<Region<B>>,
        guard: RegionGuard<'g, B>,
    ) -> Self {
        Self {
            ksm,
            region,
            guard: Some(guard),
        }
    }

    /// Ends it.
    pub(super) fn finish(self) {
        if let Some(guard) = &self.guard {
            self.ksm.give_up_pages(self.region, guard);
        }
        fault::point(Step::Gone);
    }
}

impl<B: Backend> Ksm<B> {
    /// Takes a region that is claimed out of the layout; `None` if it was not there.
    pub(super) fn leave<'g>(&'g self, region: &'g Arc<Region<B>>) -> Option<Leave<'g, B>> {
        let begun = self.retired.begin(&self.layout, region);
        begun.then_some(Leave { ksm: self, region })
    }

    /// Does what is left to be done for a region that does not come back. May be
    /// begun anew at every step.
    fn depart(&self, region: &Arc<Region<B>>, guard: RegionGuard<'_, B>) {
        self.give_up_pages(region, &guard);
        guard.memory().detach();
        drop(guard);
        self.retired.end(region);
    }

    fn give_up_pages(&self, region: &Arc<Region<B>>, guard: &RegionGuard<'_, B>) {
        self.retired.replace_by_parts(&self.layout, region);
        if !region.is_gone() {
            // They have moved.
            unshare::give_up(guard);
            region.go();
        }
        region.abandon();
        let (pages, domain) = (region.linear_range(), &region.domain);
        domain.anon_vmas.remove(&region.anon_vma, pages, region.id);
    }

    /// Ends what a thread was taking away that is gone for good: what can come back
    /// does. Returns how many leases it held.
    pub(super) fn depart_after(&self, dead: ThreadId) -> u64 {
        let mut leases = 0;
        for region in self.retired.left_by(dead) {
            let guard = region.evict(dead);
            if let Some(guard) = &guard {
                guard.land();
                leases += 1;
            }
            match guard {
                _ if self.retired.can_come_back(&region) => {
                    self.retired.cancel(&self.layout, &region);
                }
                Some(guard) => self.depart(&region, guard),
                // It has given up the lease at last.
                None => self.retired.end(&region),
            }
            region.unclaim_after(dead);
        }
        leases
    }
}
