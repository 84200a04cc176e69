//! Clones of regions, and moving them.

use std::sync::Arc;

use super::Ksm;
use super::depart::Departure;
use super::turn::{Patience, Turn};
use crate::backend::{Backend, Memory, RegionOptions};
use crate::error::{BackendError, Error, RegisterError};
use crate::fault::{self, Step};
use crate::nursery::{Nursling, Origin};
use crate::page::{PageIndex, PageRange};
use crate::pledge::Pledge;
use crate::ration::Ration;
use crate::region::{Region, RegionGuard, RegionId, SpaceId};
use crate::scan::Aim;
use crate::stats::ScanReport;
use crate::trace;

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
    /// No more mappings are spent than [`Config::max_vmas`](crate::Config::max_vmas)
    /// leaves. Each costs the parent and the clone one, and where they are scarce beside
    /// the pages, they are for long runs, and the pages of short ones are copied too:
    /// the clone takes more memory then, until passes merge what is worth it. Its
    /// [outcomes](crate::MemoryStats::outcomes) say how many pages that were merged
    /// already were copied for that ([`Outcome::VmaBudget`](crate::Outcome::VmaBudget)).
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
    /// clone then, and the parent holds what it did; pages of it that came to map
    /// frames for the clone do so still, with the mappings that costs, as after a
    /// clone that has gone.
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
        let mut pledge = Pledge::new(&self.vmas);
        let mut chunks = parent.range().chunks(self.clone_pages()).peekable();
        let id = loop {
            let layout = self.layout_turn()?;
            let guard = parent.lock()?;
            if let Some(chunk) = chunks.next() {
                self.take_chunk(&guard, &clone, chunk, &mut pledge)?;
            }
            if chunks.peek().is_some() {
                continue;
            }
            // Under the lease: before the parent can leave with its anon_vma.
            let entered = self.layout.try_add_region(space, |_| {
                let region = clone.ready();
                region.anon_vma.add(region.linear_range(), region.id);
                Ok(region)
            })?;
            if let Some(region) = entered {
                fault::point(Step::Known);
                break region.id;
            }
            drop((guard, layout));
            self.layout.wait_until_open()?;
        };
        self.empty_sealed(&parent.domain);
        trace::cloned(parent.id, id, space);
        Ok(id)
    }

    /// Clones a chunk of pages, the next ones, with as many mappings as its parent has
    /// if there are so many, and otherwise with what is left.
    fn take_chunk(
        &self,
        parent: &RegionGuard<'_, B>,
        clone: &Nursling<'_, B>,
        chunk: PageRange,
        pledge: &mut Pledge<'_>,
    ) -> Result<(), BackendError> {
        let region = parent.region();
        let needed = {
            let pages = region.pages();
            // Copied pages lie over frames in the parent, and between them in the clone.
            pages.seams() + 2 * pages.counts().copied + 2
        };
        let now = clone.region().pages().seams();
        let needed = needed.saturating_sub(now);
        let mut ask = |mappings| pledge.ask(now, mappings, || self.mappings());
        // At the very most, whatever the parent's guest writes meanwhile.
        let most = needed.max(chunk.len() + 1);
        let granted = match ask(most) {
            all if all == most => all,
            _ => ask(needed),
        };
        let ration = match granted >= needed {
            true => Ration::ample(granted),
            false => Ration::new(granted, region.range().end.0 - chunk.start.0),
        };
        clone.take(parent, chunk, ration)
    }

    /// Pages that are cloned under one hold of the parent's lease.
    fn clone_pages(&self) -> u64 {
        u64::from(self.config.window_pages) * CLONE_WINDOWS
    }

    /// Moves a region to `source`, memory as long that nobody uses yet and that
    /// holds no page: as the host address of guest memory changes. Merged pages
    /// stay merged; others are copied. As long as both are there, both have mappings:
    /// where [`Config::max_vmas`](crate::Config::max_vmas) does not leave enough for
    /// that, merged pages in short runs are copied as well, as in
    /// [`Ksm::fork_region`]. The old memory is nobody's then, and empty
    /// unless the host refused to drop it; its pin guards are to have ended.
    ///
    /// Nobody may use the memory meanwhile: its KVM slots are withdrawn before and
    /// made anew after, or its vCPUs paused. What was counted of the region is
    /// counted among what is gone.
    ///
    /// # Errors
    /// [`Error::NoRegion`]; [`Error::Register`] and [`Error::Backend`] as of
    /// [`Ksm::fork_region`]; [`Error::Pinned`] while guards hold pages of it. The region
    /// is as it was then.
    pub fn move_region(&self, region: RegionId, source: B::Source) -> Result<RegionId, Error> {
        let old = self.layout.region(region)?;
        let new = self.nursling(&old, old.space, source, old.options)?;
        self.move_pages(&old, &new)?;
        let new = new.region().id;
        trace::moved(region, new);
        Ok(new)
    }

    fn move_pages(&self, old: &Arc<Region<B>>, new: &Nursling<'_, B>) -> Result<(), Error> {
        let _layout = self.layout_turn()?;
        let guard = old.lock()?;
        let claimed = old.claim().ok_or(Error::NoRegion(old.id))?;
        if !claimed.close() {
            return Err(Error::Pinned { region: old.id });
        }
        let mut pledge = Pledge::new(&self.vmas);
        for chunk in old.range().chunks(self.clone_pages()) {
            self.take_chunk(&guard, new, chunk, &mut pledge)?;
        }
        self.retired.replace(&self.layout, old, || new.ready());
        claimed.for_good();
        let departure = Departure::new(self, old, guard);
        fault::point(Step::Replaced);
        departure.finish();
        Ok(())
    }

    /// A clone of `parent` without a page, that nobody knows of.
    fn nursling(
        &self,
        parent: &Arc<Region<B>>,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<Nursling<'_, B>, Error> {
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
        Ok(self.nursery.enter(region, Origin::Cloned))
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
