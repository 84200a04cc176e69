//! Guests that begin as something else: a clone of a running one, or what was
//! restored from a snapshot.

use std::collections::BTreeSet;
use std::sync::Arc;

use ksm_core::backend::Backend;
use ksm_core::{DomainId, Ksm, RegionOptions};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionCollection};

use crate::guest::{GuestError, GuestKsm, Mapped};
use crate::regions::{arcs, extent};

impl<B: Backend> GuestKsm<B> {
    /// Makes a guest that reads the same as this one, in `memory`: regions at the
    /// same guest addresses, as long, of memory that nobody uses yet and that holds
    /// no page. Neither sees what is written to the other from here on. The clone
    /// trusts whom this guest trusts, and has its options. See
    /// [`Ksm::fork_region`].
    ///
    /// The guest is to be paused, its vCPUs and its devices, until this returns:
    /// what its vCPUs hold is copied by the VMM then, and memory that is not
    /// registered too.
    ///
    /// # Errors
    /// [`GuestError::NotLikeParent`] with the address of a region that one of them has
    /// and the other has not; [`GuestError::Engine`]. There is no clone then, `memory` is nobody's,
    /// and empty.
    pub fn fork_with<R>(
        &self,
        memory: &GuestRegionCollection<R>,
        source: impl FnMut(Arc<R>) -> B::Source,
    ) -> Result<Self, GuestError>
    where
        R: GuestMemoryRegion,
    {
        let place = |region| {
            let (start, pages, _) = extent(region);
            (start, pages)
        };
        let wanted: BTreeSet<_> = memory.iter().map(place).collect();
        let mut ours = self.mapped.iter().map(|m| (m.start, m.pages));
        match ours.find(|mine| !wanted.contains(mine)) {
            Some((start, _)) => Err(GuestError::NotLikeParent(start.0)),
            None => self.fork_part_with(memory, source),
        }
    }

    /// [`GuestKsm::fork_with`] for some of the guest's regions, those that `memory` has:
    /// a clone that is not to have memory which was added to its parent, say.
    ///
    /// # Errors
    /// As [`GuestKsm::fork_with`]; [`GuestError::NotLikeParent`] for regions that the
    /// guest has not.
    pub fn fork_part_with<R>(
        &self,
        memory: &GuestRegionCollection<R>,
        mut source: impl FnMut(Arc<R>) -> B::Source,
    ) -> Result<Self, GuestError>
    where
        R: GuestMemoryRegion,
    {
        let regions = self.counterparts(memory)?;
        let domain = self.ksm.space_domain(self.space)?;
        let mut clone = Self::empty(&self.ksm, domain, self.options)?;
        for (parent, region) in regions {
            let (_, _, host) = extent(region.as_ref());
            let source = source(region);
            let forked = self
                .ksm
                .fork_region(parent.region, clone.space, source, self.options);
            match forked {
                Ok(region) => clone.mapped.push(Mapped {
                    region,
                    host,
                    ..parent
                }),
                Err(error) => {
                    // What could not be dropped is unregistered with the rest.
                    let _ = clone.retire();
                    return Err(error.into());
                }
            }
        }
        Ok(clone)
    }

    /// Each region of `memory`, with that of the guest whose clone it is to be.
    fn counterparts<R: GuestMemoryRegion>(
        &self,
        memory: &GuestRegionCollection<R>,
    ) -> Result<Vec<(Mapped, Arc<R>)>, GuestError> {
        let counterpart = |region: Arc<R>| {
            let (start, pages, _) = extent(region.as_ref());
            let mut ours = self.mapped.iter();
            let parent = ours.find(|m| (m.start, m.pages) == (start, pages));
            let parent = parent.ok_or(GuestError::NotLikeParent(start.0))?;
            Ok((*parent, region))
        };
        arcs(memory)?.into_iter().map(counterpart).collect()
    }

    /// Registers every region of `memory`, to which a guest has just been restored
    /// and which nobody uses yet, by taking it over: its pages become frames at once,
    /// which a second guest restored from the same snapshot shares, and clones too. See
    /// [`Ksm::take_over`], which says what memory that can be.
    ///
    /// # Errors
    /// [`GuestError::Engine`] when the engine refuses a region: none is registered
    /// then, and each page holds what it held.
    pub fn take_over_with<R>(
        ksm: &Arc<Ksm<B>>,
        domain: DomainId,
        memory: &GuestRegionCollection<R>,
        options: RegionOptions,
        mut source: impl FnMut(Arc<R>) -> B::Source,
    ) -> Result<Self, GuestError>
    where
        R: GuestMemoryRegion,
    {
        let mut guest = Self::empty(ksm, domain, options)?;
        for region in arcs(memory)? {
            let (start, pages, host) = extent(region.as_ref());
            // Dropped if this fails, the guest unregisters what it has.
            let region = ksm.take_over(guest.space, source(region), options)?;
            guest.mapped.push(Mapped {
                start,
                pages,
                region,
                host,
            });
        }
        Ok(guest)
    }
}
