//! What a clone may spend of the budget of virtual memory areas, where memory is
//! to come to map frames without regard to what that saves: it is cloned, moved or
//! taken over.
//!
//! What that costs shows only as it is done, run by run, and the long runs may come
//! last. So a run is worth its mappings if it does about as well with them as all
//! that is still to come must do with what is left. Nothing is spent that is not
//! there, and what is saved on long runs is for the short ones behind them.

use crate::budget::PAGES_PER_VMA;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{PageTable, is_seam};

/// How many more mappings `pages` need once those of `range`, none of which stands
/// over a frame, stand over `first` and the frames behind it.
pub(crate) fn mappings_for(pages: &PageTable, range: PageRange, first: FrameId) -> u64 {
    let frame_of = |page| pages.get(page).frame;
    let before = range.start.0.checked_sub(1).map(PageIndex).map(frame_of);
    let after = pages.after(PageIndex(range.end.0 - 1)).map(frame_of);
    let seams = |first, last| {
        let left = before.is_some_and(|before| is_seam(before, first));
        let right = after.is_some_and(|after| is_seam(last, after));
        u64::from(left) + u64::from(right)
    };
    let behind = u32::try_from(range.len() - 1).expect("a run is of 32-bit frames");
    let last = first.plus(behind);
    seams(Some(first), Some(last)).saturating_sub(seams(None, None))
}

/// What is left for memory that is gone through from its beginning to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ration {
    /// Mappings.
    left: u64,
    /// Pages that are still to come.
    pages: u64,
}

impl Ration {
    pub(crate) const fn new(left: u64, pages: u64) -> Self {
        Self { left, pages }
    }

    /// As much as it can take.
    pub(crate) const fn ample(left: u64) -> Self {
        Self::new(left, 0)
    }

    /// Twice the pages that a mapping must hold now, 0 for any number. As long as
    /// there is a mapping for every [`PAGES_PER_VMA`] of what is to come, that is
    /// plenty.
    pub(crate) const fn floor(&self) -> u64 {
        match self.left {
            0 => u64::MAX,
            left => 2 * self.pages / left.saturating_mul(PAGES_PER_VMA),
        }
    }

    /// A run of `pages` is next. Whether it is worth `mappings`: they are spent then.
    pub(crate) const fn pays(&mut self, pages: u64, mappings: u64) -> bool {
        let worth = 2 * pages >= mappings.saturating_mul(self.floor());
        let pays = mappings == 0 || (worth && mappings <= self.left);
        if pays {
            self.left -= mappings;
        }
        self.pages = self.pages.saturating_sub(pages);
        pays
    }

    /// The host had none of those mappings to give.
    pub(crate) const fn give_back(&mut self, mappings: u64) {
        self.left += mappings;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Record;

    #[test]
    fn nothing_is_spent_that_is_not_there() {
        for left in 0..40 {
            let mut ration = Ration::new(left, 2000);
            let runs = (0..).map(|n| 1 + n * n % 17).take(200);
            let paid = runs.filter(|&pages| ration.pays(pages, 2)).count() as u64;
            assert!(2 * paid <= left, "{left}: {paid}");
            assert!(paid > 0 || left < 2, "{left}");
        }
    }

    #[test]
    fn long_runs_that_come_last_find_something_left() {
        let mut ration = Ration::new(20, 1000 + 4 * 250);
        let single = (0..1000).filter(|_| ration.pays(1, 2)).count();
        let long = (0..4).filter(|_| ration.pays(250, 2)).count();
        assert_eq!((single, long), (0, 4));
        // Where they are plenty, every page is welcome.
        let mut ration = Ration::new(2000, 1000);
        assert_eq!((0..1000).filter(|_| ration.pays(1, 2)).count(), 1000);
    }

    #[test]
    fn what_joins_others_costs_nothing() {
        assert!(Ration::new(0, 10).pays(1, 0));
        assert!(!Ration::new(0, 10).pays(10, 1));
        assert!(Ration::new(u64::MAX, u64::MAX >> 1).pays(1, 2));
    }

    #[test]
    fn a_run_costs_what_the_kernel_makes_of_it() {
        let mut pages = PageTable::new(10);
        let cost = |pages: &PageTable, start, len, first| {
            mappings_for(pages, PageRange::new(PageIndex(start), len), FrameId(first))
        };
        assert_eq!(cost(&pages, 0, 10, 4), 0);
        assert_eq!(cost(&pages, 0, 5, 4), 1);
        assert_eq!(cost(&pages, 2, 5, 4), 2);
        for page in [1, 5].map(PageIndex) {
            let frame = Some(FrameId(u32::try_from(page.0).unwrap()));
            let record = Record {
                frame,
                ..Record::UNSEEN
            };
            pages.set(page, record);
        }
        assert_eq!(cost(&pages, 2, 1, 9), 1, "beside another run");
        assert_eq!(cost(&pages, 2, 1, 2), 0, "it joins that");
        assert_eq!(cost(&pages, 2, 3, 2), 0, "it joins two");
        assert_eq!(cost(&pages, 6, 4, 9), 0, "up to the end");
    }
}
