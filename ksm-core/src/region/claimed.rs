//! [`Claimed`]: the right to take a region away or to put others in its place.

use super::Region;
use crate::backend::Backend;
use crate::fault::{self, Step};
use crate::sync::{ThreadId, current};

/// Who has claimed a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claimant {
    by: ThreadId,
    /// There are no more pin guards.
    closed: bool,
}

/// A region that nobody else may take away or replace. It stays if this is dropped.
#[derive(Debug)]
#[must_use = "the region stays when this is dropped"]
pub(crate) struct Claimed<'r, B: Backend>(&'r Region<B>);

impl<B: Backend> Drop for Claimed<'_, B> {
    fn drop(&mut self) {
        self.0.unclaim();
    }
}

impl<B: Backend> Claimed<'_, B> {
    /// Lets there be no more pin guards, unless there are some now. Returns
    /// whether there are none.
    pub(crate) fn close(&self) -> bool {
        let mut claimant = self.0.claimant.lock();
        let closed = self.0.pins.close(self.0.linear_range());
        if let Some(claimant) = claimant.as_mut() {
            claimant.closed = closed;
        }
        closed
    }

    /// It does not stay, whatever happens: nobody else gets it any more.
    pub(crate) fn for_good(self) {
        std::mem::forget(self);
    }
}

impl<B: Backend> Region<B> {
    /// Of two who are after a region, one gets it.
    pub(crate) fn claim(&self) -> Option<Claimed<'_, B>> {
        {
            let mut claimant = self.claimant.lock();
            if claimant.is_some() {
                return None;
            }
            *claimant = Some(Claimant {
                by: current().id(),
                closed: false,
            });
        }
        let claimed = Claimed(self);
        fault::point(Step::Claimed);
        Some(claimed)
    }

    /// Undoes a claim of a thread that is gone.
    pub(crate) fn unclaim_after(&self, dead: ThreadId) {
        let by = self.claimant.lock().map(|claimant| claimant.by);
        if by == Some(dead) {
            self.unclaim();
        }
    }

    fn unclaim(&self) {
        let mut claimant = self.claimant.lock();
        if claimant.take().is_some_and(|claimant| claimant.closed) {
            self.pins.reopen(self.linear_range());
        }
    }
}
