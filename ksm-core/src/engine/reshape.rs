//! Regions that are split or go in part.

use std::sync::Arc;

use super::Ksm;
use super::depart::Departure;
use crate::backend::{Backend, Memory};
use crate::error::Error;
use crate::fault::{self, Step};
use crate::page::{PageIndex, PageRange};
use crate::region::RegionId;
use crate::trace;

impl<B: Backend> Ksm<B> {
    /// Cuts a region in two, the second beginning with `page`, which is page 0
    /// there: two regions with leases of their own take its place, merged pages and
    /// pin guards as they are. What was counted of it is counted among what is gone.
    ///
    /// Waits for what is under way in the region: see
    /// [`LockPolicy::PerRegion`](crate::LockPolicy::PerRegion).
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
        let claimed = whole.claim().ok_or(Error::NoRegion(region))?;
        let (first, rest) = guard.memory().split(page)?;
        let ids = [(); 2].map(|()| self.layout.reserve_region());
        let parts = [
            whole.part(ids[0], first, PageIndex(0)),
            whole.part(ids[1], rest, page),
        ];
        self.retired.part(&whole, parts.map(Arc::new), page);
        claimed.for_good();
        let departure = Departure::new(self, &whole, guard);
        fault::point(Step::Parted);
        self.retired.replace_by_parts(&self.layout, &whole);
        fault::point(Step::Replaced);
        departure.finish();
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

    /// The regions of an address space, in the order of their numbers: in which they
    /// were registered, or in which it was begun to clone them or to take them over.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn regions_of(&self, space: crate::SpaceId) -> Result<Vec<RegionId>, Error> {
        let regions = self.layout.regions_of(space)?;
        Ok(regions.iter().map(|region| region.id).collect())
    }
}
