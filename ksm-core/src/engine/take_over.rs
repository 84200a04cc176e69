//! Taking over memory that a guest was restored to: its pages become frames at
//! once, in long runs, before the guest runs.

use std::sync::Arc;

use super::Ksm;
use crate::backend::{Backend, FrameStore, Memory, RegionOptions};
use crate::domain::Plan;
use crate::error::{BackendError, Error, RegisterError};
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::region::{Class, Place, Record, Region, RegionGuard, RegionId, SpaceId};
use crate::rmap::ItemId;
use crate::trace;
use crate::unshare;

/// How often a frame is sought for a page.
const TRIES: u32 = 16;

/// Pages that are taken over at a time.
const WINDOW_PAGES: u64 = 1024;

/// A region that is being taken over. If that fails, every page keeps its bytes:
/// those that map frames already get copies.
#[derive(Debug)]
struct Taking<B: Backend>(Option<Region<B>>);

/// A page that is to map a frame.
#[derive(Clone, Copy, Debug)]
struct Planned {
    frame: FrameId,
    item: ItemId,
    fingerprint: Fingerprint,
}

/// Neighbours that are put in place by one call. What is not put in place when
/// this is dropped is given back.
#[derive(Debug)]
struct Run<'g, 'a, B: Backend> {
    guard: &'g RegionGuard<'a, B>,
    range: PageRange,
    /// Consecutive frames, one for each page; none if the pages hold zeros.
    planned: Vec<Planned>,
}

impl<B: Backend> Drop for Taking<B> {
    fn drop(&mut self) {
        let Some(region) = &self.0 else { return };
        // Where one page gets no copy, others may.
        let runs = region.frame_runs(region.range());
        for chunk in runs.into_iter().flat_map(|run| run.chunks(WINDOW_PAGES)) {
            let _ = unshare::unmerge(region, chunk, u32::MAX);
        }
        region.forsake();
        let (linear, domain) = (region.linear_range(), &region.domain);
        domain.anon_vmas.remove(&region.anon_vma, linear, region.id);
    }
}

impl<B: Backend> Ksm<B> {
    /// Registers memory that a guest has just been restored to and that nobody
    /// uses yet: a private mapping of a snapshot file, say, which cannot be
    /// registered otherwise. Its pages become frames, equal ones the same, and
    /// pages of zeros hold no memory. A second guest that is restored from the same
    /// snapshot maps the frames of the first in long runs, and a
    /// [clone](Ksm::fork_region) costs next to nothing.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Register`]; [`Error::Backend`] when the host has
    /// no memory or no mapping left: every page holds its bytes then, whatever it
    /// is mapped to, and the memory is registered with nobody. Copied to anonymous
    /// memory, it can be [registered](Ksm::register) all the same.
    pub fn take_over(
        &self,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<RegionId, Error> {
        let domain = self.layout.domain_of(space)?;
        let memory = self.backend.attach_unused(source, options)?;
        let pages = memory.len();
        if pages > Place::MAX_PAGES {
            return Err(RegisterError::TooLarge { pages }.into());
        }
        let anon_vma = domain.anon_vmas.create();
        let anon_vma = anon_vma.ok_or(RegisterError::TooManyRegions)?;
        let id = self.layout.reserve_region();
        let region = Region::new(id, space, Arc::clone(&domain), memory, options, anon_vma);
        region.anon_vma.add(region.linear_range(), id);
        let mut taking = Taking(Some(region));
        let region = taking.0.as_ref().expect("just put there");
        let mut last = None;
        for window in region.range().chunks(WINDOW_PAGES) {
            let plan = domain.plan();
            let guard = region.lock()?;
            self.take_window(&guard, &plan, window, &mut last)?;
        }
        self.layout.add_region(space, |_| {
            let region = taking.0.take();
            Ok(region.expect("put there above"))
        })?;
        self.empty_sealed(&domain);
        trace::registered(id, space, pages, options.dma_guarded);
        Ok(id)
    }

    /// `last` is the frame of the page before.
    fn take_window(
        &self,
        guard: &RegionGuard<'_, B>,
        plan: &Plan<'_, B>,
        window: PageRange,
        last: &mut Option<FrameId>,
    ) -> Result<(), BackendError> {
        let mut buf = PageBuf::zeroed();
        let mut run = Run::new(guard, PageRange::new(window.start, 0), None);
        for page in window.iter() {
            guard.memory().read(page, &mut buf)?;
            let planned = match buf.is_zero() {
                true => None,
                false => Some(self.plan_page(guard.region(), plan, page, &buf, *last)?),
            };
            let mut next = Run::new(guard, PageRange::one(page), planned);
            if run.goes_on(planned) {
                run.planned.append(&mut next.planned);
                run.range.end = next.range.end;
            } else {
                // `next` waits in the place of `run`, in case this fails.
                std::mem::replace(&mut run, next).put_in_place()?;
            }
            *last = planned.map_or(*last, |planned| Some(planned.frame));
        }
        run.put_in_place()
    }

    /// A frame for a page of that content.
    fn plan_page(
        &self,
        region: &Region<B>,
        plan: &Plan<'_, B>,
        page: PageIndex,
        content: &PageBuf,
        last: Option<FrameId>,
    ) -> Result<Planned, BackendError> {
        let (domain, max) = (&region.domain, self.config.max_page_sharing);
        let fingerprint = domain.keys.fingerprint(content);
        for _ in 0..TRIES {
            let frame = plan.frame(last, fingerprint, content)?;
            let frame = plan.with_room(frame, max, |_| 0);
            // It may have gone, or filled up, meanwhile.
            let Some(item) = domain.reserve(frame, region.place(page), max, false) else {
                continue;
            };
            // From here on it stays what it is: is it what the tree says?
            let mut buf = PageBuf::zeroed();
            if domain.store.read(frame, &mut buf).is_ok() && *buf == *content {
                return Ok(Planned {
                    frame,
                    item,
                    fingerprint,
                });
            }
            domain.release(frame, item);
        }
        Err(BackendError::Again)
    }
}

impl<'g, 'a, B: Backend> Run<'g, 'a, B> {
    fn new(guard: &'g RegionGuard<'a, B>, range: PageRange, planned: Option<Planned>) -> Self {
        Self {
            guard,
            range,
            planned: Vec::from_iter(planned),
        }
    }

    /// Whether the page behind it fits in.
    fn goes_on(&self, next: Option<Planned>) -> bool {
        match (self.planned.last(), next) {
            (Some(last), Some(next)) => last.frame.plus(1) == next.frame,
            (None, None) => true,
            _ => self.range.is_empty(),
        }
    }

    fn put_in_place(mut self) -> Result<(), BackendError> {
        let (region, memory) = (self.guard.region(), self.guard.memory());
        let Some(first) = self.planned.first() else {
            return match self.range.is_empty() {
                true => Ok(()),
                false => memory.vacate(self.range),
            };
        };
        memory.adopt(self.range, &region.domain.store, first.frame)?;
        let mut pages = region.pages();
        for (page, planned) in self.range.iter().zip(self.planned.drain(..)) {
            let record = Record {
                fingerprint: Some(planned.fingerprint),
                frame: Some(planned.frame),
                class: Class::Merged(planned.item),
                age: u8::MAX,
                outcome: Outcome::Merged,
            };
            pages.set(page, record);
        }
        Ok(())
    }
}

impl<B: Backend> Drop for Run<'_, '_, B> {
    fn drop(&mut self) {
        for planned in self.planned.drain(..) {
            let domain = &self.guard.region().domain;
            domain.release(planned.frame, planned.item);
        }
    }
}
