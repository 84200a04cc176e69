//! Taking guest memory under care, and parting it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::mm::Advice;

use super::anchor::Anchors;
use super::caps::{Host, StopMethod};
use super::claim::Claim;
use super::journal::Journal;
use super::memfd::Memfd;
use super::memory::LinuxMemory;
use super::source::HostRegion;
use super::span::Span;
use super::uffd::Mode;
use super::vet::{Content, Part, vet, vet_fresh};
use super::{host_error, mapping, mapping_error};
use crate::backend::{Memory, RegionOptions};
use crate::error::{BackendError, MemfdFault, RegisterError};
use crate::page::{PageIndex, PageRange, is_page_aligned, pages_in};
use crate::sync::Mutex;

impl LinuxMemory {
    pub(super) fn attach(
        host: Arc<Host>,
        source: HostRegion,
        options: RegionOptions,
        content: Content,
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
            vet(&host, span, memfd.as_ref(), content)?
        };
        // From here on dropping it undoes what was done.
        let mut memory = Self {
            host,
            source,
            first: PageIndex(0),
            span,
            parts,
            options,
            memfd,
            by_move,
            touched: AtomicBool::new(false),
            staging: Mutex::default(),
            journal: Journal::default(),
            anchors: Anchors::default(),
            claim: Mutex::new(Some(claim)),
        };
        memory.take_over(address, content)?;
        memory.anchors = memory.drop_anchors();
        Ok(memory)
    }

    /// Does what must be done to memory whose pages are write-protected in place,
    /// or put back one day. What is only moved out is touched when its first run is
    /// stopped: memory that is withdrawn before costs nothing.
    fn take_over(&self, address: u64, content: Content) -> Result<(), RegisterError> {
        if self.by_move && !self.options.dma_guarded {
            return Ok(());
        }
        self.touch()?;
        // What is put in place of unused pages is registered there.
        if self.by_move || content == Content::Unused && self.memfd.is_none() {
            return Ok(());
        }
        let registered = self.host.uffd.register(self.span, Mode::WriteProtect);
        registered.map_err(|errno| match errno {
            Errno::BUSY => RegisterError::OtherUserfaultfd { address },
            errno => mapping_error("UFFDIO_REGISTER", errno).into(),
        })
    }

    /// Keeps it from forks: a page that a child shares cannot be moved (design
    /// fact 6).
    pub(super) fn touch(&self) -> Result<(), BackendError> {
        if !self.touched.swap(true, Ordering::AcqRel) {
            mapping::advise(self.span, Advice::LinuxDontFork)
                .map_err(|errno| mapping_error("madvise(MADV_DONTFORK)", errno))?;
        }
        Ok(())
    }

    /// Makes room for `pages` pages that are moved out.
    pub(super) fn open_staging(&self, pages: u64) -> Result<(), BackendError> {
        self.touch()?;
        // Only the holder of the region's lease stops pages.
        let staging = match self.staging() {
            Some(staging) => staging,
            None => {
                let taken = self.host.stagings.take(&self.host.uffd);
                let taken = taken.map_err(|(call, errno)| mapping_error(call, errno))?;
                self.staging.lock().insert(taken).clone()
            }
        };
        staging
            .begin(pages)
            .map_err(|errno| host_error("madvise(MADV_DONTNEED)", errno))
    }

    /// Ends what is under way, and undoes what was done to the mappings.
    pub(super) fn give_back(&self) {
        if !self.touched.load(Ordering::Acquire) {
            return;
        }
        self.put_back(self.journal.run());
        self.settle_accounts();
        // Lifts write-protection and wakes as well. It fails if somebody has unmapped a
        // part: there is nothing left to do for that.
        let unregistered = self.host.uffd.unregister(self.span);
        if unregistered.is_err() && self.parts.iter().any(|part| part.of_file) {
            // Or if its take-over has failed.
            self.unregister_parts(self.span);
        }
        for part in self.parts.iter().filter(|part| !part.attributes.dont_fork) {
            let _ = mapping::advise(self.span_of(part.range), Advice::LinuxDoFork);
        }
    }

    /// Ends the registration of what is registered in `span`, where the kernel refuses
    /// the whole since some of it cannot be: a file's pages that were not replaced.
    fn unregister_parts(&self, span: Span) {
        if let Some((left, right)) = span.halves() {
            for half in [left, right] {
                if self.host.uffd.unregister(half).is_err() {
                    self.unregister_parts(half);
                }
            }
        }
    }

    /// Cuts it in two at `page`.
    pub(super) fn cut(&self, page: PageIndex) -> Result<(Self, Self), BackendError> {
        let (first, rest) = (
            PageRange::new(PageIndex(0), page.0),
            PageRange::new(page, self.len() - page.0),
        );
        self.settle_accounts();
        let claim = self.claim.lock().take();
        let claim = claim.ok_or_else(|| host_error("split of detached memory", Errno::INVAL))?;
        let claims = claim.split(page.0);
        Ok((self.part(first, claims.0), self.part(rest, claims.1)))
    }

    /// What takes care of `range` in place of this memory, which gives `claim` up.
    fn part(&self, range: PageRange, claim: Claim) -> Self {
        let parts = self.parts.iter().filter_map(|part| {
            let both = part.range.intersection(range);
            let start = PageIndex(both.start.0.checked_sub(range.start.0)?);
            (!both.is_empty()).then(|| Part {
                range: PageRange::new(start, both.len()),
                ..*part
            })
        });
        Self {
            host: Arc::clone(&self.host),
            source: self.source.clone(),
            first: self.first.plus(range.start.0),
            span: self.span_of(range),
            parts: parts.collect(),
            options: self.options,
            memfd: self.memfd.as_ref().map(|memfd| memfd.from(range.start)),
            by_move: self.by_move,
            touched: AtomicBool::new(self.touched.load(Ordering::Acquire)),
            staging: Mutex::default(),
            journal: Journal::default(),
            // Frames may be mapped where they would be taken from.
            anchors: Anchors::default(),
            claim: Mutex::new(Some(claim)),
        }
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
