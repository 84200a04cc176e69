//! [`LinuxMemory`]: guest memory under care.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;
use rustix::mm::Advice;

use super::anchor::Anchors;
use super::caps::Host;
use super::claim::Claim;
use super::journal::{Journal, MAX_STOP};
use super::memfd::Memfd;
use super::source::HostRegion;
use super::span::{Span, usize_from};
use super::staging::{Staging, fill_page};
use super::store::LinuxStore;
use super::vet::Part;
use super::{host_error, mapping};
use crate::backend::{Backing, Held, Memory, PageRun, PageState, RegionOptions, Settled};
use crate::error::BackendError;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::sync::Mutex;

/// Guest memory that a [`LinuxBackend`](super::LinuxBackend) takes care of,
/// until it is dropped. Pages that are merged then stay so: their content does
/// not depend on the engine.
///
/// One run is stopped at a time: the next [`Memory::stop`] ends the stop of a
/// run that is still out.
#[derive(Debug)]
pub struct LinuxMemory {
    pub(super) host: Arc<Host>,
    /// Keeps the guest's mapping alive.
    pub(super) source: HostRegion,
    /// Where in the source it begins.
    pub(super) first: PageIndex,
    pub(super) span: Span,
    pub(super) parts: Vec<Part>,
    pub(super) options: RegionOptions,
    /// The file that holds the guest's own pages; none if they are anonymous.
    pub(super) memfd: Option<Memfd>,
    /// The guest's own pages are moved out; otherwise they are write-protected.
    pub(super) by_move: bool,
    /// Its mappings carry what they did not when it was attached.
    pub(super) touched: AtomicBool,
    /// There from when pages first go out until no more are to follow.
    pub(super) staging: Mutex<Option<Arc<Staging>>>,
    pub(super) journal: Journal,
    pub(super) anchors: Anchors,
    /// Given up last, when nothing is stopped or registered any more.
    pub(super) claim: Mutex<Option<Claim>>,
}

impl LinuxMemory {
    /// Where pages are that were moved out; none if none are.
    pub(super) fn staging(&self) -> Option<Arc<Staging>> {
        self.staging.lock().clone()
    }

    /// Maps the pages of `range` that a memfd holds in memory, so that the page
    /// map knows of them. Fills no hole and swaps nothing in.
    pub(super) fn show(&self, range: PageRange) {
        let Some(residency) = mapping::residency(self.span_of(range)) else {
            return;
        };
        let in_memory = |page: PageIndex| residency[usize_from(page.0 - range.start.0)] & 1 != 0;
        for part in Journal::parts(range, in_memory) {
            // What it does not show is looked at once the guest touches it.
            let _ = mapping::advise(self.span_of(part), Advice::LinuxPopulateRead);
        }
    }

    /// What the page map says of `within`; returns where it stopped.
    fn scan_page_map(
        &self,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> Result<PageIndex, BackendError> {
        let seen = self
            .host
            .pagemap
            .populated(self.span_of(within), max_pages, |run| {
                let state = match run.is {
                    is if is.zero() => PageState::Zero,
                    is if is.file() => PageState::File,
                    is if is.swapped() => PageState::Swapped,
                    _ => PageState::Private,
                };
                runs.push(PageRun {
                    range: PageRange::new(within.start.plus(run.first), run.pages),
                    state,
                    huge: run.is.huge(),
                });
            })
            .map_err(|errno| host_error("PAGEMAP_SCAN", errno))?;
        Ok(within.start.plus(seen))
    }

    /// The pages of `range`.
    pub(super) fn span_of(&self, range: PageRange) -> Span {
        self.span.part(range.start.0, range.len())
    }

    /// The places in the staging area of `range`, which is in the current run,
    /// and that is out.
    pub(super) fn slots_of(&self, range: PageRange) -> Span {
        let run = self.journal.run();
        assert_eq!(range.intersection(run), range, "not the run that is out");
        let staging = self.staging().expect("opened before a page goes out");
        staging.slots(range.start.0 - run.start.0, range.len())
    }

    /// Whether pages of `backing` are stopped by moving them out.
    pub(super) fn goes_out(&self, backing: Backing) -> bool {
        self.by_move && backing == Backing::Own
    }

    fn check_stop(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        let guarded = backing == Backing::Own || self.options.dma_guarded;
        if range.is_empty() || range.len() > MAX_STOP || range.end.0 > self.len() || !guarded {
            return Err(host_error("stop", Errno::INVAL));
        }
        Ok(())
    }

    /// Refuses to replace pages that are not of the run which is stopped: one
    /// memory has one run at a time.
    fn check_held(&self, range: PageRange) -> Result<(), BackendError> {
        let in_run = range.intersection(self.journal.run()) == range;
        if range.is_empty() || !in_run || !self.journal.is_open() {
            return Err(host_error(
                "replacing pages that are not held",
                Errno::INVAL,
            ));
        }
        Ok(())
    }
}

impl Memory for LinuxMemory {
    type Store = LinuxStore;

    /// Whatever is still stopped runs again, and the memory is as registered
    /// with nobody.
    fn detach(&self) {
        // Not under the mutex: a thread may be lost in the calls, and another is to
        // do them again then.
        if self.claim.lock().is_none() {
            return;
        }
        self.give_back();
        drop(self.claim.lock().take());
    }

    fn split(&self, page: PageIndex) -> Result<(Self, Self), BackendError> {
        self.cut(page)
    }

    fn len(&self) -> u64 {
        self.span.pages()
    }

    fn populated(
        &self,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> Result<PageIndex, BackendError> {
        let first = runs.len();
        let end = self.scan_page_map(within, max_pages, runs)?;
        let Some(memfd) = &self.memfd else {
            return Ok(end);
        };
        // A memfd may hold pages that are in no page table: written by its
        // descriptor, say, or of a huge page that was split.
        let start = within.start;
        let hidden = memfd.hidden(PageRange { start, end }, max_pages, &runs[first..]);
        let Some(last) = hidden.last() else {
            return Ok(end);
        };
        let found: u64 = hidden.iter().map(|part| part.len()).sum();
        let end = if found < max_pages { end } else { last.end };
        hidden.iter().for_each(|&part| self.show(part));
        runs.truncate(first);
        self.scan_page_map(PageRange { start, end }, max_pages, runs)
    }

    fn hidden(&self, within: PageRange, runs: &[PageRun]) -> Vec<PageRange> {
        let memfd = self.memfd.as_ref();
        memfd.map_or_else(Vec::new, |memfd| memfd.hidden(within, u64::MAX, runs))
    }

    fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), BackendError> {
        self.source
            .read(self.first.plus(page.0), buf)
            .map_err(|error| host_error("read of guest memory", std::io::Error::other(error)))
    }

    fn max_stop(&self) -> u64 {
        MAX_STOP
    }

    fn stop(&self, range: PageRange, backing: Backing) -> Result<Held, BackendError> {
        self.check_stop(range, backing)?;
        self.clear_staging();
        let goes_out = self.goes_out(backing);
        if goes_out {
            self.open_staging(range.len())?;
        }
        self.journal.begin(range, goes_out);
        if goes_out {
            self.move_out(range)
        } else {
            self.stop_writes(range, backing)
        }
    }

    fn read_held(
        &self,
        page: PageIndex,
        backing: Backing,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError> {
        if !self.goes_out(backing) {
            return self.read(page, buf);
        }
        let run = self.journal.run();
        let staging = self.staging().filter(|_| run.contains(page));
        let staging = staging.ok_or_else(|| host_error("read_held", Errno::INVAL))?;
        staging.read(page.0 - run.start.0, buf);
        Ok(())
    }

    fn share(
        &self,
        range: PageRange,
        _: Backing,
        store: &LinuxStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        self.check_held(range)?;
        self.map_frames(range, store, first)
    }

    fn reuse(&self, range: PageRange) -> Result<(), BackendError> {
        self.check_held(range)?;
        self.drop_copies(range)
    }

    fn zero(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        self.check_held(range)?;
        match backing {
            Backing::Own => self.drop_zeroed(range),
            Backing::Frame => self.map_zeros(range),
        }
    }

    /// A memfd's mappings are numbered by its offsets.
    fn rejoins(&self) -> bool {
        self.memfd.is_some() || self.anchors.hold()
    }

    fn restore(&self, range: PageRange) -> Result<(), BackendError> {
        self.check_held(range)?;
        self.map_copies(range)
    }

    fn lift(&self, range: PageRange, backing: Backing) {
        if self.goes_out(backing) {
            self.put_back(range);
        } else {
            self.let_write(range);
        }
        self.carry_over(range);
        // Whoever waited on a mapping that was replaced, or on a hole.
        self.host.uffd.wake(self.span_of(range));
        self.journal.lifted(range);
    }

    fn rest(&self) {
        self.settle_accounts();
    }

    fn settle(&self, range: PageRange, backing: Backing) -> Settled {
        let settled = if self.was_replaced(range, backing) {
            self.finish_replacement(range, backing);
            Settled::Replaced
        } else {
            Settled::Kept
        };
        self.lift(range, backing);
        settled
    }

    fn populate(&self, range: PageRange) -> Result<(), BackendError> {
        match mapping::advise(self.span_of(range), Advice::LinuxPopulateWrite) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN | Errno::INTR) => Err(BackendError::Again),
            Err(Errno::NOMEM) => Err(BackendError::OutOfMemory),
            Err(errno) => Err(host_error("madvise(MADV_POPULATE_WRITE)", errno)),
        }
    }

    fn adopt(
        &self,
        range: PageRange,
        store: &LinuxStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        self.touch()?;
        self.map_frames_at(range, store, first)
    }

    fn vacate(&self, range: PageRange) -> Result<(), BackendError> {
        self.map_own(range)
    }

    fn fill(&self, page: PageIndex, content: &PageBuf) -> Result<(), BackendError> {
        let page = PageRange::one(page);
        // An error, where writing to it would meet the OOM killer.
        self.populate(page)?;
        fill_page(self.span_of(page), content);
        Ok(())
    }

    fn discard(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        match backing {
            Backing::Own => self.drop_own(range),
            Backing::Frame => self.map_zeros(range),
        }
    }
}

impl Drop for LinuxMemory {
    fn drop(&mut self) {
        self.detach();
    }
}
