//! Clones of regions, and moving them.

use std::sync::Arc;

use super::Ksm;
use super::turn::{Patience, Turn};
use crate::backend::{Backend, Memory, RegionOptions};
use crate::clone::Nursling;
use crate::error::{Error, RegisterError};
use crate::page::{PageIndex, PageRange};
use crate::region::{Region, RegionId, SpaceId};
use crate::scan::Aim;
use crate::stats::ScanReport;
use crate::trace;
use crate::unshare;

/// How many windows are cloned under one hold of the parent's lease: to look at a
/// page for that costs little.
const CLONE_WINDOWS: u64 = 8;

impl<B: Backend> Ksm<B> {
    /// Registers `source`, memory as long as the region `parent` that nobody uses
    /// yet and that holds no page, with `space`, as a clone of `parent`: it reads
    /// the same from here on, and neither sees what is written to the other.
    ///
    /// Pages of the parent come to map frames, of which the clone maps the same:
    /// the first clone costs about what merging the region costs, further ones a
    /// mapping for each run of frames and little for each page. Pages that cannot
    /// be merged now are copied: those that a device or a
    /// [`PinGuard`](crate::PinGuard) holds, and, unless the parent is
    /// [`dma_guarded`](RegionOptions::dma_guarded), those that were merged and
    /// written to since.
    ///
    /// The parent's guest should be paused: what it writes meanwhile is in the
    /// clone or is not, page by page. A guest of several regions is cloned region
    /// by region while it is paused.
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::NoSpace`]; [`Error::OtherDomain`] when the
    /// space is of another trust domain; [`Error::Register`], and
    /// [`RegisterError::NotLikeParent`] when the memory has another length or is
    /// not empty; [`Error::Backend`] when the host has no memory. There is no
    /// clone then, and the parent is as it was.
    pub fn fork_region(
        &self,
        parent: RegionId,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<RegionId, Error> {
        let parent = self.layout.region(parent)?;
        let clone = self.nursling(&parent, space, source, options)?;
        self.freeze(&parent)?;
        let mut chunks = parent.range().chunks(self.clone_pages()).peekable();
        let id = loop {
            let _layout = self.layout_turn()?;
            let guard = parent.lock()?;
            if let Some(chunk) = chunks.next() {
                clone.take(&guard, chunk)?;
            }
            if chunks.peek().is_none() {
                // Under the lease: before the parent can leave with its anon_vma.
                let region = self.layout.add_region(space, |_| {
                    let region = clone.ready();
                    region.anon_vma.add(region.linear_range(), region.id);
                    Ok(region)
                })?;
                break region.id;
            }
        };
        self.empty_sealed(&parent.domain);
        trace::cloned(parent.id, id, space);
        Ok(id)
    }

    /// Pages that are cloned under one hold of the parent's lease.
    fn clone_pages(&self) -> u64 {
        u64::from(self.config.window_pages) * CLONE_WINDOWS
    }

    /// Moves a region to `source`, memory as long that nobody uses yet and that
    /// holds no page: as the host address of guest memory changes. Merged pages
    /// stay merged; others are copied. The old memory is nobody's then, and empty
    /// unless the host refused to drop it; its pin guards are to have ended.
    ///
    /// Nobody may use the memory meanwhile: its KVM slots are withdrawn before and
    /// made anew after, or its vCPUs paused. What was counted of the region is
    /// counted among what is gone.
    ///
    /// # Errors
    /// As [`Ksm::fork_region`]; [`Error::Pinned`] while guards hold pages of it.
    /// The region is as it was then.
    pub fn move_region(&self, region: RegionId, source: B::Source) -> Result<RegionId, Error> {
        let old = self.layout.region(region)?;
        let new = self.nursling(&old, old.space, source, old.options)?;
        if !old.close() {
            return Err(Error::Pinned { region });
        }
        let moved = self.move_pages(&old, new);
        match &moved {
            Ok(new) => trace::moved(region, *new),
            Err(_) => old.reopen(),
        }
        moved
    }

    fn move_pages(&self, old: &Arc<Region<B>>, new: Nursling<B>) -> Result<RegionId, Error> {
        let _layout = self.layout_turn()?;
        let guard = old.lock()?;
        // Of two who are after a region, one gets it.
        if !old.claim() {
            return Err(Error::NoRegion(old.id));
        }
        let mut chunks = old.range().chunks(self.clone_pages());
        if let Err(error) = chunks.try_for_each(|chunk| new.take(&guard, chunk)) {
            old.unclaim();
            return Err(error.into());
        }
        let new = new.ready();
        let id = new.id;
        new.anon_vma.add(new.linear_range(), id);
        self.retired.exchange(&self.layout, old, [new]);
        unshare::give_up(&guard);
        guard.memory().detach();
        guard.leave();
        let (pages, domain) = (old.linear_range(), &old.domain);
        domain.anon_vmas.remove(&old.anon_vma, pages, old.id);
        Ok(id)
    }

    /// A clone of `parent` without a page, that nobody knows of.
    fn nursling(
        &self,
        parent: &Arc<Region<B>>,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<Nursling<B>, Error> {
        if !Arc::ptr_eq(&self.layout.domain_of(space)?, &parent.domain) {
            return Err(Error::OtherDomain(space));
        }
        let memory = self.backend.attach(source, options)?;
        let mut runs = Vec::new();
        let whole = PageRange::new(PageIndex(0), memory.len());
        memory.populated(whole, 1, &mut runs)?;
        if memory.len() != parent.range().len() || !runs.is_empty() {
            return Err(RegisterError::NotLikeParent {
                pages: memory.len(),
                parent: parent.range().len(),
            }
            .into());
        }
        let region = parent.clone_of(self.layout.reserve_region(), space, memory, options);
        Ok(Nursling::new(region))
    }

    /// Lets every page of `region` that has bytes of its own map a frame, where
    /// it can.
    fn freeze(&self, region: &Arc<Region<B>>) -> Result<(), Error> {
        let mut next = PageIndex(0);
        let mut report = ScanReport::default();
        while next < region.range().end {
            let guard = match self.turn(region, Patience::Wait)? {
                Turn::Now(guard) => guard,
                Turn::Later | Turn::NextPass => {
                    std::thread::yield_now();
                    continue;
                }
                Turn::Gone => return Err(Error::NoRegion(region.id)),
            };
            next = self.scan_windows(guard, next, u64::MAX, Aim::Freeze, &mut report)?;
            report.pages_scanned = 0;
        }
        Ok(())
    }
}
