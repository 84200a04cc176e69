//! [`LinuxMemory`]: guest memory under care.

use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use rustix::mm::Advice;

use super::caps::{Host, StopMethod};
use super::claim::Claim;
use super::journal::{Journal, MAX_STOP};
use super::memfd::Memfd;
use super::source::HostRegion;
use super::span::{Span, usize_from};
use super::staging::Staging;
use super::store::LinuxStore;
use super::uffd::Mode;
use super::vet::{Part, vet, vet_fresh};
use super::{host_error, mapping, mapping_error};
use crate::backend::{Backing, Held, Memory, PageRun, PageState, RegionOptions, Settled};
use crate::error::{BackendError, MemfdFault, RegisterError};
use crate::page::{FrameId, PageBuf, PageIndex, PageRange, is_page_aligned, pages_in};
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
    pub(super) span: Span,
    pub(super) parts: Vec<Part>,
    pub(super) options: RegionOptions,
    /// The file that holds the guest's own pages; none if they are anonymous.
    pub(super) memfd: Option<Memfd>,
    /// The guest's own pages are moved out; otherwise they are write-protected.
    pub(super) by_move: bool,
    /// Mapped when pages first go out.
    staging: OnceLock<Staging>,
    pub(super) journal: Journal,
    /// Given up last, when nothing is stopped or registered any more.
    claim: Mutex<Option<Claim>>,
}

impl LinuxMemory {
    pub(super) fn attach(
        host: Arc<Host>,
        source: HostRegion,
        options: RegionOptions,
    ) -> Result<Self, RegisterError> {
        let bytes = source.byte_len();
        let start = source
            .host_address()
            .ok_or(RegisterError::NotMapped { address: 0 })?;
        let address = start as u64;
        if bytes == 0 || !is_page_aligned(bytes) || !is_page_aligned(address) {
            return Err(RegisterError::NotWholePages { address, bytes });
        }
        // SAFETY: `source` keeps the mapping alive and is kept along with the
        // span. That it is mapped is vetted below, before anything is done to
        // it. vm-memory hands out no references to guest memory, and whoever
        // registers it agrees that its pages are replaced by equal ones.
        let span = unsafe { Span::new(start, pages_in(bytes)) };
        let claim = host.claims.claim(span)?;
        let memfd =
            owned_memfd(&source, options).map_err(|why| RegisterError::Memfd { address, why })?;
        // Pages of a file cannot be moved.
        let by_move = memfd.is_none() && stops_by_move(&host, options)?;
        let parts = if source.take_fresh() && memfd.is_none() {
            vet_fresh(span)?
        } else {
            vet(&host, span, memfd.as_ref())?
        };
        // From here on dropping it undoes what was done.
        let memory = Self {
            host,
            source,
            span,
            parts,
            options,
            memfd,
            by_move,
            staging: OnceLock::new(),
            journal: Journal::default(),
            claim: Mutex::new(Some(claim)),
        };
        memory.take_over(address)?;
        Ok(memory)
    }

    /// Registers memory that is write-protected in place. What is moved out is
    /// registered while it is, and the rest of what that needs is done when the
    /// first run is stopped: memory that is withdrawn before costs nothing.
    fn take_over(&self, address: u64) -> Result<(), RegisterError> {
        if self.by_move {
            return Ok(());
        }
        self.keep_from_forks()?;
        let registered = self.host.uffd.register(self.span, Mode::WriteProtect);
        registered.map_err(|errno| match errno {
            Errno::BUSY => RegisterError::OtherUserfaultfd { address },
            errno => mapping_error("UFFDIO_REGISTER", errno).into(),
        })
    }

    /// A page that a child shares cannot be moved (design fact 6), and what is
    /// write-protected here would not be there.
    fn keep_from_forks(&self) -> Result<(), BackendError> {
        mapping::advise(self.span, Advice::LinuxDontFork)
            .map_err(|errno| mapping_error("madvise(MADV_DONTFORK)", errno))
    }

    /// Makes room for `pages` pages that are moved out.
    fn open_staging(&self, pages: u64) -> Result<(), BackendError> {
        let staging = match self.staging.get() {
            Some(staging) => staging,
            None => self.first_staging()?,
        };
        staging
            .begin(pages)
            .map_err(|errno| host_error("madvise(MADV_DONTNEED)", errno))
    }

    fn first_staging(&self) -> Result<&Staging, BackendError> {
        self.keep_from_forks()?;
        let staging = Staging::new(Arc::clone(&self.host))
            .map_err(|errno| mapping_error("mmap of staging", errno))?;
        staging
            .open()
            .map_err(|errno| mapping_error("UFFDIO_REGISTER", errno))?;
        // Only the holder of the region's lease stops pages.
        Ok(self.staging.get_or_init(|| staging))
    }

    /// Ends what is under way, and undoes what was done to the mappings.
    fn give_back(&self) {
        if self.by_move && self.staging().is_none() {
            return;
        }
        self.put_back(self.journal.run());
        self.settle_accounts();
        // Lifts write-protection and wakes as well. It fails only if somebody
        // has unmapped a part: there is nothing left to do for that.
        let _ = self.host.uffd.unregister(self.span);
        for part in self.parts.iter().filter(|part| !part.attributes.dont_fork) {
            let _ = mapping::advise(self.span_of(part.range), Advice::LinuxDoFork);
        }
    }

    /// Where pages go that are moved out; none if none ever were.
    pub(super) fn staging(&self) -> Option<&Staging> {
        self.staging.get()
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

/// The file behind `source`, if it is declared to be a memfd of this process.
fn owned_memfd(source: &HostRegion, options: RegionOptions) -> Result<Option<Memfd>, MemfdFault> {
    let Some(file) = source.owned_memfd() else {
        return Ok(None);
    };
    let memfd = Memfd::new(file, pages_in(source.byte_len()))?;
    if !options.dma_guarded {
        return Err(MemfdFault::Unguarded);
    }
    Ok(Some(memfd))
}

/// Whether the guest's own pages are to be moved out.
fn stops_by_move(host: &Host, options: RegionOptions) -> Result<bool, BackendError> {
    match host.capabilities().stop_method {
        StopMethod::Move => Ok(true),
        _ if host.asked == StopMethod::WriteProtect || options.dma_guarded => Ok(false),
        // Nothing would notice a device that writes to a page being merged.
        _ => Err(host_error(
            "attach: UFFDIO_MOVE (Linux 6.8) is needed for memory that is not dma_guarded",
            Errno::OPNOTSUPP,
        )),
    }
}

impl Memory for LinuxMemory {
    type Store = LinuxStore;

    /// Whatever is still stopped runs again, and the memory is as registered
    /// with nobody.
    fn detach(&self) {
        let mut claim = self.claim.lock();
        if claim.is_none() {
            return;
        }
        self.give_back();
        *claim = None;
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

    fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), BackendError> {
        self.source
            .read(page, buf)
            .map_err(|error| host_error("read of guest memory", std::io::Error::other(error)))
    }

    fn max_stop(&self) -> u64 {
        MAX_STOP
    }

    fn stop(&self, range: PageRange, backing: Backing) -> Result<Held, BackendError> {
        self.check_stop(range, backing)?;
        self.clear_staging()?;
        let goes_out = self.goes_out(backing);
        if goes_out {
            self.open_staging(range.len())?;
        }
        self.journal.begin(range);
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
