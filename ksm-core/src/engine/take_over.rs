//! Taking over memory that a guest was restored to: its pages become frames at
//! once, in long runs, before the guest runs.

use std::sync::Arc;

use super::Ksm;
use crate::backend::{Backend, FrameStore, Memory, RegionOptions};
use crate::domain::Plan;
use crate::error::{BackendError, Error, RegisterError};
use crate::fault::{self, Step};
use crate::fingerprint::Fingerprint;
use crate::nursery::Origin;
use crate::outcome::Outcome;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::region::{Class, Place, Record, Region, RegionGuard, RegionId, SpaceId};
use crate::trace;

/// How often a frame is sought for a page.
const TRIES: u32 = 16;

/// Pages that are taken over at a time.
const WINDOW_PAGES: u64 = 1024;

/// Neighbours that are put in place by one call: all map frames in a row, or all
/// hold zeros.
#[derive(Debug)]
struct Run<'g, 'a, B: Backend> {
    guard: &'g RegionGuard<'a, B>,
    range: PageRange,
    /// The frame of the last page; none if the pages hold zeros.
    last: Option<FrameId>,
    /// Of the pages that map frames.
    fingerprints: Vec<Fingerprint>,
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
        let nursling = self.nursery.enter(region, Origin::Restored);
        let region = nursling.region();
        let mut last = None;
        for window in region.range().chunks(WINDOW_PAGES) {
            let plan = domain.plan();
            let guard = region.lock()?;
            self.take_window(&guard, &plan, window, &mut last)?;
            fault::point(Step::Reared);
        }
        self.layout.add_region(space, |_| Ok(nursling.ready()))?;
        fault::point(Step::Known);
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
        let _landing = guard.landing();
        let mut run = Run::new(guard, window.start);
        for page in window.iter() {
            guard.memory().read(page, &mut buf)?;
            if buf.is_zero() {
                run.make_room(None)?;
                run.push_zeros();
            } else {
                *last = Some(self.take_page(&mut run, plan, &buf, *last)?);
            }
        }
        run.put_in_place()
    }

    /// Puts a page of that content at the end of `run`, with a frame reserved, which
    /// is returned.
    fn take_page(
        &self,
        run: &mut Run<'_, '_, B>,
        plan: &Plan<'_, B>,
        content: &PageBuf,
        last: Option<FrameId>,
    ) -> Result<FrameId, BackendError> {
        let (region, max) = (run.guard.region(), self.config.max_page_sharing);
        let domain = &region.domain;
        let fingerprint = domain.keys.fingerprint(content);
        let page = run.range.end;
        for _ in 0..TRIES {
            let frame = plan.frame(last, fingerprint, content)?;
            let frame = plan.with_room(frame, max, |_| 0);
            run.make_room(Some(frame))?;
            // It may have gone, or filled up, meanwhile.
            let Some(item) = domain.reserve(frame, region.place(page), max, false) else {
                continue;
            };
            run.guard.reserved(page, frame, item);
            // From here on it stays what it is: is it what the tree says?
            let mut buf = PageBuf::zeroed();
            if domain.store.read(frame, &mut buf).is_ok() && *buf == *content {
                run.push(frame, fingerprint);
                return Ok(frame);
            }
            run.guard.release_last();
        }
        Err(BackendError::Again)
    }
}

impl<'g, 'a, B: Backend> Run<'g, 'a, B> {
    fn new(guard: &'g RegionGuard<'a, B>, start: PageIndex) -> Self {
        Self {
            guard,
            range: PageRange::new(start, 0),
            last: None,
            fingerprints: Vec::new(),
        }
    }

    /// Begins anew behind these pages, which are put in place, unless one over
    /// `next`, or one of zeros, goes on from them.
    fn make_room(&mut self, next: Option<FrameId>) -> Result<(), BackendError> {
        let goes_on = match (self.last, next) {
            (Some(last), Some(next)) => last.plus(1) == next,
            (None, None) => true,
            _ => self.range.is_empty(),
        };
        if goes_on {
            return Ok(());
        }
        let next = Self::new(self.guard, self.range.end);
        std::mem::replace(self, next).put_in_place()
    }

    fn push_zeros(&mut self) {
        self.range.end = self.range.end.plus(1);
    }

    fn push(&mut self, frame: FrameId, fingerprint: Fingerprint) {
        self.range.end = self.range.end.plus(1);
        self.last = Some(frame);
        self.fingerprints.push(fingerprint);
    }

    fn put_in_place(self) -> Result<(), BackendError> {
        if self.last.is_none() && !self.range.is_empty() {
            return self.guard.memory().vacate(self.range);
        }
        self.guard.adopt(|pages, adoption| {
            for ((page, frame, item), fingerprint) in adoption.pages().zip(self.fingerprints) {
                let record = Record {
                    fingerprint: Some(fingerprint),
                    frame: Some(frame),
                    class: Class::Merged(item),
                    age: u8::MAX,
                    outcome: Outcome::Merged,
                };
                pages.set(page, record);
            }
        })
    }
}
