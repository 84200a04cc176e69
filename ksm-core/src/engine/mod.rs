//! [`Ksm`]: the engine, and all control flow. What is registered comes and goes
//! here; a pass, DMA, holding still, and counters have modules of their own.

mod depart;
mod fork;
mod give_back;
mod move_frame;
mod pass;
mod pin;
mod quiesce;
mod report;
mod reshape;
mod retired;
mod sharers;
mod take_over;
mod turn;
mod unshare_frame;

pub use move_frame::FrameMove;
pub use quiesce::Quiesced;
pub use report::Explanation;
pub use sharers::{Sharer, SharingMatrix};

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::backend::{Backend, Memory, RegionOptions};
use crate::budget::VmaBudget;
use crate::config::Config;
use crate::domain::Domain;
use crate::error::{Error, RegisterError};
use crate::fingerprint::Keys;
use crate::layout::Layout;
use crate::nursery::Nursery;
use crate::page::PageRange;
use crate::region::{DomainId, Lease, NoLease, Place, Region, RegionId, SpaceId};
use crate::trace;
use crate::unshare;
use pass::Pass;
use retired::Retired;

/// What an unmerge is to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Everything.
    All,
    /// One guest.
    Space(SpaceId),
    /// Some pages of one region.
    Pages(RegionId, PageRange),
}

/// The engine: merges equal pages of the guests registered with it.
///
/// It has no thread and no clock: the embedder calls [`Ksm::scan`], from one
/// thread at a time, as often as it wants memory merged, and may call everything
/// else from any thread meanwhile.
///
/// Dropping the engine leaves merged pages merged; guests go on, and writes to
/// such pages are copied by the host as before. To have plain memory again,
/// [`Ksm::unregister`] it first.
#[derive(Debug)]
pub struct Ksm<B: Backend> {
    backend: B,
    config: Config,
    layout: Layout<B>,
    /// Guards the whole layout, by a policy that is not the default.
    layout_lock: Lease<()>,
    /// The right to scan; what it carries is where the pass stands.
    scanner: Lease<Pass>,
    full_scans: AtomicU64,
    vmas: VmaBudget,
    retired: Retired<B>,
    nursery: Nursery<B>,
}

impl<B: Backend> Ksm<B> {
    /// An engine with nothing registered.
    ///
    /// # Errors
    /// [`Error::Config`] when a setting makes no sense.
    pub fn new(backend: B, config: Config) -> Result<Self, Error> {
        config.validate()?;
        let spare = || backend.free_vmas().map(|free| free / 4 * 3);
        Ok(Self {
            vmas: VmaBudget::new(config.max_vmas.or_else(spare)),
            backend,
            config,
            layout: Layout::default(),
            layout_lock: Lease::new(),
            scanner: Lease::new(),
            full_scans: AtomicU64::new(0),
            retired: Retired::default(),
            nursery: Nursery::default(),
        })
    }

    /// The host side.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// Makes a trust domain: guests in it may share frames, with nobody else.
    /// One domain a guest unless guests trust one another: who shares a page can
    /// learn from the time a write takes that somebody else has it too.
    ///
    /// # Errors
    /// When the host has no store to give.
    pub fn create_domain(&self) -> Result<DomainId, Error> {
        let store = self.backend.open_store()?;
        let keys = Keys::new(self.config.seed)?;
        let domain = self.layout.add_domain(|id| Domain::new(id, keys, store));
        trace::domain_made(domain);
        Ok(domain)
    }

    /// Makes an address space, which is a guest, in a trust domain.
    ///
    /// # Errors
    /// [`Error::NoDomain`].
    pub fn create_space(&self, domain: DomainId) -> Result<SpaceId, Error> {
        let space = self.layout.add_space(domain)?;
        trace::space_made(space, domain);
        Ok(space)
    }

    /// The trust domain of an address space.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn space_domain(&self, space: SpaceId) -> Result<DomainId, Error> {
        Ok(self.layout.domain_of(space)?.id)
    }

    /// Takes a piece of a guest's memory under care. It is first looked at by
    /// the next pass.
    ///
    /// A thread must not be killed inside this call where the memory is `dma_guarded`
    /// and its guest runs: its first page may be elsewhere for a moment, and
    /// [`Ksm::recover`] knows nothing of memory that is not registered yet.
    ///
    /// # Errors
    /// [`Error::Register`] when this memory can never be merged safely;
    /// [`Error::Quiesced`].
    pub fn register(
        &self,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<RegionId, Error> {
        let region = self.attach(space, source, options)?;
        let pages = region.range().len();
        trace::registered(region.id, space, pages, options.dma_guarded);
        Ok(region.id)
    }

    fn attach(
        &self,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<Arc<Region<B>>, Error> {
        let domain = self.layout.domain_of(space)?;
        let _layout = self.layout_turn()?;
        let memory = self.backend.attach(source, options)?;
        let pages = memory.len();
        if pages > Place::MAX_PAGES {
            return Err(RegisterError::TooLarge { pages }.into());
        }
        self.layout.add_region(space, |id| {
            let anon_vma = domain.anon_vmas.create();
            let anon_vma = anon_vma.ok_or(RegisterError::TooManyRegions)?;
            let region = Region::new(id, space, domain, memory, options, anon_vma);
            region.anon_vma.add(region.linear_range(), id);
            Ok(Arc::new(region))
        })
    }

    /// Gives every page of a region a copy of its own, puts plain memory in
    /// place of mappings of frames, and forgets the region. Zero pages stay as
    /// the host made them. To be rid of the content as well, [`Ksm::discard`] it
    /// first: that is quick.
    ///
    /// In a region that is not declared `dma_guarded`, mappings of frames stay
    /// below the copies: such memory must not be dropped by `MADV_DONTNEED`
    /// later, which would show frames again, only unmapped or mapped anew.
    ///
    /// # Errors
    /// [`Error::StillShared`] and [`Error::Backend`] when the host has no memory
    /// for the copies, [`Error::Pinned`] while guards hold pages of it: the
    /// region stays registered, and the call can be repeated.
    pub fn unregister(&self, region: RegionId) -> Result<(), Error> {
        let region = self.layout.region(region)?;
        let done = self.detach(&region);
        trace::unregistered(region.id, &done);
        done
    }

    fn detach(&self, region: &Arc<Region<B>>) -> Result<(), Error> {
        let _layout = self.layout_turn()?;
        let claimed = region.claim().ok_or(Error::NoRegion(region.id))?;
        if !claimed.close() {
            return Err(Error::Pinned { region: region.id });
        }
        // From here on no scan finds it; it comes back if this fails.
        let leave = self.leave(region).ok_or(Error::NoRegion(region.id))?;
        unshare::unmerge(region, region.range(), self.config.parallel_pages)?;
        if region.options.dma_guarded {
            unshare::restore(region, region.range())?;
        }
        // The lease waits for a pass that is looking at the region.
        let guard = region.lock()?;
        claimed.for_good();
        leave.for_good(guard).finish();
        Ok(())
    }

    /// Unregisters what is left of a guest and forgets it.
    ///
    /// # Errors
    /// As [`Ksm::unregister`].
    pub fn remove_space(&self, space: SpaceId) -> Result<(), Error> {
        self.empty_space(space, |region| self.unregister(region.id))?;
        trace::space_forgotten(space);
        Ok(())
    }

    /// Forgets a guest that is no more, content and all: its memory reads zero, and
    /// maps no frame. Quick, as nothing is copied. A region that another thread is
    /// unregistering is waited for, and keeps its bytes if it goes.
    ///
    /// # Errors
    /// As [`Ksm::discard`] and [`Ksm::unregister`]: what is left of the guest stays
    /// registered.
    pub fn drop_space(&self, space: SpaceId) -> Result<(), Error> {
        self.empty_space(space, |region| {
            unshare::discard(region, region.range())?;
            self.unregister(region.id)
        })?;
        trace::space_forgotten(space);
        Ok(())
    }

    /// Lets `end` take every region out of a space, those that come meanwhile, take
    /// the place of others or are put back among them, and forgets it.
    fn empty_space(
        &self,
        space: SpaceId,
        end: impl Fn(&Region<B>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        loop {
            for region in self.layout.regions_of(space)? {
                match end(&region) {
                    // Somebody else is after it.
                    Err(Error::NoRegion(_)) => std::thread::yield_now(),
                    done => done?,
                }
            }
            if self.retired.remove_space(&self.layout, space) {
                return Ok(());
            }
            self.wait_for_leaving(space)?;
        }
    }

    /// Waits for what is under way in regions of a space that others take away.
    fn wait_for_leaving(&self, space: SpaceId) -> Result<(), Error> {
        for region in self.retired.going() {
            if region.space != space {
                continue;
            }
            if let Err(NoLease::HeldByThisThread) = region.lock() {
                return Err(Error::Quiesced);
            }
        }
        std::thread::yield_now();
        Ok(())
    }

    /// Forgets a trust domain and its store.
    ///
    /// # Errors
    /// [`Error::NoDomain`], [`Error::DomainInUse`].
    pub fn remove_domain(&self, domain: DomainId) -> Result<(), Error> {
        self.layout.remove_domain(domain)?;
        self.retired.forget_domain(domain);
        trace::domain_forgotten(domain);
        Ok(())
    }

    /// Gives pages copies of their own, so that nothing of `target` is shared.
    /// Returns how many were shared. What is scanned again may be merged again.
    ///
    /// # Errors
    /// [`Error::StillShared`] when the host refuses copies; what was unshared
    /// stays so.
    pub fn unmerge(&self, target: Target) -> Result<u64, Error> {
        let done = self.unmerge_target(target);
        trace::unmerged(&done);
        done
    }

    fn unmerge_target(&self, target: Target) -> Result<u64, Error> {
        let threads = self.config.parallel_pages;
        if let Target::Pages(region, range) = target {
            let region = self.region_with(region, range)?;
            return unshare::unmerge(&region, range, threads);
        }
        let wanted = |region: &Arc<Region<B>>| match target {
            Target::Space(space) => region.space == space,
            _ => true,
        };
        let mut unshared = 0;
        loop {
            if let Target::Space(space) = target {
                self.layout.domain_of(space)?;
            }
            // Those as well that others are taking away: they share until they are gone.
            let (mut regions, edition) = self.retired.all(&self.layout);
            regions.retain(wanted);
            let mut gone = false;
            for region in regions {
                match unshare::unmerge(&region, region.range(), threads) {
                    Ok(pages) => unshared += pages,
                    // It was split or moved: what took its place is next.
                    Err(Error::NoRegion(_)) => gone = true,
                    Err(error) => return Err(error),
                }
            }
            if !gone || self.layout.is_last(edition) {
                return Ok(unshared);
            }
        }
    }

    /// Drops the content of pages, as for a balloon or free page reporting: the
    /// guest reads zeros from here on. Use this in place of `MADV_DONTNEED`,
    /// which would show a stale frame on pages that were merged.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Pinned`] when guards hold some of them,
    /// and none is dropped; [`Error::Backend`] when the host refuses, and the
    /// pages in front of the one refused are dropped then.
    pub fn discard(&self, region: RegionId, range: PageRange) -> Result<(), Error> {
        let region = self.region_with(region, range)?;
        unshare::discard(&region, range)
    }

    fn region_with(&self, id: RegionId, range: PageRange) -> Result<Arc<Region<B>>, Error> {
        let region = self.layout.region(id)?;
        if range.intersection(region.range()) == range {
            return Ok(region);
        }
        Err(Error::OutOfRange {
            region: id,
            range,
            pages: region.range().len(),
        })
    }
}
