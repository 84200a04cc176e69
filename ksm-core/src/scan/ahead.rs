//! [`Ahead`]: what the page map says of the windows to come, read at one go.
//!
//! To read the page map takes the lock of the address space, which may be a long
//! time coming where other threads map and unmap: windows in a row share a read.

use std::collections::VecDeque;

use crate::backend::{Memory, PageRun};
use crate::error::BackendError;
use crate::page::{PageIndex, PageRange};

/// Populated pages that are read of at one go, at the most.
const PAGES: u64 = 8192;

/// What the page map said of one window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    /// Where that is.
    pub(crate) range: PageRange,
    /// The populated pages of it.
    pub(crate) runs: Vec<PageRun>,
}

/// What the page map said of pages behind the last window, for as long as nobody
/// else has had the region's lease. The guest alone can have changed them since, as
/// it can while a window is looked at.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    runs: VecDeque<PageRun>,
    /// Where these are, and the holes between them.
    range: PageRange,
    /// That of the guard under which the last window was looked at.
    epoch: u64,
}

impl Ahead {
    /// The next window is looked at under the guard of this `epoch`: what somebody
    /// may have changed who had the lease before it is forgotten.
    pub(crate) fn continue_under(&mut self, epoch: u64) {
        if epoch != self.epoch + 1 {
            *self = Self::default();
        }
        self.epoch = epoch;
    }

    /// The next window of up to `max_pages` populated pages, with which `within`
    /// begins. Where the page map has to be read, `budget` pages are read of, at
    /// least as many.
    ///
    /// # Errors
    /// When the page map cannot be read.
    pub(crate) fn window(
        &mut self,
        memory: &impl Memory,
        within: PageRange,
        max_pages: u64,
        budget: u64,
    ) -> Result<Sight, BackendError> {
        let start = within.start;
        if self.range.is_empty() || self.range.start != start {
            let mut runs = Vec::new();
            let pages = budget.min(PAGES).max(max_pages);
            let end = memory.populated(within, pages, &mut runs)?;
            (self.range, self.runs) = (PageRange { start, end }, runs.into());
        }
        Ok(self.take(max_pages))
    }

    /// Takes up to `max_pages` populated pages off the front, and what lies between.
    fn take(&mut self, max_pages: u64) -> Sight {
        let (mut runs, mut left) = (Vec::new(), max_pages);
        while left > 0
            && let Some(run) = self.runs.pop_front()
        {
            let (range, rest) = cut(run.range, left);
            if !rest.is_empty() {
                self.runs.push_front(PageRun { range: rest, ..run });
            }
            left -= range.len();
            runs.push(PageRun { range, ..run });
        }
        let end = match runs.last() {
            Some(last) if !self.runs.is_empty() => last.range.end,
            _ => self.range.end,
        };
        let start = std::mem::replace(&mut self.range.start, end);
        Sight {
            range: PageRange { start, end },
            runs,
        }
    }
}

/// The first pages of `range`, at most so many, and the rest.
fn cut(range: PageRange, pages: u64) -> (PageRange, PageRange) {
    let at = PageIndex(range.end.0.min(range.start.0 + pages));
    let (start, end) = (range.start, range.end);
    (PageRange { start, end: at }, PageRange { start: at, end })
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::sim::{SimBackend, SimConfig, SimMemory, pattern};
    use crate::backend::{Backend as _, Backing, RegionOptions};

    const LEN: u64 = 64;
    const ALL: PageRange = PageRange {
        start: PageIndex(0),
        end: PageIndex(LEN),
    };

    fn memory(populated: impl IntoIterator<Item = u64>) -> SimMemory {
        let sim = SimBackend::new(SimConfig::default());
        let guest = sim.guest(LEN);
        for page in populated {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
        sim.attach(guest, RegionOptions::default()).unwrap()
    }

    fn pages(sight: &Sight) -> Vec<u64> {
        let pages = sight.runs.iter().flat_map(|run| run.range.iter());
        pages.map(|page| page.0).collect()
    }

    proptest! {
        /// Windows that are read of together are those that are read of one by one.
        #[test]
        fn windows_read_together_are_the_same(
            populated in prop::collection::btree_set(0..LEN, 0..40),
            windows in prop::collection::vec(1..20_u64, 1..40),
            budget in 1..100_u64,
        ) {
            let memory = memory(populated.iter().copied());
            let mut ahead = Ahead::default();
            let (mut rest, mut seen) = (ALL, Vec::new());
            for (epoch, &max_pages) in (1..).zip(windows.iter().cycle()) {
                ahead.continue_under(epoch);
                let sight = ahead.window(&memory, rest, max_pages, budget).unwrap();
                prop_assert_eq!(sight.range.start, rest.start);
                let mut runs = Vec::new();
                memory.populated(sight.range, max_pages, &mut runs).unwrap();
                prop_assert_eq!(&sight.runs, &runs);
                seen.extend(pages(&sight));
                rest.start = sight.range.end;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert!(seen.iter().eq(&populated));
        }
    }

    #[test]
    fn whoever_has_had_the_lease_meanwhile_is_noticed() {
        let memory = memory(0..LEN);
        let mut ahead = Ahead::default();
        let mut window = |epoch, start| {
            ahead.continue_under(epoch);
            let within = PageRange { start, ..ALL };
            pages(&ahead.window(&memory, within, 8, LEN).unwrap())
        };
        assert!(window(5, PageIndex(0)).into_iter().eq(0..8));
        let gone = PageRange::new(PageIndex(10), 6);
        memory.discard(gone, Backing::Own).unwrap();
        assert!(
            window(7, PageIndex(8))
                .into_iter()
                .eq([8, 9].into_iter().chain(16..22))
        );
    }

    #[test]
    fn no_more_is_read_of_than_may_be_scanned() {
        let memory = memory(0..LEN);
        let mut ahead = Ahead::default();
        ahead.continue_under(1);
        assert_eq!(ahead.window(&memory, ALL, 4, 12).unwrap().range.len(), 4);
        assert_eq!(ahead.range, PageRange::new(PageIndex(4), 8));
    }
}
