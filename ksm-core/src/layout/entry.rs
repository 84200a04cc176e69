//! How regions come that were not there: not while the engine is held still.
//!
//! A mark in the registry, whose lock who enters a region takes anyway: so those who
//! do so at a time do not wait for one another's turn.

use std::sync::Arc;

use super::{Layout, Registry};
use crate::backend::Backend;
use crate::error::Error;
use crate::region::{Region, RegionId, SpaceId};
use crate::sync::{MutexGuard, ThreadId, current};

impl<B: Backend> Layout<B> {
    /// Enters a region that `make` makes of its number, if its space is there still, as
    /// soon as no other thread keeps regions from coming. To be called without any
    /// region's lease: whoever does that waits for those.
    pub(crate) fn add_region(
        &self,
        space: SpaceId,
        make: impl FnOnce(RegionId) -> Result<Arc<Region<B>>, Error>,
    ) -> Result<Arc<Region<B>>, Error> {
        // Dropped after the lock: it may own memory, which is given up by host calls.
        let mut make = Some(make);
        let registry = self.open_registry()?;
        self.add_to(&registry, space, &mut make)
    }

    /// The same, for who has a lease; `None` if it is to be
    /// [waited](Self::wait_until_open) for, without the lease.
    pub(crate) fn try_add_region(
        &self,
        space: SpaceId,
        make: impl FnOnce(RegionId) -> Result<Arc<Region<B>>, Error>,
    ) -> Result<Option<Arc<Region<B>>>, Error> {
        let mut make = Some(make);
        let registry = self.registry.lock();
        match registry.is_open()? {
            true => self.add_to(&registry, space, &mut make).map(Some),
            false => Ok(None),
        }
    }

    /// Waits until no other thread keeps regions from coming.
    pub(crate) fn wait_until_open(&self) -> Result<(), Error> {
        self.open_registry().map(drop)
    }

    /// Keeps regions from coming, until the calling thread opens it again. Those that
    /// were coming have come. It is not closed.
    pub(crate) fn close(&self) {
        self.registry.lock().closed_by = Some(current().id());
    }

    /// Lets regions come that `thread` kept from it. Returns whether it did.
    pub(crate) fn open_after(&self, thread: ThreadId) -> bool {
        let mut registry = self.registry.lock();
        let was_closed = registry.closed_by.take_if(|by| *by == thread).is_some();
        drop(registry);
        self.opened.notify_all();
        was_closed
    }

    fn open_registry(&self) -> Result<MutexGuard<'_, Registry<B>>, Error> {
        let mut registry = self.registry.lock();
        while !registry.is_open()? {
            registry = self.opened.wait(registry);
        }
        Ok(registry)
    }

    fn add_to(
        &self,
        registry: &Registry<B>,
        space: SpaceId,
        make: &mut Option<impl FnOnce(RegionId) -> Result<Arc<Region<B>>, Error>>,
    ) -> Result<Arc<Region<B>>, Error> {
        if !registry.spaces.contains_key(&space) {
            return Err(Error::NoSpace(space));
        }
        let make = make.take().expect("nobody else takes it");
        self.regions.edit(|regions| {
            let made = make(RegionId(regions.next));
            let regions = made.as_ref().ok().map(|region| {
                let mut regions = regions.clone();
                regions.next = regions.next.max(region.id.0 + 1);
                regions.enter(Arc::clone(region));
                regions
            });
            (regions, made)
        })
    }
}

impl<B: Backend> Registry<B> {
    /// Whether regions may come now.
    ///
    /// # Errors
    /// [`Error::Quiesced`] when the calling thread keeps them from it.
    fn is_open(&self) -> Result<bool, Error> {
        match self.closed_by {
            Some(thread) if thread == current().id() => Err(Error::Quiesced),
            closed_by => Ok(closed_by.is_none()),
        }
    }
}
