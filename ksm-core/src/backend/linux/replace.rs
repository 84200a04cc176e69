//! Putting other pages in place of held ones.

use rustix::io::Errno;
use rustix::mm::Advice;

use super::journal::Journal;
use super::mapping::{self, Attributes, Scratch};
use super::memfd::Memfd;
use super::memory::LinuxMemory;
use super::staging::fill_page;
use super::store::LinuxStore;
use super::uffd::Mode;
use super::vet::Part;
use super::{host_error, mapping_error};
use crate::backend::{Backing, Memory};
use crate::error::BackendError;
use crate::page::{FrameId, PageBuf, PageRange};

impl LinuxMemory {
    /// Maps frames in place of held pages.
    ///
    /// The order makes it plain to `was_replaced`, between any two calls, which
    /// mapping is there: the fresh one is not registered until the journal says
    /// so, and pages that are out stay until then.
    ///
    /// Once mapped, the pages hold what they must, so nothing after it fails
    /// the call. What the old mapping carried, and the pages that are out, are
    /// left for `rest`: once for many runs.
    pub(super) fn map_frames(
        &self,
        range: PageRange,
        store: &LinuxStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        self.map_over(range, store, first)?;
        self.journal.mapped(range);
        self.register_frames(range);
        self.host.uffd.wake(self.span_of(range));
        self.free_below(range);
        Ok(())
    }

    /// Maps frames in place of pages that nobody uses yet.
    pub(super) fn map_frames_at(
        &self,
        range: PageRange,
        store: &LinuxStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        self.map_over(range, store, first)?;
        self.carry(range, Attributes::of_frames);
        self.register_frames(range);
        self.free_below(range);
        Ok(())
    }

    fn map_over(
        &self,
        range: PageRange,
        store: &LinuxStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        if let Some(memfd) = &self.memfd {
            memfd.check_seals()?;
        }
        let (span, attributes) = (self.span_of(range), self.attributes(range));
        mapping::map_file_over(span, attributes, store.fd(), first.byte_offset())
            .map_err(|errno| mapping_error("mmap", errno))
    }

    /// Lets writes to copies over fresh mappings of frames be stopped.
    fn register_frames(&self, range: PageRange) {
        if self.options.dma_guarded {
            let span = self.span_of(range);
            let _ = self.host.uffd.register(span, Mode::WriteProtect);
        }
    }

    /// Frees what a memfd still holds below frames that are mapped over it. If
    /// that fails nothing is lost but memory.
    fn free_below(&self, range: PageRange) {
        if let Some(memfd) = &self.memfd {
            let _ = memfd.punch(range);
        }
    }

    /// Drops the copies of held pages that stand over equal frames.
    pub(super) fn drop_copies(&self, range: PageRange) -> Result<(), BackendError> {
        let span = self.span_of(range);
        mapping::drop_pages(span).map_err(|errno| host_error("madvise(MADV_DONTNEED)", errno))?;
        // The marker survives the page (design fact 4).
        self.unprotect(span);
        self.host.uffd.wake(span);
        Ok(())
    }

    /// Drops held pages of the guest's own memory that are all zero.
    ///
    /// Written down first: if only a part is dropped, the rest may go as well,
    /// and the guest sees no difference.
    pub(super) fn drop_zeroed(&self, range: PageRange) -> Result<(), BackendError> {
        self.journal.zeroed(range);
        if self.goes_out(Backing::Own) {
            let slots = self.slots_of(range);
            let dropped = mapping::drop_pages(slots);
            dropped.map_err(|errno| host_error("madvise(MADV_DONTNEED)", errno))
        } else {
            self.drop_own(range)
        }
    }

    /// Drops pages of the guest's own memory, which read as zero then.
    pub(super) fn drop_own(&self, range: PageRange) -> Result<(), BackendError> {
        match &self.memfd {
            Some(memfd) => memfd.punch(range),
            None => mapping::drop_pages(self.span_of(range))
                .map_err(|errno| host_error("madvise(MADV_DONTNEED)", errno)),
        }
    }

    /// Maps pages of zeros in place of frames and their copies.
    pub(super) fn map_zeros(&self, range: PageRange) -> Result<(), BackendError> {
        self.map_empty(range)?;
        self.journal.mapped(range);
        self.now_own(range);
        Ok(())
    }

    /// The same for pages that nobody uses yet.
    pub(super) fn map_own(&self, range: PageRange) -> Result<(), BackendError> {
        self.map_empty(range)?;
        self.now_own(range);
        Ok(())
    }

    fn map_empty(&self, range: PageRange) -> Result<(), BackendError> {
        let (span, attributes) = (self.span_of(range), self.attributes(range));
        match &self.memfd {
            // It may hold something still: see `free_below`.
            Some(memfd) => memfd
                .punch(range)
                .and_then(|()| memfd.map_over(span, range, attributes)),
            None => match self.anchored(range) {
                Some(scratch) => scratch
                    .move_over(span)
                    .map_err(|errno| mapping_error("mremap", errno)),
                None => mapping::map_anonymous_over(span, attributes)
                    .map_err(|errno| mapping_error("mmap", errno)),
            },
        }
    }

    /// Puts the guest's own pages in place of held copies that stand over frames.
    pub(super) fn map_copies(&self, range: PageRange) -> Result<(), BackendError> {
        match &self.memfd {
            Some(memfd) => self.write_copies(range, memfd)?,
            None => self.move_copies(range)?,
        }
        self.journal.mapped(range);
        self.now_own(range);
        if self.memfd.is_some() {
            // Or the guest would fault on each.
            self.show(range);
        }
        Ok(())
    }

    /// Writes the copies to the memfd, then maps that.
    fn write_copies(&self, range: PageRange, memfd: &Memfd) -> Result<(), BackendError> {
        let mut buf = PageBuf::zeroed();
        let written = range.iter().try_for_each(|page| {
            self.read(page, &mut buf)?;
            memfd.write(page, &buf)
        });
        let attributes = self.attributes(range);
        let done = written.and_then(|()| memfd.map_over(self.span_of(range), range, attributes));
        if done.is_err() {
            self.free_below(range);
        }
        done
    }

    /// Moves a mapping with the copies over them. Without an anchor it does not
    /// become one with its neighbours.
    fn move_copies(&self, range: PageRange) -> Result<(), BackendError> {
        let scratch = match self.anchored(range) {
            Some(scratch) => scratch,
            None => Scratch::new(range.len(), self.attributes(range))
                .map_err(|errno| mapping_error("mmap of copies", errno))?,
        };
        // An error, where filling it would meet the OOM killer.
        mapping::advise(scratch.span(), Advice::LinuxPopulateWrite).map_err(
            |errno| match errno {
                Errno::NOMEM => BackendError::OutOfMemory,
                errno => host_error("madvise(MADV_POPULATE_WRITE)", errno),
            },
        )?;
        let mut buf = PageBuf::zeroed();
        for (place, page) in (0..).zip(range.iter()) {
            self.read(page, &mut buf)?;
            fill_page(scratch.span().part(place, 1), &buf);
        }
        scratch
            .move_over(self.span_of(range))
            .map_err(|errno| mapping_error("mremap", errno))
    }

    /// After a mapping of the guest's own has come in place of frames.
    fn now_own(&self, range: PageRange) {
        self.carry(range, Attributes::of_own);
        let span = self.span_of(range);
        if !self.by_move {
            let _ = self.host.uffd.register(span, Mode::WriteProtect);
        }
        self.host.uffd.wake(span);
    }

    /// Whether the mapping of a range whose replacement was interrupted, if it
    /// was, is the new one.
    pub(super) fn was_replaced(&self, range: PageRange, backing: Backing) -> bool {
        if range.iter().all(|page| self.journal.is_replaced(page)) {
            return true;
        }
        // Held pages are always registered, fresh mappings never, until the
        // journal says so. Only pages that are out lose their registration when
        // the stop ends, and then none is out.
        let out = self.goes_out(backing) && self.staged(range).is_empty();
        !out && self.host.uffd.write_protect(self.span_of(range), false) == Err(Errno::NOENT)
    }

    /// Does what can be done of the rest of an interrupted replacement.
    pub(super) fn finish_replacement(&self, range: PageRange, backing: Backing) {
        if !range.iter().all(|page| self.journal.is_replaced(page)) {
            self.journal.mapped(range);
        }
        // What came in place of the guest's own pages can only be frames, while
        // frames may have been replaced by what the memfd holds now. Pages that
        // were dropped have no other mapping, and may be in use again.
        if backing == Backing::Own {
            for part in Journal::parts(range, |page| self.journal.is_mapped(page)) {
                self.free_below(part);
            }
        }
    }

    /// What the mappings of `range` carry that a new one is made with.
    fn attributes(&self, range: PageRange) -> Attributes {
        self.parts
            .iter()
            .find(|part| part.range.contains(range.start))
            .map(|part| part.attributes)
            .unwrap_or_default()
    }

    /// Sees to it that new mappings in `range` come to carry what the old ones
    /// did: all of it, since the rest carries it already. A mapping that could not
    /// be told is told again when it is stopped next.
    pub(super) fn carry_over(&self, range: PageRange) {
        if !range.iter().any(|page| self.journal.is_mapped(page)) {
            return;
        }
        let secret =
            |part: &Part| part.attributes.dont_dump && !part.range.intersection(range).is_empty();
        // What is kept out of dumps is never without that for long; the rest can
        // wait.
        let now = if self.parts.iter().any(secret) {
            Some(range)
        } else {
            self.journal.bared(range)
        };
        if let Some(now) = now {
            self.carry(now, Attributes::of_frames);
        }
    }

    /// Does what earlier stops have left to be done together.
    pub(super) fn settle_accounts(&self) {
        if let Some(bare) = self.journal.take_bare() {
            self.carry(bare, Attributes::of_frames);
        }
        if !self.journal.is_open() {
            self.close_staging();
        }
    }

    /// Drops what is left in the staging area, and lets others have it.
    fn close_staging(&self) {
        // If it cannot be swept now, it is when there is no more room.
        let swept = self.staging().filter(|staging| staging.sweep().is_ok());
        if swept.is_some()
            && let Some(staging) = self.staging.lock().take()
        {
            self.host.stagings.give_back(staging);
        }
    }

    /// Gives fresh mappings what `of` says of what was there at registration.
    fn carry(&self, range: PageRange, of: fn(Attributes) -> Attributes) {
        for part in &self.parts {
            let both = part.range.intersection(range);
            if !both.is_empty() {
                let _ = of(part.attributes).apply(self.span_of(both));
            }
        }
    }
}
