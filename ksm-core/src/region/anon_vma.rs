//! anon_vmas: which regions a page may be mapped in.
//!
//! A region that is registered gets an anon_vma of its own, and numbers its pages
//! in it: the linear index, pgoff. What is split off it, and what is cloned from
//! it, are further regions of the same anon_vma, at the same indexes. So an
//! rmap_item that names an anon_vma and an index names every page that may map
//! its frame, and the regions at exactly that index are found in an interval
//! tree (the kernel's `anon_vma_interval_tree_foreach`).

use std::ops::ControlFlow;
use std::sync::Arc;

use super::interval::{IntervalTree, Visits};
use crate::page::PageRange;
use crate::region::{Place, RegionId};
use crate::sync::Mutex;

/// An anon_vma's number. Used again once it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AnonVmaId(pub(crate) u32);

/// The most regions that are taken down under one hold of a lock.
const BATCH: usize = 64;

/// The regions that stem from one that was registered.
#[derive(Debug)]
pub(crate) struct AnonVma {
    pub(crate) id: AnonVmaId,
    regions: Mutex<IntervalTree<RegionId>>,
}

/// What a walk cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalkCost {
    pub(crate) visits: Visits,
    /// How often the lock was taken.
    pub(crate) holds: u64,
    /// The most nodes that were looked at under one hold of it.
    pub(crate) longest_hold: u64,
}

impl WalkCost {
    pub(crate) fn add(&mut self, other: Self) {
        self.visits.nodes += other.visits.nodes;
        self.visits.intervals += other.visits.intervals;
        self.holds += other.holds;
        self.longest_hold = self.longest_hold.max(other.longest_hold);
    }
}

impl AnonVma {
    /// Adds a region whose pages are those of `range` here.
    pub(crate) fn add(&self, range: PageRange, region: RegionId) {
        self.regions.lock().insert(range, region);
    }

    /// Puts `new` regions in place of one, as one step.
    pub(crate) fn replace(&self, old: (PageRange, RegionId), new: &[(PageRange, RegionId)]) {
        let mut regions = self.regions.lock();
        regions.remove(old.0, old.1);
        for &(range, region) in new {
            regions.insert(range, region);
        }
    }

    /// Shows the regions that have pages of `range` to `visit`, with all their
    /// range here, until it breaks. The lock is held to find some of them at a
    /// time, never while one is visited.
    pub(crate) fn walk(
        &self,
        range: PageRange,
        mut visit: impl FnMut(PageRange, RegionId) -> ControlFlow<()>,
    ) -> WalkCost {
        let mut cost = WalkCost::default();
        let mut after = None;
        let mut batch = Vec::new();
        loop {
            let visits = self
                .regions
                .lock()
                .overlapping(range, after, |range, region| {
                    batch.push((range, region));
                    match batch.len() {
                        BATCH => ControlFlow::Break(()),
                        _ => ControlFlow::Continue(()),
                    }
                });
            cost.add(WalkCost {
                visits,
                holds: 1,
                longest_hold: visits.nodes,
            });
            let is_last = batch.len() < BATCH;
            after = batch.last().map(|&(range, region)| (range.start, region));
            for (range, region) in batch.drain(..) {
                if visit(range, region).is_break() {
                    return cost;
                }
            }
            if is_last {
                return cost;
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.regions.lock().check()
    }

    /// Whether it has more than one region.
    pub(crate) fn has_many(&self) -> bool {
        self.regions.lock().len() > 1
    }

    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn len(&self) -> usize {
        self.regions.lock().len()
    }

    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn depth(&self) -> u8 {
        self.regions.lock().depth()
    }
}

/// The anon_vmas of one domain.
#[derive(Debug, Default)]
pub(crate) struct AnonVmas(Mutex<Slab>);

#[derive(Debug, Default)]
struct Slab {
    entries: Vec<Option<Arc<AnonVma>>>,
    free: Vec<u32>,
}

impl AnonVmas {
    /// Makes an empty one; `None` when there are 16 million.
    pub(crate) fn create(&self) -> Option<Arc<AnonVma>> {
        let mut slab = self.0.lock();
        let number = match slab.free.pop() {
            Some(number) => number,
            None => u32::try_from(slab.entries.len()).ok()?,
        };
        if number >= Place::MAX_ANON_VMAS {
            return None;
        }
        let anon_vma = Arc::new(AnonVma {
            id: AnonVmaId(number),
            regions: Mutex::default(),
        });
        let entry = Some(Arc::clone(&anon_vma));
        match slab.entries.get_mut(number as usize) {
            Some(free) => *free = entry,
            None => slab.entries.push(entry),
        }
        Some(anon_vma)
    }

    pub(crate) fn get(&self, id: AnonVmaId) -> Option<Arc<AnonVma>> {
        self.0.lock().entries.get(id.0 as usize)?.clone()
    }

    /// Takes a region out, and the anon_vma with its last one.
    pub(crate) fn remove(&self, anon_vma: &AnonVma, range: PageRange, region: RegionId) {
        let mut slab = self.0.lock();
        let mut regions = anon_vma.regions.lock();
        if regions.remove(range, region) && regions.len() == 0 {
            slab.entries[anon_vma.id.0 as usize] = None;
            slab.free.push(anon_vma.id.0);
        }
    }

    /// Those that there are.
    pub(crate) fn all(&self) -> Vec<Arc<AnonVma>> {
        self.0.lock().entries.iter().flatten().cloned().collect()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::page::PageIndex;

    #[test]
    fn a_walk_over_many_clones_holds_the_lock_for_some_at_a_time() {
        let anon_vmas = AnonVmas::default();
        let anon_vma = anon_vmas.create().unwrap();
        let all = PageRange::new(PageIndex(0), 100);
        for region in 0..1000 {
            anon_vma.add(all, RegionId(region));
        }
        let mut seen = Vec::new();
        let cost = anon_vma.walk(PageRange::one(PageIndex(7)), |_, region| {
            seen.push(region.0);
            ControlFlow::Continue(())
        });
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        assert_eq!(cost.visits.intervals, 1000);
        assert_eq!(cost.holds, 16);
        let most = BATCH as u64 + u64::from(anon_vma.regions.lock().depth());
        assert!(cost.longest_hold <= most, "{cost:?}");

        let mut first = None;
        let cost = anon_vma.walk(PageRange::one(PageIndex(7)), |_, region| {
            first = Some(region.0);
            ControlFlow::Break(())
        });
        assert_eq!((first, cost.holds), (Some(0), 1));
    }

    #[test]
    fn numbers_are_used_again() {
        let anon_vmas = AnonVmas::default();
        let range = PageRange::new(PageIndex(0), 3);
        let first = anon_vmas.create().unwrap();
        first.add(range, RegionId(4));
        let second = anon_vmas.create().unwrap();
        second.add(range, RegionId(5));
        anon_vmas.remove(&first, range, RegionId(4));
        assert!(anon_vmas.get(first.id).is_none());
        assert_eq!(anon_vmas.create().unwrap().id, first.id);
        assert_eq!(anon_vmas.all().len(), 2);
    }
}
