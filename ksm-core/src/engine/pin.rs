//! Announcing DMA.

use super::Ksm;
use crate::backend::Backend;
use crate::error::Error;
use crate::page::PageRange;
use crate::region::{PinGuard, RegionId};
use crate::unshare;

impl<B: Backend> Ksm<B> {
    /// Announces DMA: until the guard is dropped no page of `range` is stopped,
    /// merged, zeroed or replaced. Pages that are merged get copies first, so
    /// that device and guest see the same page from here on; zero pages stay.
    ///
    /// To be taken *before* the device pins the pages, and kept until it is
    /// through with them. Guards may overlap. Needed where the region is
    /// [`dma_guarded`](crate::RegionOptions::dma_guarded); elsewhere the host's
    /// own pins are enough.
    ///
    /// Waits for what is under way in the region: see
    /// [`LockPolicy::PerRegion`](crate::LockPolicy::PerRegion).
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::OutOfRange`], [`Error::Quiesced`];
    /// [`Error::StillShared`] when the host refuses copies: there is no guard
    /// then.
    pub fn pin(&self, region: RegionId, range: PageRange) -> Result<PinGuard, Error> {
        let region = self.region_with(region, range)?;
        let guard = {
            let _lease = region.lock()?;
            let guard = region.pin(range);
            guard.ok_or(Error::NoRegion(region.id))?
        };
        unshare::unmerge(&region, range, self.config.parallel_pages)?;
        Ok(guard)
    }
}
