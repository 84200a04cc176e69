//! [`Retired`]: regions that are going, so that what a thread leaves undone can be
//! ended by others; and what those that are gone had counted, so that no counter of
//! a guest or a domain ever falls while that is there.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::Backend;
use crate::domain::Domain;
use crate::layout::Layout;
use crate::page::PageIndex;
use crate::region::{DomainId, Region, SpaceId};
use crate::stats::MemoryStats;
use crate::sync::{Mutex, ThreadId, current};

/// Regions that are going, and the counts of those that have gone.
#[derive(Debug)]
pub(super) struct Retired<B: Backend>(Mutex<Inner<B>>);

#[derive(Debug)]
struct Inner<B: Backend> {
    going: Vec<Going<B>>,
    domains: BTreeMap<DomainId, Counts>,
    spaces: BTreeMap<SpaceId, Counts>,
}

/// A region that a thread is taking away.
#[derive(Debug)]
struct Going<B: Backend> {
    region: Arc<Region<B>>,
    by: ThreadId,
    stage: Stage<B>,
}

/// How far it is.
#[derive(Debug)]
enum Stage<B: Backend> {
    /// Out of the layout, while its pages are unshared: until it is
    /// [gone](Region::is_gone) it can come back.
    Leaving,
    /// In the layout, while its memory belongs to these parts already, the second
    /// beginning with that page.
    Parted([Arc<Region<B>>; 2], PageIndex),
    /// Others are in the layout in its place, and it is counted.
    Replaced,
}

/// What was counted since a region was registered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) pages_scanned: u64,
    /// Its counters; nothing of what it holds now.
    pub(super) memory: MemoryStats,
}

impl Counts {
    fn of<B: Backend>(region: &Region<B>) -> Self {
        let stats = region.stats();
        Self {
            pages_scanned: region.tally().pages_scanned,
            memory: MemoryStats {
                cow_breaks: stats.cow_breaks,
                vmas_given_back: stats.vmas_given_back,
                pages_given_back: stats.pages_given_back,
                lease_waits: stats.lease_waits,
                lease_refusals: stats.lease_refusals,
                outcomes: stats.outcomes,
                ..MemoryStats::default()
            },
        }
    }

    fn add(&mut self, other: &Self) {
        self.pages_scanned += other.pages_scanned;
        self.memory.add(&other.memory);
    }
}

impl<B: Backend> Going<B> {
    fn new(region: &Arc<Region<B>>, stage: Stage<B>) -> Self {
        Self {
            region: Arc::clone(region),
            by: current().id(),
            stage,
        }
    }
}

/// Gives the records of a region to its parts, unless they have them.
fn hand_over<B: Backend>(whole: &Region<B>, parts: &[Arc<Region<B>>; 2], page: PageIndex) {
    let mut table = whole.pages();
    if table.counts().seen > 0 {
        *parts[1].pages() = table.split_off(page);
        *parts[0].pages() = std::mem::take(&mut *table);
    }
}

/// Puts `new` in place of `old`, in the layout and in the anon_vma.
fn exchange<B: Backend>(layout: &Layout<B>, old: &Region<B>, new: &[Arc<Region<B>>]) {
    layout.exchange(old.id, new);
    let linear: Vec<_> = new.iter().map(|new| (new.linear_range(), new.id)).collect();
    old.anon_vma.replace((old.linear_range(), old.id), &linear);
}

impl<B: Backend> Default for Retired<B> {
    fn default() -> Self {
        Self(Mutex::new(Inner {
            going: Vec::new(),
            domains: BTreeMap::new(),
            spaces: BTreeMap::new(),
        }))
    }
}

impl<B: Backend> Retired<B> {
    /// Takes a region that the caller has claimed out of the layout. Returns whether
    /// it was there.
    pub(super) fn begin(&self, layout: &Layout<B>, region: &Arc<Region<B>>) -> bool {
        let mut inner = self.0.lock();
        let was_there = layout.remove_region(region.id);
        if was_there {
            inner.going.push(Going::new(region, Stage::Leaving));
        }
        was_there
    }

    /// Puts it back: it cannot go, or whoever took it away is gone himself.
    pub(super) fn cancel(&self, layout: &Layout<B>, region: &Arc<Region<B>>) {
        let mut inner = self.0.lock();
        inner.going.retain(|going| going.region.id != region.id);
        layout.put_back(region);
    }

    /// From here on the memory of a region belongs to `parts`.
    pub(super) fn part(&self, whole: &Arc<Region<B>>, parts: [Arc<Region<B>>; 2], page: PageIndex) {
        let going = Going::new(whole, Stage::Parted(parts, page));
        self.0.lock().going.push(going);
    }

    /// Puts the parts of a region in its place, if it is parted.
    pub(super) fn replace_by_parts(&self, layout: &Layout<B>, whole: &Region<B>) {
        let Some((parts, page)) = self.parts_of(whole) else {
            return;
        };
        hand_over(whole, &parts, page);
        let mut inner = self.0.lock();
        exchange(layout, whole, &parts);
        whole.go();
        inner.count(whole);
        let mut going = inner.going.iter_mut();
        if let Some(going) = going.find(|going| going.region.id == whole.id) {
            going.stage = Stage::Replaced;
        }
    }

    fn parts_of(&self, whole: &Region<B>) -> Option<([Arc<Region<B>>; 2], PageIndex)> {
        let inner = self.0.lock();
        let mut going = inner.going.iter();
        let found = going.find(|going| going.region.id == whole.id)?;
        match &found.stage {
            Stage::Parted(parts, page) => Some((parts.each_ref().map(Arc::clone), *page)),
            _ => None,
        }
    }

    /// Puts a region that `ready` gives in place of one that the caller has claimed.
    pub(super) fn replace(
        &self,
        layout: &Layout<B>,
        old: &Arc<Region<B>>,
        ready: impl FnOnce() -> Arc<Region<B>>,
    ) {
        let mut inner = self.0.lock();
        exchange(layout, old, &[ready()]);
        inner.going.push(Going::new(old, Stage::Replaced));
        inner.count(old);
    }

    /// The regions that are going and not gone yet.
    pub(super) fn going(&self) -> Vec<Arc<Region<B>>> {
        let inner = self.0.lock();
        let going = inner.going.iter();
        going.map(|going| Arc::clone(&going.region)).collect()
    }

    /// The regions that stand, and those that do not but have records, parts that do
    /// not stand yet among them: each record is in one of them.
    pub(super) fn with_records(&self, layout: &Layout<B>) -> Vec<Arc<Region<B>>> {
        let inner = self.0.lock();
        let of_each = inner.going.iter().map(|going| match &going.stage {
            // The records go over to them while it stands.
            Stage::Parted(parts, _) => &parts[..],
            Stage::Leaving | Stage::Replaced => std::slice::from_ref(&going.region),
        });
        let standing = layout.regions();
        standing.iter().chain(of_each.flatten()).cloned().collect()
    }

    /// The regions that stand and those that are going, as they are at one moment
    /// (in between one may be put back, or taken away), and the number of that edition
    /// of the layout.
    pub(super) fn all(&self, layout: &Layout<B>) -> (Vec<Arc<Region<B>>>, u64) {
        let inner = self.0.lock();
        let standing = layout.regions();
        let going = inner.going.iter().map(|going| &going.region);
        let going = going.filter(|region| standing.get(region.id).is_none());
        let all = standing.iter().chain(going).cloned().collect();
        (all, standing.sequence)
    }

    /// The regions that a thread was taking away which is gone for good.
    pub(super) fn left_by(&self, dead: ThreadId) -> Vec<Arc<Region<B>>> {
        let inner = self.0.lock();
        let left = inner.going.iter().filter(|going| going.by == dead);
        left.map(|going| Arc::clone(&going.region)).collect()
    }

    /// Whether it is out of the layout, and can come back.
    pub(super) fn can_come_back(&self, region: &Region<B>) -> bool {
        let inner = self.0.lock();
        let mut going = inner.going.iter();
        let found = going.find(|going| going.region.id == region.id);
        found.is_some_and(|going| matches!(going.stage, Stage::Leaving)) && !region.is_gone()
    }

    /// It has gone.
    pub(super) fn end(&self, region: &Region<B>) {
        let mut inner = self.0.lock();
        let place = inner.going.iter().position(|g| g.region.id == region.id);
        let going = place.map(|place| inner.going.swap_remove(place));
        if going.is_some_and(|going| matches!(going.stage, Stage::Leaving)) {
            inner.count(region);
        }
    }

    /// The regions of a domain, those that are going among them, and what those
    /// that have gone had counted: each is in one of the two.
    pub(super) fn of_domain(
        &self,
        layout: &Layout<B>,
        domain: &Arc<Domain<B>>,
    ) -> (Vec<Arc<Region<B>>>, Counts) {
        let inner = self.0.lock();
        let counts = inner.domains.get(&domain.id).copied();
        let of_domain = |region: &Arc<Region<B>>| Arc::ptr_eq(&region.domain, domain);
        let regions = inner.regions(layout, of_domain);
        (regions, counts.unwrap_or_default())
    }

    /// The same, of an address space.
    pub(super) fn of_space(
        &self,
        layout: &Layout<B>,
        space: SpaceId,
    ) -> (Vec<Arc<Region<B>>>, Counts) {
        let inner = self.0.lock();
        let counts = inner.spaces.get(&space).copied();
        let regions = inner.regions(layout, |region| region.space == space);
        (regions, counts.unwrap_or_default())
    }

    pub(super) fn forget_domain(&self, domain: DomainId) {
        self.0.lock().domains.remove(&domain);
    }

    /// Forgets an address space and what was counted of it, unless a region is in it
    /// or leaving it. Returns whether it did.
    pub(super) fn remove_space(&self, layout: &Layout<B>, space: SpaceId) -> bool {
        let mut inner = self.0.lock();
        let mut going = inner.going.iter();
        let removed = going.all(|going| going.region.space != space) && layout.remove_space(space);
        if removed {
            inner.spaces.remove(&space);
        }
        removed
    }
}

impl<B: Backend> Inner<B> {
    fn count(&mut self, region: &Region<B>) {
        let counts = Counts::of(region);
        let domain = self.domains.entry(region.domain.id);
        domain.or_default().add(&counts);
        let space = self.spaces.entry(region.space);
        space.or_default().add(&counts);
    }

    fn regions(
        &self,
        layout: &Layout<B>,
        wanted: impl Fn(&Arc<Region<B>>) -> bool,
    ) -> Vec<Arc<Region<B>>> {
        let standing = layout.regions();
        // The others are counted, or in the layout.
        let leaving = |going: &&Going<B>| matches!(going.stage, Stage::Leaving);
        let going = self.going.iter().filter(leaving).map(|g| &g.region);
        let all = standing.iter().chain(going);
        all.filter(|region| wanted(region)).cloned().collect()
    }
}
