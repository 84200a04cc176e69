//! [`GuestKsm`]: a guest's memory in the engine, by guest-physical address.

use std::collections::BTreeSet;
use std::sync::Arc;

use ksm_core::backend::Backend;
use ksm_core::page::{PAGE_SIZE_U64, bytes_in, pages_in};
use ksm_core::{
    DomainId, Explanation, Ksm, MemoryStats, PageIndex, PageRange, PinGuard, RegionId,
    RegionOptions, SpaceId, Target,
};
use thiserror::Error;
use vm_memory::{
    Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionCollection,
};

use crate::regions::{arcs, extent, whole_pages};
use crate::trace;

/// Why a call on a guest failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuestError {
    /// No registered region holds this address.
    #[error("guest address {0:#x} is in no registered region")]
    Unmapped(u64),
    /// A range of guest memory does not start or end at a page boundary.
    #[error("guest range {address:#x}, {bytes} bytes, is not made of whole pages")]
    NotWholePages {
        /// Guest-physical address of its first byte.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// Memory that is to become a clone has not the regions that the guest has.
    #[error("memory at {0:#x} is not laid out as that of the guest to be cloned")]
    NotLikeParent(u64),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] ksm_core::Error),
}

impl From<ksm_core::RegisterError> for GuestError {
    fn from(error: ksm_core::RegisterError) -> Self {
        Self::Engine(error.into())
    }
}

/// A piece of guest memory that is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Guest-physical address of its first byte.
    pub start: GuestAddress,
    /// Its length, in pages.
    pub pages: u64,
    /// Its name in the engine.
    pub region: RegionId,
    /// Where it is in this process: other memory at the same guest address is
    /// another region.
    pub(crate) host: Option<usize>,
}

impl Mapped {
    /// The page that holds `address`, if it is in this region.
    fn page_of(&self, address: GuestAddress) -> Option<PageIndex> {
        let offset = address.checked_offset_from(self.start)?;
        let page = pages_in(offset);
        (page < self.pages).then_some(PageIndex(page))
    }
}

/// A guest's memory, registered with an engine.
///
/// Everything that takes an address takes a guest-physical one. A range may
/// span several regions, as long as there is no hole between them.
///
/// Dropping it unregisters the guest as [`GuestKsm::unregister`] does, which
/// copies what is shared. Regions that the host then has no memory for stay
/// registered, and alive, for as long as the engine is.
#[derive(Debug)]
pub struct GuestKsm<B: Backend> {
    pub(crate) ksm: Arc<Ksm<B>>,
    pub(crate) space: SpaceId,
    pub(crate) options: RegionOptions,
    /// By address.
    pub(crate) mapped: Vec<Mapped>,
}

impl<B: Backend> GuestKsm<B> {
    /// Registers every region of `memory` as a guest of `domain`, on any
    /// backend: `source` says what to hand to it for a region. On Linux use
    /// [`GuestKsm::register`].
    ///
    /// # Errors
    /// [`GuestError::Engine`] when the engine refuses a region; none is
    /// registered then.
    pub fn register_with<R>(
        ksm: &Arc<Ksm<B>>,
        domain: DomainId,
        memory: &GuestRegionCollection<R>,
        options: RegionOptions,
        source: impl FnMut(Arc<R>) -> B::Source,
    ) -> Result<Self, GuestError>
    where
        R: GuestMemoryRegion,
    {
        let mut guest = Self::empty(ksm, domain, options)?;
        guest.sync_with(memory, source)?;
        let pages = guest.mapped.iter().map(|mapped| mapped.pages).sum();
        trace::guest_registered(guest.space, guest.mapped.len(), pages);
        Ok(guest)
    }

    /// A guest of `domain` without memory.
    pub(crate) fn empty(
        ksm: &Arc<Ksm<B>>,
        domain: DomainId,
        options: RegionOptions,
    ) -> Result<Self, GuestError> {
        Ok(Self {
            ksm: Arc::clone(ksm),
            space: ksm.create_space(domain)?,
            options,
            mapped: Vec::new(),
        })
    }

    /// Brings the registration in line with `memory`: unregisters regions that
    /// are gone, registers those that are new. A region is the same if start,
    /// length and host address are. What the engine split or moved by itself
    /// ([`Ksm::split`]) is no region that this knows of.
    ///
    /// # Errors
    /// As [`GuestKsm::register_with`] and [`GuestKsm::unregister`], at the first
    /// region that fails. The call can be repeated.
    pub fn sync_with<R>(
        &mut self,
        memory: &GuestRegionCollection<R>,
        mut source: impl FnMut(Arc<R>) -> B::Source,
    ) -> Result<(), GuestError>
    where
        R: GuestMemoryRegion,
    {
        let wanted: BTreeSet<_> = memory.iter().map(extent).collect();
        let registered = self.mapped.iter().map(|m| (m.start, m.pages, m.host));
        let registered: BTreeSet<_> = registered.collect();
        for (start, pages, _) in registered.difference(&wanted) {
            self.remove(*start, bytes_in(*pages))?;
        }
        for region in arcs(memory)? {
            if !registered.contains(&extent(region.as_ref())) {
                self.add(region.as_ref(), || source(Arc::clone(&region)))?;
            }
        }
        Ok(())
    }

    /// Registers one more region.
    pub(crate) fn add<R: GuestMemoryRegion>(
        &mut self,
        region: &R,
        source: impl FnOnce() -> B::Source,
    ) -> Result<Mapped, GuestError> {
        let (start, pages, host) = extent(region);
        whole_pages(start, region.len())?;
        let mapped = Mapped {
            start,
            pages,
            region: self.ksm.register(self.space, source(), self.options)?,
            host,
        };
        let at = self.mapped.partition_point(|m| m.start < start);
        self.mapped.insert(at, mapped);
        Ok(mapped)
    }

    /// Unregisters one region, whose content stays.
    pub(crate) fn remove(&mut self, start: GuestAddress, bytes: u64) -> Result<(), GuestError> {
        let pages = pages_in(bytes);
        let at = self
            .mapped
            .iter()
            .position(|m| m.start == start && m.pages == pages)
            .ok_or(GuestError::Unmapped(start.0))?;
        self.ksm.unregister(self.mapped[at].region)?;
        self.mapped.remove(at);
        Ok(())
    }

    /// The engine.
    #[must_use]
    pub const fn ksm(&self) -> &Arc<Ksm<B>> {
        &self.ksm
    }

    /// The guest's name in the engine.
    #[must_use]
    pub const fn space(&self) -> SpaceId {
        self.space
    }

    /// What is registered, by address.
    #[must_use]
    pub fn mapped(&self) -> &[Mapped] {
        &self.mapped
    }

    /// The pages behind a range of guest memory, region by region.
    ///
    /// # Errors
    /// [`GuestError::NotWholePages`]; [`GuestError::Unmapped`] with the first
    /// address that no registered region holds.
    pub fn locate(
        &self,
        start: GuestAddress,
        bytes: u64,
    ) -> Result<Vec<(RegionId, PageRange)>, GuestError> {
        whole_pages(start, bytes)?;
        let mut pieces = Vec::new();
        let mut address = start;
        let mut left = pages_in(bytes);
        while left > 0 {
            let (mapped, page) = self.page_at(address)?;
            let piece = PageRange::new(page, left.min(mapped.pages - page.0));
            pieces.push((mapped.region, piece));
            left -= piece.len();
            address = address
                .checked_add(piece.byte_len())
                .ok_or(GuestError::Unmapped(u64::MAX))?;
        }
        Ok(pieces)
    }

    fn page_at(&self, address: GuestAddress) -> Result<(Mapped, PageIndex), GuestError> {
        let behind = self.mapped.partition_point(|m| m.start <= address);
        let found = behind
            .checked_sub(1)
            .map(|at| self.mapped[at])
            .and_then(|mapped| Some((mapped, mapped.page_of(address)?)));
        found.ok_or(GuestError::Unmapped(address.0))
    }

    /// Drops the content of a range, as for a balloon or free page reporting:
    /// see [`Ksm::discard`].
    ///
    /// # Errors
    /// As [`GuestKsm::locate`], before anything is dropped; as [`Ksm::discard`].
    pub fn discard(&self, start: GuestAddress, bytes: u64) -> Result<(), GuestError> {
        for (region, pages) in self.locate(start, bytes)? {
            self.ksm.discard(region, pages)?;
        }
        Ok(())
    }

    /// Announces DMA to a range, which need not be made of whole pages: see
    /// [`Ksm::pin`]. One guard for each region that it spans.
    ///
    /// # Errors
    /// As [`GuestKsm::locate`], and as [`Ksm::pin`]; there is no guard then.
    pub fn pin(&self, start: GuestAddress, bytes: u64) -> Result<Vec<PinGuard>, GuestError> {
        let first = start.0 & !(PAGE_SIZE_U64 - 1);
        let end = start.0.checked_add(bytes);
        let end = end.and_then(|end| end.checked_next_multiple_of(PAGE_SIZE_U64));
        let end = end.ok_or(GuestError::Unmapped(u64::MAX))?;
        let mut guards = Vec::new();
        for (region, pages) in self.locate(GuestAddress(first), end - first)? {
            guards.push(self.ksm.pin(region, pages)?);
        }
        Ok(guards)
    }

    /// Gives the pages of a range copies of their own, and returns how many
    /// were shared: see [`Ksm::unmerge`].
    ///
    /// # Errors
    /// As [`GuestKsm::locate`], before anything is changed; as [`Ksm::unmerge`].
    pub fn unmerge(&self, start: GuestAddress, bytes: u64) -> Result<u64, GuestError> {
        let mut unshared = 0;
        for (region, pages) in self.locate(start, bytes)? {
            unshared += self.ksm.unmerge(Target::Pages(region, pages))?;
        }
        Ok(unshared)
    }

    /// [`GuestKsm::unmerge`] for all of the guest.
    ///
    /// # Errors
    /// As [`Ksm::unmerge`].
    pub fn unmerge_all(&self) -> Result<u64, GuestError> {
        Ok(self.ksm.unmerge(Target::Space(self.space))?)
    }

    /// What is known of the page that holds `address`: see [`Ksm::explain`].
    ///
    /// # Errors
    /// [`GuestError::Unmapped`]; as [`Ksm::explain`].
    pub fn explain(&self, address: GuestAddress) -> Result<Explanation, GuestError> {
        let (mapped, page) = self.page_at(address)?;
        Ok(self.ksm.explain(mapped.region, page)?)
    }

    /// The guest's counters.
    ///
    /// # Errors
    /// None while the guest is registered.
    pub fn stats(&self) -> Result<MemoryStats, GuestError> {
        Ok(self.ksm.space_stats(self.space)?)
    }

    /// Gives the guest plain memory again and forgets it: see
    /// [`Ksm::unregister`]. For a guest that goes on.
    ///
    /// # Errors
    /// As [`Ksm::unregister`]; the guest comes back with what is still
    /// registered, and the call can be repeated.
    pub fn unregister(mut self) -> Result<(), Box<StillRegistered<B>>> {
        match self.unregister_all() {
            Ok(()) => Ok(()),
            Err(error) => Err(Box::new(StillRegistered { guest: self, error })),
        }
    }

    /// Drops the guest's memory contents, then forgets it. For a guest that has
    /// ended: nothing is copied.
    ///
    /// # Errors
    /// As [`GuestKsm::unregister`].
    pub fn retire(self) -> Result<(), Box<StillRegistered<B>>> {
        match self.ksm.drop_space(self.space) {
            // Nothing is left to be unregistered.
            Ok(()) => self.unregister(),
            Err(error) => Err(Box::new(StillRegistered {
                guest: self,
                error: error.into(),
            })),
        }
    }

    fn unregister_all(&mut self) -> Result<(), GuestError> {
        while let Some(mapped) = self.mapped.last() {
            match self.ksm.unregister(mapped.region) {
                // The engine's split or move made others of it: they go with the
                // space.
                Ok(()) | Err(ksm_core::Error::NoRegion(_)) => self.mapped.pop(),
                Err(error) => return Err(error.into()),
            };
        }
        match self.ksm.remove_space(self.space) {
            Ok(()) => {
                trace::guest_unregistered(self.space);
                Ok(())
            }
            // Done before: this is its drop.
            Err(ksm_core::Error::NoSpace(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl<B: Backend> Drop for GuestKsm<B> {
    fn drop(&mut self) {
        // What fails here stays registered, and the engine keeps its memory.
        if let Err(error) = self.unregister_all() {
            trace::guest_left_behind(self.space, &error);
        }
    }
}

/// A guest that could not be unregistered in full.
#[derive(Debug, Error)]
#[error("the guest is still registered")]
pub struct StillRegistered<B: Backend> {
    /// The guest, with what is still registered.
    pub guest: GuestKsm<B>,
    /// Why.
    #[source]
    pub error: GuestError,
}
