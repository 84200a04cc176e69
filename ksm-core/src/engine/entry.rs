//! How regions come that were not there: not while the engine is held still.

use std::sync::Arc;

use super::Ksm;
use crate::backend::Backend;
use crate::error::Error;
use crate::region::{Region, RegionId, SpaceId};

impl<B: Backend> Ksm<B> {
    /// Enters a region that `make` makes of its number, as soon as the engine is not
    /// held still. To be called without any region's lease: whoever holds it still
    /// waits for those.
    pub(super) fn enter(
        &self,
        space: SpaceId,
        make: impl FnOnce(RegionId) -> Result<Arc<Region<B>>, Error>,
    ) -> Result<Arc<Region<B>>, Error> {
        let _entry = self.entry.lock()?;
        self.layout.add_region(space, make)
    }

    /// The same, for who has a lease; `None` if it is to be
    /// [waited](Ksm::wait_to_enter) for, without the lease.
    pub(super) fn try_enter(
        &self,
        space: SpaceId,
        make: impl FnOnce(RegionId) -> Result<Arc<Region<B>>, Error>,
    ) -> Result<Option<Arc<Region<B>>>, Error> {
        let Some(_entry) = self.entry.try_lock()? else {
            return Ok(None);
        };
        self.layout.add_region(space, make).map(Some)
    }

    /// Waits while the engine is held still by another thread.
    pub(super) fn wait_to_enter(&self) -> Result<(), Error> {
        drop(self.entry.lock()?);
        Ok(())
    }
}
