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
        drop(self.ksm.layout_lock.evict(self.holder));
        drop(self.ksm.scanner.evict(self.holder));
        trace::resumed();
    }
}

impl<B: Backend> Ksm<B> {
    /// Waits until nothing is stopped or out, and holds the engine still: no
    /// pass goes on and no page is changed by it until the guard is dropped. For
    /// snapshots, migration, fork, and handing descriptors to others.
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
        loop {
            let mut again = false;
            let edition = self.layout.regions();
            // Regions that are being taken away have pages stopped, too.
            let going = self.retired.going();
            for region in edition.iter().chain(&going) {
                if quiesced
                    .regions
                    .iter()
                    .any(|held| Arc::ptr_eq(held, region))
                {
                    continue;
                }
                match region.lock() {
                    Ok(guard) => {
                        guard.memory().rest();
                        std::mem::forget(guard);
                    }
                    // What took its place meanwhile is not held yet.
                    Err(NoLease::Gone(_)) => {
                        again = true;
                        continue;
                    }
                    Err(held) => return Err(held.into()),
                }
                quiesced.regions.push(Arc::clone(region));
            }
            if !again {
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
        for region in self.layout.regions().iter() {
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
        leases += u64::from(self.layout_lock.evict(dead).is_some());
        if let Some(scanner) = self.scanner.evict(dead) {
            *scanner.journal() = Pass::default();
            leases += 1;
        }
        trace::recovered(leases);
        leases
    }
}
