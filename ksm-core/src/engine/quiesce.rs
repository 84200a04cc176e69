//! Holding the engine still, and ending what a thread that is gone had under way.

use std::sync::Arc;

use super::Ksm;
use super::pass::Pass;
use crate::backend::{Backend, Memory};
use crate::error::Error;
use crate::region::{NoLease, Region};
use crate::sync::{ThreadId, current};
use crate::trace;

/// Nothing is stopped or out, and nothing will be, while this lives: see
/// [`Ksm::quiesce`].
#[derive(Debug)]
#[must_use = "the engine goes on when this is dropped"]
pub struct Quiesced<'a, B: Backend> {
    ksm: &'a Ksm<B>,
    holder: ThreadId,
    regions: Vec<Arc<Region<B>>>,
}

impl<B: Backend> Drop for Quiesced<'_, B> {
    fn drop(&mut self) {
        for region in &self.regions {
            drop(region.evict(self.holder));
        }
        self.ksm.layout.open_after(self.holder);
        drop(self.ksm.layout_lock.evict(self.holder));
        drop(self.ksm.scanner.evict(self.holder));
        trace::resumed();
    }
}

impl<B: Backend> Quiesced<'_, B> {
    /// Waits for what is under way in a region, and holds it, unless it is held.
    fn hold(&mut self, region: Arc<Region<B>>) -> Result<(), NoLease> {
        if self.regions.iter().any(|held| Arc::ptr_eq(held, &region)) {
            return Ok(());
        }
        match region.lock() {
            Ok(guard) => {
                guard.memory().rest();
                std::mem::forget(guard);
            }
            // Nothing of it is under way, and nothing will be.
            Err(NoLease::Gone(_)) => return Ok(()),
            Err(held) => return Err(held),
        }
        self.regions.push(region);
        Ok(())
    }
}

impl<B: Backend> Ksm<B> {
    /// Waits until nothing is stopped or out, and holds the engine still: until the
    /// guard is dropped no pass goes on, no page of a registered region is changed by
    /// it, and no region is registered. For snapshots, migration, fork, and handing
    /// descriptors to others.
    ///
    /// Calls of other threads that would do any of this wait; those of this thread
    /// return [`Error::Quiesced`]. Not held is memory that is on its way to be
    /// registered: attaching it goes on, and so does [`Ksm::take_over`] with what it
    /// was given before, up to where it would be registered.
    ///
    /// # Errors
    /// [`Error::Quiesced`] when this thread holds it still already.
    pub fn quiesce(&self) -> Result<Quiesced<'_, B>, Error> {
        // The leases are kept by forgetting their guards, and freed by taking
        // them over from this thread.
        std::mem::forget(self.scanner.lock()?);
        let mut quiesced = Quiesced {
            ksm: self,
            holder: current().id(),
            regions: Vec::new(),
        };
        if let Some(layout) = self.layout_turn()? {
            std::mem::forget(layout);
        }
        // Before any region: there must be an end to those that are waited for.
        self.layout.close();
        loop {
            // Regions that are being taken away have pages stopped, too.
            let (regions, edition) = self.retired.all(&self.layout);
            for region in regions {
                quiesced.hold(region)?;
            }
            // What took the place of others meanwhile, or came back, is not held yet.
            if self.layout.is_last(edition) {
                break;
            }
        }
        trace::quiesced(quiesced.regions.len());
        Ok(quiesced)
    }

    /// Ends what a thread had under way that is gone for good without having
    /// unwound: whatever it had stopped or out runs on, its leases are free again,
    /// memory of a region that it was making is nobody's, and a region that it was
    /// changing is as it was, or as it was to be. Returns how many leases it held.
    /// The thread must never run again.
    pub fn recover(&self, dead: ThreadId) -> u64 {
        let mut leases = self.depart_after(dead) + self.nursery.end_after(dead);
        // Those too that others are taking away: they wait for what is under way there.
        let (regions, _) = self.retired.all(&self.layout);
        for region in regions {
            if let Some(guard) = region.evict(dead) {
                guard.land();
                leases += 1;
            }
            region.unclaim_after(dead);
        }
        for domain in self.layout.domains() {
            domain.sweep_after(dead);
        }
        self.vmas.pledges.drop_after(dead);
        leases += u64::from(self.layout.open_after(dead));
        leases += u64::from(self.layout_lock.evict(dead).is_some());
        if let Some(scanner) = self.scanner.evict(dead) {
            *scanner.journal() = Pass::default();
            leases += 1;
        }
        trace::recovered(leases);
        leases
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
