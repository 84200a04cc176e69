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
use crate::pledge::Pledge;
use crate::ration::mappings_for;
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
    /// The frames of the first and the last page; none if the pages hold zeros.
    first: Option<FrameId>,
    last: Option<FrameId>,
    /// Of the pages that map frames.
    fingerprints: Vec<Fingerprint>,
    /// How many mappings the region may have with it.
    max: u64,
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
    /// [`Error::NoSpace`], [`Error::Register`], [`Error::Quiesced`]; [`Error::Backend`]
    /// when the host has no memory or no mapping left; [`Error::VmaBudget`] when it
    /// takes more mappings than [`Config::max_vmas`](crate::Config::max_vmas) leaves,
    /// which shows as it is done. Every page holds its bytes then, whatever it is mapped
    /// to, and the memory is registered with nobody. Copied to anonymous memory, it can
    /// be [registered](Ksm::register) all the same.
    pub fn take_over(
        &self,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<RegionId, Error> {
        // Not only at the end: it would all be undone by copies.
        self.layout.wait_until_open()?;
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
        let mut pledge = Pledge::new(&self.vmas);
        for window in region.range().chunks(WINDOW_PAGES) {
            let plan = domain.plan();
            let guard = region.lock()?;
            let max = {
                let now = region.pages().seams();
                now + pledge.ask(now, window.len() + 1, || self.mappings())
            };
            self.take_window(&guard, &plan, window, &mut last, max)?;
            fault::point(Step::Reared);
        }
        self.layout.add_region(space, |_| Ok(nursling.ready()))?;
        fault::point(Step::Known);
        self.empty_sealed(&domain);
        trace::registered(id, space, pages, options.dma_guarded);
        Ok(id)
    }

    /// `last` is the frame of the page before, `max` how many mappings the region may
    /// have with the window.
    fn take_window(
        &self,
        guard: &RegionGuard<'_, B>,
        plan: &Plan<'_, B>,
        window: PageRange,
        last: &mut Option<FrameId>,
        max: u64,
    ) -> Result<(), Error> {
        let mut buf = PageBuf::zeroed();
        let _landing = guard.landing();
        let mut run = Run::new(guard, window.start, max);
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
    ) -> Result<FrameId, Error> {
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
        Err(BackendError::Again.into())
    }
}

impl<'g, 'a, B: Backend> Run<'g, 'a, B> {
    fn new(guard: &'g RegionGuard<'a, B>, start: PageIndex, max: u64) -> Self {
        Self {
            guard,
            max,
            first: None,
            range: PageRange::new(start, 0),
            last: None,
            fingerprints: Vec::new(),
        }
    }

    /// Begins anew behind these pages, which are put in place, unless one over
    /// `next`, or one of zeros, goes on from them.
    fn make_room(&mut self, next: Option<FrameId>) -> Result<(), Error> {
        let goes_on = match (self.last, next) {
            (Some(last), Some(next)) => last.plus(1) == next,
            (None, None) => true,
            _ => self.range.is_empty(),
        };
        if goes_on {
            return Ok(());
        }
        let next = Self::new(self.guard, self.range.end, self.max);
        std::mem::replace(self, next).put_in_place()
    }

    fn push_zeros(&mut self) {
        self.range.end = self.range.end.plus(1);
    }

    fn push(&mut self, frame: FrameId, fingerprint: Fingerprint) {
        self.range.end = self.range.end.plus(1);
        self.first.get_or_insert(frame);
        self.last = Some(frame);
        self.fingerprints.push(fingerprint);
    }

    /// Memory that is to be registered must not keep what it was: without a mapping
    /// there is no other place for the bytes of these pages.
    fn put_in_place(self) -> Result<(), Error> {
        if self.range.is_empty() {
            return Ok(());
        }
        let Some(first) = self.first else {
            return Ok(self.guard.memory().vacate(self.range)?);
        };
        let needed = {
            let pages = self.guard.region().pages();
            pages.seams() + mappings_for(&pages, self.range, first)
        };
        if needed > self.max {
            let left = self.max;
            return Err(Error::VmaBudget { needed, left });
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
        })?;
        Ok(())
    }
}
