//! What is registered: domains, address spaces, regions.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::Backend;
use crate::domain::Domain;
use crate::error::Error;
use crate::region::{DomainId, Place, Region, RegionId, SpaceId};
use crate::sync::Mutex;

/// Everything that is registered with an engine. Its lock is held only to look
/// something up or to enter it, never across a host call.
#[derive(Debug)]
pub(crate) struct Layout<B: Backend> {
    inner: Mutex<Inner<B>>,
}

#[derive(Debug)]
struct Inner<B: Backend> {
    next: u32,
    domains: BTreeMap<DomainId, Arc<Domain<B>>>,
    spaces: BTreeMap<SpaceId, Arc<Domain<B>>>,
    regions: BTreeMap<RegionId, Arc<Region<B>>>,
}

impl<B: Backend> Default for Layout<B> {
    fn default() -> Self {
        Self {
            inner: Mutex::new(Inner {
                next: 0,
                domains: BTreeMap::new(),
                spaces: BTreeMap::new(),
                regions: BTreeMap::new(),
            }),
        }
    }
}

impl<B: Backend> Inner<B> {
    fn number(&mut self) -> u32 {
        let number = self.next;
        self.next += 1;
        number
    }
}

impl<B: Backend> Layout<B> {
    pub(crate) fn add_domain(&self, make: impl FnOnce(DomainId) -> Domain<B>) -> DomainId {
        let mut inner = self.inner.lock();
        let id = DomainId(inner.number());
        inner.domains.insert(id, Arc::new(make(id)));
        id
    }

    pub(crate) fn add_space(&self, domain: DomainId) -> Result<SpaceId, Error> {
        let domain = self.domain(domain)?;
        let mut inner = self.inner.lock();
        let id = SpaceId(inner.number());
        inner.spaces.insert(id, domain);
        Ok(id)
    }

    /// Enters a region; `None` when no number is left for it.
    pub(crate) fn add_region(&self, make: impl FnOnce(RegionId) -> Region<B>) -> Option<RegionId> {
        let mut inner = self.inner.lock();
        let id = RegionId(inner.number());
        if id.0 >= Place::MAX_REGIONS {
            return None;
        }
        inner.regions.insert(id, Arc::new(make(id)));
        Some(id)
    }

    pub(crate) fn domain(&self, id: DomainId) -> Result<Arc<Domain<B>>, Error> {
        let inner = self.inner.lock();
        inner.domains.get(&id).cloned().ok_or(Error::NoDomain(id))
    }

    pub(crate) fn domain_of(&self, id: SpaceId) -> Result<Arc<Domain<B>>, Error> {
        let inner = self.inner.lock();
        inner.spaces.get(&id).cloned().ok_or(Error::NoSpace(id))
    }

    pub(crate) fn region(&self, id: RegionId) -> Result<Arc<Region<B>>, Error> {
        let inner = self.inner.lock();
        inner.regions.get(&id).cloned().ok_or(Error::NoRegion(id))
    }

    pub(crate) fn domains(&self) -> Vec<Arc<Domain<B>>> {
        self.inner.lock().domains.values().cloned().collect()
    }

    /// The address spaces, each with its domain.
    pub(crate) fn spaces(&self) -> Vec<(SpaceId, DomainId)> {
        let inner = self.inner.lock();
        let spaces = inner.spaces.iter();
        spaces.map(|(&space, domain)| (space, domain.id)).collect()
    }

    /// The regions that stand now, in the order of their registration.
    pub(crate) fn regions(&self) -> Vec<Arc<Region<B>>> {
        self.inner.lock().regions.values().cloned().collect()
    }

    /// The regions of one address space.
    pub(crate) fn regions_of(&self, space: SpaceId) -> Result<Vec<Arc<Region<B>>>, Error> {
        self.domain_of(space)?;
        let mut regions = self.regions();
        regions.retain(|region| region.space == space);
        Ok(regions)
    }

    /// Enters a region again that was removed.
    pub(crate) fn put_back(&self, region: &Arc<Region<B>>) {
        let mut inner = self.inner.lock();
        inner.regions.insert(region.id, Arc::clone(region));
    }

    /// Takes a region out. Returns whether it was there: of two callers, one does.
    pub(crate) fn remove_region(&self, id: RegionId) -> bool {
        self.inner.lock().regions.remove(&id).is_some()
    }

    pub(crate) fn remove_space(&self, id: SpaceId) {
        self.inner.lock().spaces.remove(&id);
    }

    /// Forgets a domain, unless an address space is in it.
    pub(crate) fn remove_domain(&self, id: DomainId) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        if inner.spaces.values().any(|domain| domain.id == id) {
            return Err(Error::DomainInUse(id));
        }
        inner
            .domains
            .remove(&id)
            .map(drop)
            .ok_or(Error::NoDomain(id))
    }
}
