//! [`Nursery`]: regions that are being made. Nobody knows of them, so the nursery
//! does: were they only on the stack of the thread that makes one, and that thread
//! vanished, their memory would stay attached for ever, and the frames that it maps
//! counted.

use std::sync::Arc;

use crate::backend::{Backend, Memory};
use crate::fault::{self, Step};
use crate::region::{Region, RegionId};
use crate::sync::{Mutex, ThreadId, current};
use crate::unshare;

/// Regions that nobody knows of yet.
#[derive(Debug)]
pub(crate) struct Nursery<B: Backend>(Mutex<Vec<Entry<B>>>);

#[derive(Debug)]
struct Entry<B: Backend> {
    region: Arc<Region<B>>,
    origin: Origin,
    /// Who makes it, or ends it.
    by: ThreadId,
}

/// What becomes of a region's bytes if it does not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// They are those of another: dropped.
    Cloned,
    /// They are a guest's: every page keeps them, by a copy where it maps a frame.
    Restored,
}

/// A region that is being made. If this is dropped before it is
/// [ready](Nursling::ready), it leaves nothing behind.
#[derive(Debug)]
#[must_use = "the region comes to nothing when this is dropped"]
pub(crate) struct Nursling<'n, B: Backend> {
    nursery: &'n Nursery<B>,
    region: Arc<Region<B>>,
}

impl<B: Backend> Drop for Nursling<'_, B> {
    fn drop(&mut self) {
        self.nursery.end(self.region.id);
    }
}

impl<B: Backend> Nursling<'_, B> {
    pub(crate) fn region(&self) -> &Arc<Region<B>> {
        &self.region
    }

    /// The region, complete, for whoever enters it in the layout. Once it is in the
    /// layout the nursery does nothing to it: to be called in the same step.
    pub(crate) fn ready(&self) -> Arc<Region<B>> {
        self.nursery.take(self.region.id);
        Arc::clone(&self.region)
    }
}

impl<B: Backend> Default for Nursery<B> {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<B: Backend> Nursery<B> {
    pub(crate) fn enter(&self, region: Region<B>, origin: Origin) -> Nursling<'_, B> {
        let region = Arc::new(region);
        self.0.lock().push(Entry {
            region: Arc::clone(&region),
            origin,
            by: current().id(),
        });
        let nursling = Nursling {
            nursery: self,
            region,
        };
        fault::point(Step::Nursed);
        nursling
    }

    /// Ends what a thread was making that is gone for good. Returns how many leases
    /// it held.
    pub(crate) fn end_after(&self, dead: ThreadId) -> u64 {
        let left: Vec<_> = {
            let mut entries = self.0.lock();
            let left = entries.iter_mut().filter(|entry| entry.by == dead);
            left.map(|entry| {
                entry.by = current().id();
                Arc::clone(&entry.region)
            })
            .collect()
        };
        let mut leases = 0;
        for region in left {
            if let Some(guard) = region.evict(dead) {
                guard.land();
                leases += 1;
            }
            self.end(region.id);
        }
        leases
    }

    /// Ends a region that did not come about; one that did is not here.
    fn end(&self, id: RegionId) {
        let found = {
            let entries = self.0.lock();
            let found = entries.iter().find(|entry| entry.region.id == id);
            found.map(|entry| (Arc::clone(&entry.region), entry.origin))
        };
        let Some((region, origin)) = found else {
            return;
        };
        let guard = region.lock().expect("nobody else knows of it");
        match origin {
            Origin::Cloned => unshare::give_up(&guard),
            Origin::Restored => unshare::keep_bytes(&guard),
        }
        let (pages, domain) = (region.linear_range(), &region.domain);
        domain.anon_vmas.remove(&region.anon_vma, pages, id);
        guard.memory().detach();
        self.take(id);
    }

    fn take(&self, id: RegionId) {
        self.0.lock().retain(|entry| entry.region.id != id);
    }
}
