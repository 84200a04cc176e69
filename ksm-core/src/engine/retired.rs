//! [`Retired`]: what regions that are gone had counted, so that no counter of a
//! guest or a domain ever falls while that is there.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::Backend;
use crate::domain::Domain;
use crate::layout::Layout;
use crate::region::{DomainId, Region, SpaceId};
use crate::stats::MemoryStats;
use crate::sync::{Mutex, ThreadId, current};

/// Regions that are going, and the counts of those that have gone.
#[derive(Debug)]
pub(super) struct Retired<B: Backend>(Mutex<Inner<B>>);

#[derive(Debug)]
struct Inner<B: Backend> {
    /// Out of the layout, while their pages are unshared.
    going: Vec<Going<B>>,
    domains: BTreeMap<DomainId, Counts>,
    spaces: BTreeMap<SpaceId, Counts>,
}

/// A region that a thread is taking away.
#[derive(Debug)]
struct Going<B: Backend> {
    region: Arc<Region<B>>,
    by: ThreadId,
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
    /// Takes a region out of the layout. Returns whether nobody else has.
    pub(super) fn begin(&self, layout: &Layout<B>, region: &Arc<Region<B>>) -> bool {
        if !region.claim() {
            return false;
        }
        let mut inner = self.0.lock();
        let was_there = layout.remove_region(region.id);
        if was_there {
            inner.going.push(Going {
                region: Arc::clone(region),
                by: current().id(),
            });
        }
        was_there
    }

    /// Puts it back: it cannot go.
    pub(super) fn cancel(&self, layout: &Layout<B>, region: &Arc<Region<B>>) {
        let mut inner = self.0.lock();
        inner.going.retain(|going| going.region.id != region.id);
        region.unclaim();
        layout.put_back(region);
    }

    /// Puts regions in place of one that the caller has claimed.
    pub(super) fn exchange(
        &self,
        layout: &Layout<B>,
        old: &Region<B>,
        new: impl IntoIterator<Item = Region<B>>,
    ) {
        let mut inner = self.0.lock();
        layout.exchange(old.id, new);
        inner.count(old);
    }

    /// The regions that are out of the layout and not gone yet.
    pub(super) fn going(&self) -> Vec<Arc<Region<B>>> {
        let inner = self.0.lock();
        let going = inner.going.iter();
        going.map(|going| Arc::clone(&going.region)).collect()
    }

    /// The regions that a thread was taking away which is gone for good.
    pub(super) fn left_by(&self, dead: ThreadId) -> Vec<Arc<Region<B>>> {
        let inner = self.0.lock();
        let left = inner.going.iter().filter(|going| going.by == dead);
        left.map(|going| Arc::clone(&going.region)).collect()
    }

    /// It has gone.
    pub(super) fn end(&self, region: &Region<B>) {
        let mut inner = self.0.lock();
        inner.going.retain(|going| going.region.id != region.id);
        inner.count(region);
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

    pub(super) fn forget_space(&self, space: SpaceId) {
        self.0.lock().spaces.remove(&space);
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
        let going = self.going.iter().map(|going| &going.region);
        let all = standing.iter().chain(going);
        all.filter(|region| wanted(region)).cloned().collect()
    }
}
