//! One window of a pass: look at populated pages, fingerprint those that may be
//! mergeable, and find out what each could become.
//!
//! The order of the questions is the kernel's (`cmp_and_merge_page`): stable
//! tree first; then, only if the page has not changed since the last pass, zero
//! page; then the unstable tree. Keys are taken once, when the page is read, so
//! that guest writes never disorder a tree; whether pages are equal is decided
//! later, with their writes stopped ([`merge`](crate::merge)).

use rayon::prelude::*;

use crate::backend::{Backend, Memory, PageRun, PageState};
use crate::config::Config;
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::fingerprint::Fingerprint;
use crate::layout::Layout;
use crate::merge::{Goal, Wish};
use crate::outcome::{Outcome, OutcomeCounts};
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::region::{Class, PinnedPages, Place, Record, Region, RegionGuard, RegionId};

/// What a window found.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Where the next window starts.
    pub(crate) next: PageIndex,
    /// Pages looked at.
    pub(crate) scanned: u64,
    /// What became of those that are not to be merged.
    pub(crate) outcomes: OutcomeCounts,
    /// Pages that can be merged, in the order they were found.
    pub(crate) wishes: Vec<(RegionId, Wish)>,
}

/// One region's window, its lease held.
struct Window<'w, 'a, B: Backend> {
    config: &'w Config,
    layout: &'w Layout<B>,
    guard: &'w RegionGuard<'a, B>,
    region: &'w Region<B>,
    /// Held by guards. There are no more of them while the lease is held.
    pinned: PinnedPages,
    findings: Findings,
    /// The last page that got a goal, and the frame: where a run may grow.
    last: Option<(PageIndex, FrameId)>,
    buf: Box<PageBuf>,
}

/// Looks at up to `max_pages` populated pages of `within`.
///
/// # Errors
/// When the page map cannot be read.
pub(crate) fn window<B: Backend>(
    config: &Config,
    layout: &Layout<B>,
    guard: &RegionGuard<'_, B>,
    within: PageRange,
    max_pages: u64,
) -> Result<Findings, BackendError> {
    let mut runs = Vec::new();
    let next = guard.memory().populated(within, max_pages, &mut runs)?;
    let looked_at = PageRange {
        start: within.start,
        end: next,
    };
    let mut window = Window {
        config,
        layout,
        guard,
        region: guard.region(),
        pinned: guard.region().pins.held(looked_at),
        findings: Findings {
            next,
            ..Findings::default()
        },
        last: None,
        buf: PageBuf::zeroed(),
    };
    window.forget_absent(looked_at, &runs);
    let candidates = window.look(&runs);
    let fingerprints = window.fingerprint(&candidates);
    fault::point(Step::Hashed);
    let stretches = stretches(&candidates, &fingerprints);
    for ((page, fingerprint), stretch) in candidates.into_iter().zip(fingerprints).zip(stretches) {
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
    Ok(window.findings)
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

impl<B: Backend> Window<'_, '_, B> {
    /// Forgets pages that were populated once and are holes now (the kernel:
    /// `remove_trailing_rmap_items`). A merged page that nobody has touched since
    /// is a hole too, and so is a zero page: those stay.
    fn forget_absent(&self, range: PageRange, runs: &[PageRun]) {
        let mut pages = self.region.pages();
        let mut runs = runs.iter().map(|run| run.range).peekable();
        let mut gone = Vec::new();
        for (page, record) in pages.seen(range) {
            while runs.next_if(|run| run.end <= page).is_some() {}
            let populated = runs.peek().is_some_and(|run| run.contains(page));
            if !populated && record.frame.is_none() && record.class != Class::Zero {
                gone.push(page);
            }
        }
        for page in gone {
            pages.set(page, Record::UNSEEN);
        }
    }

    /// Brings the records up to date with the page map. Returns the pages that
    /// are worth reading.
    fn look(&mut self, runs: &[PageRun]) -> Vec<PageIndex> {
        let mut candidates = Vec::new();
        for run in runs {
            for page in run.range.iter() {
                self.findings.scanned += 1;
                match self.look_at(page, run.state) {
                    Some(outcome) => self.done(page, outcome),
                    None => candidates.push(page),
                }
            }
        }
        candidates
    }

    /// What became of a page that is not to be read; `None` if it is.
    fn look_at(&self, page: PageIndex, state: PageState) -> Option<Outcome> {
        let record = self.region.pages().get(page);
        let own_bytes = match state {
            PageState::Private | PageState::Swapped => true,
            PageState::File => record.frame.is_none(),
            PageState::Zero => false,
        };
        match record.class {
            Class::Merged(_) if own_bytes => self.guard.note_cow_break(page),
            Class::Zero if own_bytes => self.region.pages().update(page, |record| {
                record.class = Class::Volatile;
                record.fingerprint = None;
            }),
            // It was dropped, and read since.
            Class::Volatile | Class::Unshared
                if state == PageState::Zero && record.frame.is_none() =>
            {
                self.region.pages().set(page, Record::UNSEEN);
            }
            _ => {}
        }
        match state {
            PageState::File if record.frame.is_some() => Some(Outcome::Unchanged),
            PageState::Zero => Some(Outcome::Unchanged),
            _ if self.pinned.contains(page) => Some(Outcome::Pinned),
            PageState::Swapped => Some(Outcome::Swapped),
            PageState::Private | PageState::File => {
                let guarded = self.region.options.dma_guarded;
                (record.frame.is_some() && !guarded).then_some(Outcome::CopiedUnguarded)
            }
        }
    }

    /// Reads and fingerprints `pages`; `None` for one that went away meanwhile.
    fn fingerprint(&self, pages: &[PageIndex]) -> Vec<Option<Fingerprint>> {
        let memory = self.guard.memory();
        let keys = &self.region.domain.keys;
        let one = |buf: &mut Box<PageBuf>, &page: &PageIndex| {
            memory.read(page, buf).ok()?;
            Some(keys.fingerprint(buf))
        };
        if pages.len() >= self.config.parallel_pages as usize {
            pages.par_iter().map_init(PageBuf::zeroed, one).collect()
        } else {
            let mut buf = PageBuf::zeroed();
            pages.iter().map(|page| one(&mut buf, page)).collect()
        }
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
        if record.age < self.config.settle_passes {
            return self.done(page, Outcome::Volatile);
        }
        let domain = &self.region.domain;
        if self.config.use_zero_pages && fingerprint == domain.keys.zero_fingerprint() {
            return self.wish(page, Goal::Zero);
        }
        let me = Place::new(self.region.id, page);
        match domain.unstable.find_or_insert(fingerprint, me) {
            Some(other) if other != me && self.still_there(other, fingerprint) => {
                self.promote(page, other, fingerprint, stretch);
            }
            Some(_) => {
                domain.unstable.remove(fingerprint);
                domain.unstable.find_or_insert(fingerprint, me);
                self.unique(page);
            }
            None => self.unique(page),
        }
    }

    /// The frame that the page before `page` maps or is to map.
    fn previous_frame(&self, page: PageIndex) -> Option<FrameId> {
        let before = PageIndex(page.0.checked_sub(1)?);
        match self.last {
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
        let domain = &self.region.domain;
        let previous = self.previous_frame(page);
        if let Some(frame) = previous.and_then(|frame| domain.extend(frame, fingerprint)) {
            return Some(frame);
        }
        let (memory, buf) = (self.guard.memory(), &mut self.buf);
        let keys = &self.region.domain.keys;
        let digest = || memory.read(page, buf).ok().map(|()| keys.digest(buf));
        let frame = domain.find(fingerprint, digest)?;
        Some(self.first_of(frame, stretch))
    }

    /// The frame with which `stretch` pages of the content of `frame` begin.
    fn first_of(&self, frame: FrameId, stretch: usize) -> FrameId {
        if stretch >= self.config.stretch_pages as usize {
            self.region.domain.stretch(frame)
        } else {
            frame
        }
    }

    /// Whether an item of the unstable tree still stands for a page that looks
    /// like `fingerprint`.
    fn still_there(&self, place: Place, fingerprint: Fingerprint) -> bool {
        let (region, page) = place.parts();
        let record = match self.layout.region(region) {
            Ok(region) => region.pages().get(page),
            Err(_) => return false,
        };
        record.class == Class::Unshared && record.fingerprint == Some(fingerprint)
    }

    /// Two equal pages: a frame for both, in the stable tree.
    fn promote(&mut self, page: PageIndex, other: Place, fingerprint: Fingerprint, stretch: usize) {
        let domain = &self.region.domain;
        let read = self.guard.memory().read(page, &mut self.buf);
        if read.is_err() || domain.keys.fingerprint(&self.buf) != fingerprint {
            return self.done(page, Outcome::Volatile);
        }
        let previous = self.previous_frame(page);
        match domain.plan_frame(previous, fingerprint, &self.buf) {
            Ok(frame) => {
                domain.unstable.remove(fingerprint);
                let first = self.first_of(frame, stretch);
                self.wish_for(other, Goal::Frame(first));
                let next = self.previous_frame(page);
                let next = next.and_then(|frame| domain.extend(frame, fingerprint));
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
        self.wish_for(Place::new(self.region.id, page), goal);
    }

    fn wish_for(&mut self, place: Place, goal: Goal) {
        let (region, page) = place.parts();
        if let Goal::Frame(frame) = goal
            && region == self.region.id
        {
            self.last = Some((page, frame));
        }
        self.findings.wishes.push((region, Wish { page, goal }));
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
