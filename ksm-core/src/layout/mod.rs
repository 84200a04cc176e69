//! What is registered: domains, address spaces, regions.

mod entry;
mod snapshot;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::Backend;
use crate::domain::Domain;
use crate::error::Error;
use crate::region::{DomainId, Region, RegionId, SpaceId};
use crate::sync::{Condvar, Mutex, ThreadId};
use snapshot::{Edition, Snapshot};

/// Everything that is registered with an engine. None of its locks is held
/// across a host call, and none while somebody goes through the regions.
#[derive(Debug)]
pub(crate) struct Layout<B: Backend> {
    registry: Mutex<Registry<B>>,
    /// Regions may come again.
    opened: Condvar,
    regions: Snapshot<Regions<B>>,
}

#[derive(Debug)]
struct Registry<B: Backend> {
    next: u64,
    domains: BTreeMap<DomainId, Arc<Domain<B>>>,
    spaces: BTreeMap<SpaceId, Arc<Domain<B>>>,
    /// Who keeps regions from coming.
    closed_by: Option<ThreadId>,
}

/// The regions at one moment.
#[derive(Debug)]
pub(crate) struct Regions<B: Backend> {
    /// In the order of their numbers.
    list: Vec<Arc<Region<B>>>,
    /// The number of the one that comes next.
    next: u64,
}

impl<B: Backend> Default for Layout<B> {
    fn default() -> Self {
        let registry = Registry {
            next: 0,
            domains: BTreeMap::new(),
            spaces: BTreeMap::new(),
            closed_by: None,
        };
        Self {
            registry: Mutex::new(registry),
            opened: Condvar::new(),
            regions: Snapshot::default(),
        }
    }
}

impl<B: Backend> Default for Regions<B> {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            next: 0,
        }
    }
}

impl<B: Backend> Clone for Regions<B> {
    fn clone(&self) -> Self {
        Self {
            list: self.list.clone(),
            next: self.next,
        }
    }
}

impl<B: Backend> Registry<B> {
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    fn domain(&self, id: DomainId) -> Result<Arc<Domain<B>>, Error> {
        let domain = self.domains.get(&id).cloned();
        domain.ok_or(Error::NoDomain(id))
    }
}

impl<B: Backend> Regions<B> {
    fn place(&self, id: RegionId) -> Result<usize, usize> {
        self.list.binary_search_by_key(&id, |region| region.id)
    }

    pub(crate) fn get(&self, id: RegionId) -> Option<&Arc<Region<B>>> {
        self.place(id).ok().map(|place| &self.list[place])
    }

    fn enter(&mut self, region: Arc<Region<B>>) {
        if let Err(place) = self.place(region.id) {
            self.list.insert(place, region);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Region<B>>> {
        self.list.iter()
    }

    pub(crate) fn of_domain<'r>(
        &'r self,
        domain: &'r Arc<Domain<B>>,
    ) -> impl Iterator<Item = &'r Arc<Region<B>>> {
        let of_domain = |region: &&Arc<Region<B>>| Arc::ptr_eq(&region.domain, domain);
        self.list.iter().filter(of_domain)
    }
}

impl<B: Backend> Layout<B> {
    pub(crate) fn add_domain(&self, make: impl FnOnce(DomainId) -> Domain<B>) -> DomainId {
        let mut registry = self.registry.lock();
        let id = DomainId(registry.number());
        registry.domains.insert(id, Arc::new(make(id)));
        id
    }

    pub(crate) fn add_space(&self, domain: DomainId) -> Result<SpaceId, Error> {
        // One hold: a domain that is in use cannot be removed.
        let mut registry = self.registry.lock();
        let domain = registry.domain(domain)?;
        let id = SpaceId(registry.number());
        registry.spaces.insert(id, domain);
        Ok(id)
    }

    /// A number for a region that is being made.
    pub(crate) fn reserve_region(&self) -> RegionId {
        self.regions.edit(|regions| {
            let id = RegionId(regions.next);
            let mut regions = regions.clone();
            regions.next += 1;
            (Some(regions), id)
        })
    }

    pub(crate) fn domain(&self, id: DomainId) -> Result<Arc<Domain<B>>, Error> {
        self.registry.lock().domain(id)
    }

    pub(crate) fn domain_of(&self, id: SpaceId) -> Result<Arc<Domain<B>>, Error> {
        let registry = self.registry.lock();
        registry.spaces.get(&id).cloned().ok_or(Error::NoSpace(id))
    }

    pub(crate) fn region(&self, id: RegionId) -> Result<Arc<Region<B>>, Error> {
        let regions = self.regions.read();
        regions.get(id).cloned().ok_or(Error::NoRegion(id))
    }

    /// Whether a region still stands: it leaves the layout before its pages are
    /// unshared, for which its lease is needed. So who has got the lease asks
    /// this before he changes a page.
    pub(crate) fn stands(&self, region: &Region<B>) -> bool {
        let regions = self.regions.read();
        let found = regions.get(region.id);
        found.is_some_and(|found| std::ptr::eq(&**found, region))
    }

    pub(crate) fn domains(&self) -> Vec<Arc<Domain<B>>> {
        self.registry.lock().domains.values().cloned().collect()
    }

    /// The address spaces, each with its domain.
    pub(crate) fn spaces(&self) -> Vec<(SpaceId, DomainId)> {
        let registry = self.registry.lock();
        let spaces = registry.spaces.iter();
        spaces.map(|(&space, domain)| (space, domain.id)).collect()
    }

    /// The regions that stand now, in the order of their numbers. Waits for nobody who
    /// changes them.
    pub(crate) fn regions(&self) -> Arc<Edition<Regions<B>>> {
        self.regions.read()
    }

    /// Whether no region has come or gone since the edition of that number.
    pub(crate) fn is_last(&self, sequence: u64) -> bool {
        self.regions.is_last(sequence)
    }

    /// The regions of one address space.
    pub(crate) fn regions_of(&self, space: SpaceId) -> Result<Vec<Arc<Region<B>>>, Error> {
        self.domain_of(space)?;
        let regions = self.regions();
        let of_space = regions.iter().filter(|region| region.space == space);
        Ok(of_space.cloned().collect())
    }

    /// Puts regions whose numbers were reserved in place of one, as one step.
    pub(crate) fn exchange(&self, old: RegionId, new: &[Arc<Region<B>>]) {
        self.regions.edit(|regions| {
            let mut regions = regions.clone();
            if let Ok(place) = regions.place(old) {
                regions.list.remove(place);
            }
            for region in new {
                regions.enter(Arc::clone(region));
            }
            (Some(regions), ())
        });
    }

    /// Enters a region again that was removed.
    pub(crate) fn put_back(&self, region: &Arc<Region<B>>) {
        self.regions.edit(|regions| {
            let mut regions = regions.clone();
            regions.enter(Arc::clone(region));
            (Some(regions), ())
        });
    }

    /// Takes a region out. Returns whether it was there: of two callers, one does.
    pub(crate) fn remove_region(&self, id: RegionId) -> bool {
        self.regions.edit(|regions| match regions.place(id) {
            Ok(place) => {
                let mut regions = regions.clone();
                regions.list.remove(place);
                (Some(regions), true)
            }
            Err(_) => (None, false),
        })
    }

    /// Forgets an address space, unless a region is in it. Returns whether it did.
    pub(crate) fn remove_space(&self, id: SpaceId) -> bool {
        let mut registry = self.registry.lock();
        let empty = self.regions().iter().all(|region| region.space != id);
        if empty {
            registry.spaces.remove(&id);
        }
        empty
    }

    /// Forgets a domain, unless an address space is in it.
    pub(crate) fn remove_domain(&self, id: DomainId) -> Result<(), Error> {
        let mut registry = self.registry.lock();
        if registry.spaces.values().any(|domain| domain.id == id) {
            return Err(Error::DomainInUse(id));
        }
        registry
            .domains
            .remove(&id)
            .map(drop)
            .ok_or(Error::NoDomain(id))
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
