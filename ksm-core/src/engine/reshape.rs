//! Regions that are split or go in part.

use super::Ksm;
use crate::backend::{Backend, Memory};
use crate::error::Error;
use crate::page::{PageIndex, PageRange};
use crate::region::{Region, RegionId};
use crate::trace;

impl<B: Backend> Ksm<B> {
    /// Cuts a region in two, the second beginning with `page`, which is page 0
    /// there: two regions with leases of their own take its place, merged pages and
    /// pin guards as they are. What was counted of it is counted among what is gone.
    ///
    /// Waits for what is under way in the region: at most one window or run.
    ///
    /// # Errors
    /// [`Error::NoRegion`]; [`Error::OutOfRange`] when `page` is its first page or
    /// not in it; [`Error::Backend`]: the region is as it was.
    pub fn split(&self, region: RegionId, page: PageIndex) -> Result<[RegionId; 2], Error> {
        let whole = self.region_with(region, PageRange::one(page))?;
        if page == PageIndex(0) {
            return Err(Error::OutOfRange {
                region,
                range: PageRange::new(page, 0),
                pages: whole.range().len(),
            });
        }
        let _layout = self.layout_turn()?;
        let guard = whole.lock()?;
        // Of two who are after a region, one gets it.
        if !self.retired.begin(&self.layout, &whole) {
            return Err(Error::NoRegion(region));
        }
        let (first, rest) = match guard.memory().split(page) {
            Ok(parts) => parts,
            Err(error) => {
                self.retired.cancel(&self.layout, &whole);
                return Err(error.into());
            }
        };
        let ids = [(); 2].map(|()| self.layout.reserve_region());
        let mut table = std::mem::take(&mut *whole.pages());
        let rest_of_table = table.split_off(page);
        let parts = [
            Region::part(&guard, ids[0], first, PageIndex(0), table),
            Region::part(&guard, ids[1], rest, page, rest_of_table),
        ];
        let linear = parts.each_ref().map(|part| (part.linear_range(), part.id));
        self.layout.enter_all(parts);
        whole
            .anon_vma
            .replace((whole.linear_range(), region), &linear);
        guard.leave();
        self.retired.end(&whole);
        trace::split(region, ids);
        Ok(ids)
    }

    /// Takes the pages of `range` out of care: the region is split around them and
    /// the part is [unregistered](Ksm::unregister). Returns the regions that are
    /// left of it, in order. To shrink a region, take its end.
    ///
    /// # Errors
    /// As [`Ksm::split`] and [`Ksm::unregister`]. The region may have been split
    /// then, and is whole in its parts: see [`Ksm::regions_of`].
    pub fn unregister_part(
        &self,
        region: RegionId,
        range: PageRange,
    ) -> Result<Vec<RegionId>, Error> {
        let pages = self.region_with(region, range)?.range();
        let mut left = Vec::new();
        let mut middle = region;
        if range.end < pages.end {
            let [front, behind] = self.split(middle, range.end)?;
            (middle, left) = (front, vec![behind]);
        }
        if range.start > pages.start {
            let [before, part] = self.split(middle, range.start)?;
            middle = part;
            left.insert(0, before);
        }
        self.unregister(middle)?;
        Ok(left)
    }

    /// The regions of an address space, in the order in which they came.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn regions_of(&self, space: crate::SpaceId) -> Result<Vec<RegionId>, Error> {
        let regions = self.layout.regions_of(space)?;
        Ok(regions.iter().map(|region| region.id).collect())
    }
}
