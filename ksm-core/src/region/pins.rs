//! Pin guards: pages that a device may be using, because whoever drives it says
//! so.
//!
//! A page that was never merged needs none: the host finds its pins itself. Of a
//! copied page no host call can tell whether a device writes to it, and what is
//! written to a copy that was dropped is lost. So DMA to regions that are
//! declared [`dma_guarded`](crate::RegionOptions::dma_guarded) is announced:
//! from before its pages are pinned until it is through, a guard lives.
//!
//! Guards are entered under the region's lease, so that nothing is under way on
//! their pages then, and looked up under it wherever something is begun. They
//! are given up without it: that only ever allows more.

use std::sync::Arc;

use crate::page::{PageIndex, PageRange};
use crate::region::RegionId;
use crate::sync::Mutex;

/// The pages of an anon_vma that guards hold, by their linear index: regions that
/// were one when a guard was taken have it in common.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    /// One for each guard, in no order; they may overlap.
    ranges: Vec<PageRange>,
    /// Pages of regions that are about to leave: there will be no guards of them
    /// any more.
    closed: Vec<PageRange>,
}

/// Keeps a range of pages from being merged, for as long as it lives: see
/// [`Ksm::pin`](crate::Ksm::pin).
///
/// It borrows nothing, so it can be kept beside the request that it is for. It
/// may be dropped on any thread, and waits for nothing there.
#[derive(Debug)]
#[must_use = "the pages may be merged again when this is dropped"]
pub struct PinGuard {
    pins: Arc<Pins>,
    region: RegionId,
    /// The region's pages.
    pages: PageRange,
    /// The same, by their linear index.
    range: PageRange,
}

impl PinGuard {
    /// The region whose pages it holds, as it was named when it was taken.
    #[must_use]
    pub const fn region(&self) -> RegionId {
        self.region
    }

    /// The pages of that region that it holds.
    #[must_use]
    pub const fn pages(&self) -> PageRange {
        self.pages
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        let mut held = self.pins.0.lock();
        let mut ranges = held.ranges.iter();
        // Guards of one range are alike: it does not matter whose goes.
        if let Some(place) = ranges.position(|range| *range == self.range) {
            held.ranges.swap_remove(place);
        }
    }
}

impl Pins {
    /// A guard of `range`, which are `pages` of `region`; `None` if some of them
    /// are leaving. To be called under the region's lease.
    pub(crate) fn pin(
        self: &Arc<Self>,
        region: RegionId,
        pages: PageRange,
        range: PageRange,
    ) -> Option<PinGuard> {
        let mut held = self.0.lock();
        if any_overlaps(&held.closed, range) {
            return None;
        }
        held.ranges.push(range);
        drop(held);
        Some(PinGuard {
            pins: Arc::clone(self),
            region,
            pages,
            range,
        })
    }

    /// Lets there be no more guards of `range`, unless there are some now. Returns
    /// whether there are none.
    pub(crate) fn close(&self, range: PageRange) -> bool {
        let mut held = self.0.lock();
        let free = !any_overlaps(&held.ranges, range);
        if free {
            held.closed.push(range);
        }
        free
    }

    /// Undoes a [`Self::close`]: the region stays.
    pub(crate) fn reopen(&self, range: PageRange) {
        let mut held = self.0.lock();
        if let Some(place) = held.closed.iter().position(|closed| *closed == range) {
            held.closed.swap_remove(place);
        }
    }

    /// The pages of `within` that are held now.
    pub(crate) fn held(&self, within: PageRange) -> PinnedPages {
        let held = self.0.lock();
        let parts = held.ranges.iter().map(|range| range.intersection(within));
        let mut parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
        drop(held);
        parts.sort_unstable_by_key(|part| part.start);
        parts.dedup_by(|next, part| {
            let joins = next.start <= part.end;
            if joins {
                part.end = part.end.max(next.end);
            }
            joins
        });
        PinnedPages(parts)
    }
}

fn any_overlaps(ranges: &[PageRange], range: PageRange) -> bool {
    let mut ranges = ranges.iter();
    ranges.any(|other| !other.intersection(range).is_empty())
}

/// Pages that guards held at one moment: ranges that do not touch, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PinnedPages(Vec<PageRange>);

impl PinnedPages {
    pub(crate) fn contains(&self, page: PageIndex) -> bool {
        let behind = self.0.partition_point(|part| part.end <= page);
        self.0.get(behind).is_some_and(|part| part.contains(page))
    }

    /// The same pages by other numbers, `n` less each.
    pub(crate) fn minus(mut self, n: u64) -> Self {
        for part in &mut self.0 {
            *part = part.minus(n);
        }
        self
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        self.0.iter().map(|part| part.len()).sum()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        let [start, end] = [start, end].map(PageIndex);
        PageRange { start, end }
    }

    #[test]
    fn guards_nest_and_overlap() {
        let pins = Arc::new(Pins::default());
        let pin = |start, end| {
            pins.pin(RegionId(0), range(start, end), range(start, end))
                .unwrap()
        };
        let held = || pins.held(range(2, 20)).0;
        let outer = pin(0, 8);
        let inner = pin(3, 4);
        let twice = [pin(6, 10), pin(6, 10)];
        let touching = pin(10, 11);
        let apart = pin(15, 30);
        assert_eq!(held(), [range(2, 11), range(15, 20)]);
        assert_eq!(pins.held(range(2, 20)).len(), 14);
        drop(outer);
        assert_eq!(held(), [range(3, 4), range(6, 11), range(15, 20)]);
        let [first, second] = twice;
        drop((inner, first, touching));
        assert_eq!(held(), [range(6, 10), range(15, 20)]);
        let found = pins.held(range(2, 20));
        let holds = |page| found.contains(PageIndex(page));
        assert!(holds(6) && holds(9) && !holds(10) && holds(15) && !holds(20));
        drop((second, apart));
        assert_eq!(held(), []);
    }

    #[test]
    fn pages_close_when_no_guard_holds_them() {
        let pins = Arc::new(Pins::default());
        let pin = |start, end| pins.pin(RegionId(0), range(0, 1), range(start, end));
        let guard = pin(4, 8).unwrap();
        assert!(!pins.close(range(0, 5)));
        assert!(pins.close(range(0, 4)));
        drop(guard);
        assert!(pin(3, 5).is_none());
        assert!(pin(4, 5).is_some());
        pins.reopen(range(0, 4));
        assert!(pin(3, 5).is_some());
    }
}
