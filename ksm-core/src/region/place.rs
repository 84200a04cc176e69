//! [`Place`]: a page of an anon_vma, in 8 bytes.

use std::num::NonZeroU64;

use crate::page::PageIndex;
use crate::region::AnonVmaId;

/// Bits for the page: regions of up to 4 PiB. The rest, 16 million anon_vmas at
/// a time.
const PAGE_BITS: u32 = 40;

/// A page, by its anon_vma and its linear index in it (pgoff): 24 bits and 40.
/// It stays right when regions are moved, split or forked, which changes
/// addresses and names of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(NonZeroU64);

impl Place {
    /// The most pages that an anon_vma may have.
    pub(crate) const MAX_PAGES: u64 = (1 << PAGE_BITS) - 1;
    /// One past the highest number that an anon_vma may have.
    pub(crate) const MAX_ANON_VMAS: u32 = 1 << (u64::BITS - PAGE_BITS);

    /// # Panics
    /// In debug builds, if either is out of range: such a region is not
    /// registered.
    pub(crate) fn new(anon_vma: AnonVmaId, pgoff: PageIndex) -> Self {
        debug_assert!(pgoff.0 < Self::MAX_PAGES && anon_vma.0 < Self::MAX_ANON_VMAS);
        // One more than the page, so that no place is 0.
        let packed = u64::from(anon_vma.0) << PAGE_BITS | (pgoff.0 + 1);
        Self(NonZeroU64::new(packed).unwrap_or(NonZeroU64::MAX))
    }

    /// The anon_vma and the linear page index.
    pub(crate) fn parts(self) -> (AnonVmaId, PageIndex) {
        let packed = self.0.get();
        let anon_vma = u32::try_from(packed >> PAGE_BITS).expect("24 bits fit");
        (
            AnonVmaId(anon_vma),
            PageIndex((packed & Self::MAX_PAGES) - 1),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_packing() {
        let last_page = PageIndex(Place::MAX_PAGES - 1);
        let last = AnonVmaId(Place::MAX_ANON_VMAS - 1);
        for anon_vma in [AnonVmaId(0), last] {
            for page in [PageIndex(0), last_page] {
                assert_eq!(Place::new(anon_vma, page).parts(), (anon_vma, page));
            }
        }
        assert_eq!(size_of::<Option<Place>>(), 8);
    }
}
