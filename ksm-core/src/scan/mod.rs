//! One window of a pass: look at populated pages, fingerprint those that may be
//! mergeable, and find out what each could become.
//!
//! The order of the questions is the kernel's (`cmp_and_merge_page`): stable
//! tree first; then, only if the page has not changed since the last pass, zero
//! page; then the unstable tree. Keys are taken once, when the page is read, so
//! that guest writes never disorder a tree; whether pages are equal is decided
//! later, with their writes stopped ([`merge`](crate::merge)).

mod ahead;
mod look;

use std::collections::HashMap;

use crate::backend::{Backend, Memory};
use crate::config::Config;
use crate::crew::share_out;
use crate::domain::Plan;
use crate::fault::{self, Step};
use crate::fingerprint::Fingerprint;
use crate::layout::Layout;
use crate::merge::{Goal, Wish};
use crate::outcome::{Outcome, OutcomeCounts};
use crate::page::{FrameId, PageBuf, PageIndex};
use crate::region::{Class, PinnedPages, Record, Region, RegionGuard, RegionId};
use crate::walk::{Reach, Walk};
pub(crate) use ahead::{Ahead, Sight};

/// Pages that one thread fingerprints at a time.
const PIECE_PAGES: usize = 32;

/// What a window found.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Pages looked at.
    pub(crate) scanned: u64,
    /// What became of those that are not to be merged.
    pub(crate) outcomes: OutcomeCounts,
    /// Pages that can be merged.
    pub(crate) batch: Batch,
}

/// What windows in a row have found that is not merged yet.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Pages that can be merged, in the order they were found.
    pub(crate) wishes: Vec<(RegionId, Wish)>,
    /// The last page that got a goal, and the frame: where a run may grow.
    last: Option<(PageIndex, FrameId)>,
    /// How many pages are to map a frame, of those that have a goal.
    planned: HashMap<FrameId, u32>,
}

impl Batch {
    /// How many pages are to map `frame`.
    fn planned(&self, frame: FrameId) -> u32 {
        self.planned.get(&frame).copied().unwrap_or(0)
    }
}

/// What pages are looked at for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// Those that have equals are to share frames.
    Merge,
    /// All are to map frames, for a clone to map the same.
    Freeze,
}

/// What windows are looked at with.
#[derive(Debug)]
pub(crate) struct Survey<'w, B: Backend> {
    pub(crate) config: &'w Config,
    pub(crate) layout: &'w Layout<B>,
    pub(crate) plan: &'w Plan<'w, B>,
    pub(crate) aim: Aim,
}

/// One region's window, its lease held.
struct Window<'w, 'a, B: Backend> {
    survey: &'w Survey<'w, B>,
    guard: &'w RegionGuard<'a, B>,
    region: &'w Region<B>,
    /// Held by guards. There are no more of them while the lease is held.
    pinned: PinnedPages,
    findings: Findings,
    buf: Box<PageBuf>,
}

impl<B: Backend> Survey<'_, B> {
    /// Looks at a window, which is behind those that found `batch`.
    pub(crate) fn window(
        &self,
        guard: &RegionGuard<'_, B>,
        sight: &Sight,
        batch: Batch,
    ) -> Findings {
        let mut window = Window {
            survey: self,
            guard,
            region: guard.region(),
            pinned: guard.region().pinned(sight.range),
            findings: Findings {
                batch,
                ..Findings::default()
            },
            buf: PageBuf::zeroed(),
        };
        window.forget_absent(sight);
        let candidates = window.look(&sight.runs);
        let fingerprints = window.fingerprint(&candidates);
        fault::point(Step::Hashed);
        let stretches = stretches(&candidates, &fingerprints);
        for ((page, fingerprint), stretch) in
            candidates.into_iter().zip(fingerprints).zip(stretches)
        {
            match fingerprint {
                Some(fingerprint) => window.plan(page, fingerprint, stretch),
                None => window.done(page, Outcome::Raced),
            }
        }
        fault::point(Step::Planned);
        let mut tally = window.region.tally();
        tally.pages_scanned += window.findings.scanned;
        tally.outcomes.add(&window.findings.outcomes);
        drop(tally);
        window.findings
    }
}

/// For each page, how many neighbours of its content there are from it on.
fn stretches(pages: &[PageIndex], fingerprints: &[Option<Fingerprint>]) -> Vec<usize> {
    let mut lengths = vec![1; pages.len()];
    for at in (1..pages.len()).rev() {
        if pages[at - 1].plus(1) == pages[at] && fingerprints[at - 1] == fingerprints[at] {
            lengths[at - 1] = lengths[at] + 1;
        }
    }
    lengths
}

/// Reads and fingerprints pages; `None` for one that went away meanwhile.
fn fingerprint<B: Backend>(region: &Region<B>, pages: &[PageIndex]) -> Vec<Option<Fingerprint>> {
    let mut buf = PageBuf::zeroed();
    let mut one = |&page: &PageIndex| {
        region.memory().read(page, &mut buf).ok()?;
        Some(region.domain.keys.fingerprint(&buf))
    };
    pages.iter().map(&mut one).collect()
}

impl<B: Backend> Window<'_, '_, B> {
    /// Reads and fingerprints `pages`; `None` for one that went away meanwhile.
    fn fingerprint(&self, pages: &[PageIndex]) -> Vec<Option<Fingerprint>> {
        if pages.len() < self.survey.config.parallel_pages as usize {
            return fingerprint(self.region, pages);
        }
        // For those who help: it cannot leave while its lease is held.
        let Ok(region) = self.survey.layout.region(self.region.id) else {
            return fingerprint(self.region, pages);
        };
        let of_pieces = share_out(pages.to_vec(), PIECE_PAGES, move |piece| {
            fingerprint(&region, piece)
        });
        of_pieces.concat()
    }

    /// Decides what a page that looks like `fingerprint` could become; `stretch`
    /// neighbours from it on look the same.
    fn plan(&mut self, page: PageIndex, fingerprint: Fingerprint, stretch: usize) {
        let mut record = self.region.pages().get(page);
        let same = record.fingerprint == Some(fingerprint);
        record.age = if same {
            record.age.saturating_add(1)
        } else {
            0
        };
        record.fingerprint = Some(fingerprint);
        record.class = Class::Volatile;
        self.region.pages().set(page, record);

        if let Some(frame) = self.stable_frame(page, fingerprint, stretch) {
            return self.wish(page, Goal::Frame(frame));
        }
        if self.survey.aim == Aim::Freeze {
            return self.freeze(page, fingerprint);
        }
        if record.age < self.survey.config.settle_passes {
            return self.done(page, Outcome::Volatile);
        }
        let domain = &self.region.domain;
        if self.survey.config.use_zero_pages && fingerprint == domain.keys.zero_fingerprint() {
            return self.wish(page, Goal::Zero);
        }
        let me = self.region.place(page);
        let found = domain.unstable.find_or_insert(fingerprint, me);
        let twin = found.and_then(|place| {
            // A page of this region at this place is this page itself.
            let not = (place == me).then_some(self.region.id);
            self.walk().unshared_at(place, fingerprint, not)
        });
        match (found, twin) {
            (_, Some(twin)) => self.promote(page, twin, fingerprint, stretch),
            (Some(_), None) => {
                domain.unstable.remove(fingerprint);
                domain.unstable.find_or_insert(fingerprint, me);
                self.unique(page);
            }
            (None, None) => self.unique(page),
        }
    }

    fn walk(&self) -> Walk<'_, B> {
        Walk {
            layout: self.survey.layout,
            domain: &self.region.domain,
            reach: Reach::Exact,
        }
    }

    /// A frame for a page that has no equal, or a zero page.
    fn freeze(&mut self, page: PageIndex, fingerprint: Fingerprint) {
        let keys = &self.region.domain.keys;
        if self.survey.config.use_zero_pages && fingerprint == keys.zero_fingerprint() {
            return self.wish(page, Goal::Zero);
        }
        let read = self.guard.memory().read(page, &mut self.buf);
        if read.is_err() || keys.fingerprint(&self.buf) != fingerprint {
            return self.done(page, Outcome::Volatile);
        }
        let previous = self.previous_frame(page);
        match self.survey.plan.frame(previous, fingerprint, &self.buf) {
            Ok(frame) => self.wish(page, Goal::Frame(frame)),
            Err(_) => self.done(page, Outcome::NoMemory),
        }
    }

    /// The frame that the page before `page` maps or is to map.
    fn previous_frame(&self, page: PageIndex) -> Option<FrameId> {
        let before = PageIndex(page.0.checked_sub(1)?);
        match self.findings.batch.last {
            Some((last, frame)) if last == before => Some(frame),
            _ => {
                let record = self.region.pages().get(before);
                record.frame.filter(|_| !record.is_copied())
            }
        }
    }

    /// A live frame of that content: the one that continues the run of the page
    /// before, if there is one.
    fn stable_frame(
        &mut self,
        page: PageIndex,
        fingerprint: Fingerprint,
        stretch: usize,
    ) -> Option<FrameId> {
        let previous = self.previous_frame(page);
        if let Some(frame) = self.extend(previous, fingerprint) {
            return Some(frame);
        }
        let (memory, buf) = (self.guard.memory(), &mut self.buf);
        let keys = &self.region.domain.keys;
        let digest = || memory.read(page, buf).ok().map(|()| keys.digest(buf));
        let frame = self.region.domain.find(fingerprint, digest)?;
        Some(self.first_of(frame, stretch))
    }

    /// The frame that continues a block of that content behind `previous`.
    fn extend(&self, previous: Option<FrameId>, fingerprint: Fingerprint) -> Option<FrameId> {
        // Where blocks are only a chain, a run in one wastes frames.
        let previous = previous.filter(|_| self.survey.config.stretch_pages != u32::MAX)?;
        let planned = self.findings.batch.planned(previous.plus(1));
        let max = self.survey.config.max_page_sharing.saturating_sub(planned);
        self.survey.plan.extend(previous, fingerprint, max)
    }

    /// The frame with which `stretch` pages of the content of `frame` begin.
    fn first_of(&self, frame: FrameId, stretch: usize) -> FrameId {
        let first = if stretch >= self.survey.config.stretch_pages as usize {
            self.survey.plan.stretch(frame)
        } else {
            frame
        };
        let batch = &self.findings.batch;
        let max = self.survey.config.max_page_sharing;
        let plan = self.survey.plan;
        plan.with_room(first, max, |frame| batch.planned(frame))
    }

    /// Two equal pages: a frame for both, in the stable tree.
    fn promote(
        &mut self,
        page: PageIndex,
        other: (RegionId, PageIndex),
        fingerprint: Fingerprint,
        stretch: usize,
    ) {
        let domain = &self.region.domain;
        let read = self.guard.memory().read(page, &mut self.buf);
        if read.is_err() || domain.keys.fingerprint(&self.buf) != fingerprint {
            return self.done(page, Outcome::Volatile);
        }
        let previous = self.previous_frame(page);
        match self.survey.plan.frame(previous, fingerprint, &self.buf) {
            Ok(frame) => {
                domain.unstable.remove(fingerprint);
                let first = self.first_of(frame, stretch);
                self.wish_for(other, Goal::Frame(first));
                let next = self.extend(self.previous_frame(page), fingerprint);
                self.wish(page, Goal::Frame(next.unwrap_or(first)));
            }
            Err(_) => self.done(page, Outcome::NoMemory),
        }
    }

    fn unique(&mut self, page: PageIndex) {
        let mut pages = self.region.pages();
        pages.update(page, |record| record.class = Class::Unshared);
        drop(pages);
        self.done(page, Outcome::Unique);
    }

    fn wish(&mut self, page: PageIndex, goal: Goal) {
        self.wish_for((self.region.id, page), goal);
    }

    fn wish_for(&mut self, (region, page): (RegionId, PageIndex), goal: Goal) {
        if let Goal::Frame(frame) = goal {
            *self.findings.batch.planned.entry(frame).or_default() += 1;
            if region == self.region.id {
                self.findings.batch.last = Some((page, frame));
            }
        }
        self.findings
            .batch
            .wishes
            .push((region, Wish { page, goal }));
    }

    fn done(&mut self, page: PageIndex, outcome: Outcome) {
        self.findings.outcomes[outcome] += 1;
        let mut pages = self.region.pages();
        let mut record = pages.get(page);
        // A zero page that the guest never wrote needs no record.
        if record != Record::UNSEEN || outcome != Outcome::Unchanged {
            record.outcome = outcome;
            pages.set(page, record);
        }
    }
}
