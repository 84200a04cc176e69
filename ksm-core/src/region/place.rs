//! [`Place`]: a page of a region, in 8 bytes.

use std::num::NonZeroU64;

use crate::page::PageIndex;
use crate::region::RegionId;

/// Bits for the page: regions of up to 4 PiB. The rest, 16 million regions in
/// the life of an engine.
const PAGE_BITS: u32 = 40;

/// A page of a region, by number: 24 bits of region, 40 of page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(NonZeroU64);

impl Place {
    /// The most pages that a region may have.
    pub(crate) const MAX_PAGES: u64 = (1 << PAGE_BITS) - 1;
    /// One past the highest number that a region may have.
    pub(crate) const MAX_REGIONS: u32 = 1 << (u64::BITS - PAGE_BITS);

    /// # Panics
    /// In debug builds, if the page or the region is out of range: such a region
    /// is not registered.
    pub(crate) fn new(region: RegionId, page: PageIndex) -> Self {
        debug_assert!(page.0 < Self::MAX_PAGES && region.0 < Self::MAX_REGIONS);
        // One more than the page, so that no place is 0.
        let packed = u64::from(region.0) << PAGE_BITS | (page.0 + 1);
        Self(NonZeroU64::new(packed).unwrap_or(NonZeroU64::MAX))
    }

    /// The region and the page.
    pub(crate) fn parts(self) -> (RegionId, PageIndex) {
        let packed = self.0.get();
        let region = u32::try_from(packed >> PAGE_BITS).expect("24 bits fit");
        (RegionId(region), PageIndex((packed & Self::MAX_PAGES) - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_packing() {
        let last_page = PageIndex(Place::MAX_PAGES - 1);
        let last_region = RegionId(Place::MAX_REGIONS - 1);
        for region in [RegionId(0), last_region] {
            for page in [PageIndex(0), last_page] {
                assert_eq!(Place::new(region, page).parts(), (region, page));
            }
        }
        assert_eq!(size_of::<Option<Place>>(), 8);
    }
}
