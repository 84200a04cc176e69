//! Stopping writes by write-protection.

use rustix::io::Errno;

use super::journal::Journal;
use super::memory::LinuxMemory;
use super::out::push;
use super::pagemap::Categories;
use super::span::{Span, usize_from};
use super::uffd::Mode;
use super::{RETRY_PAUSE, host_error, mapping_error};
use crate::backend::{Backing, Held, Refusal};
use crate::error::BackendError;
use crate::page::{PageIndex, PageRange};

/// How often lifting write-protection is tried while there is no memory.
const LIFT_TRIES: u32 = 5_000;

impl LinuxMemory {
    /// Write-protects the pages of `range` that hold bytes of their own.
    ///
    /// What is absent at that moment is not stopped (design fact 3), and a
    /// merged page that nobody has touched must not get a marker (fact 2). So
    /// only what the page map shows is protected, and what it shows afterwards,
    /// still protected, is held.
    pub(super) fn stop_writes(
        &self,
        range: PageRange,
        backing: Backing,
    ) -> Result<Held, BackendError> {
        let mut verdicts = vec![Some(Refusal::Raced); usize_from(range.len())];
        let index = |page: PageIndex| usize_from(page.0 - range.start.0);
        let mut eligible = Vec::new();
        if self.memfd.is_some() && backing == Backing::Own {
            // What the engine read a moment ago may be gone from the page table:
            // to split a huge page of a file, the kernel takes all of it out.
            self.show(range);
        }
        self.look(range, |part, is| {
            let verdict = self.refusal(backing, is);
            verdicts[index(part.start)..index(part.end)].fill(verdict);
            if verdict.is_none() {
                push(&mut eligible, part);
            }
        })?;
        for &part in &eligible {
            if let Err(error) = self.protect(self.span_of(part)) {
                self.let_write(range);
                self.host.uffd.wake(self.span_of(range));
                return Err(error);
            }
        }
        let mut stopped = vec![false; verdicts.len()];
        let looked = self.look(range, |part, is| {
            let kept = self.refusal(backing, is).is_none() && !is.written();
            stopped[index(part.start)..index(part.end)].fill(kept);
        });
        if let Err(error) = looked {
            self.let_write(range);
            self.host.uffd.wake(self.span_of(range));
            return Err(error);
        }
        for part in &eligible {
            for raced in Journal::parts(*part, |page| !stopped[index(page)]) {
                verdicts[index(raced.start)..index(raced.end)].fill(Some(Refusal::Raced));
                self.unprotect(self.span_of(raced));
                self.host.uffd.wake(self.span_of(raced));
            }
        }
        Ok(Held {
            held: Journal::parts(range, |page| verdicts[index(page)].is_none()).collect(),
            refused: range
                .iter()
                .filter_map(|page| Some((page, verdicts[index(page)]?)))
                .collect(),
        })
    }

    /// Lifts the write-protection of every page of `range` whose mapping is
    /// still the one that was stopped.
    pub(super) fn let_write(&self, range: PageRange) {
        for kept in Journal::parts(range, |page| !self.journal.is_mapped(page)) {
            self.unprotect(self.span_of(kept));
        }
    }

    fn look(
        &self,
        range: PageRange,
        mut each: impl FnMut(PageRange, Categories),
    ) -> Result<(), BackendError> {
        self.host
            .pagemap
            .populated(self.span_of(range), range.len(), |run| {
                each(
                    PageRange::new(range.start.plus(run.first), run.pages),
                    run.is,
                );
            })
            .map(drop)
            .map_err(|errno| host_error("PAGEMAP_SCAN", errno))
    }

    /// Write-protects `span`. On failure a part of it may be protected.
    fn protect(&self, span: Span) -> Result<(), BackendError> {
        let uffd = &self.host.uffd;
        let mut done = uffd.write_protect(span, true);
        if done == Err(Errno::NOENT) {
            // Replaced at a time when it could not be registered again.
            uffd.register(span, Mode::WriteProtect)
                .map_err(|errno| mapping_error("UFFDIO_REGISTER", errno))?;
            done = uffd.write_protect(span, true);
        }
        done.map_err(|errno| match errno {
            Errno::NOMEM => BackendError::OutOfMemory,
            errno => host_error("UFFDIO_WRITEPROTECT", errno),
        })
    }

    /// Lifts the write-protection of `span`, of each mapping by itself where
    /// one of them is not registered (design fact 5).
    pub(super) fn unprotect(&self, span: Span) {
        for _ in 0..LIFT_TRIES {
            match self.host.uffd.write_protect(span, false) {
                Err(Errno::NOMEM) => std::thread::sleep(RETRY_PAUSE),
                Ok(()) => return,
                Err(_) => break,
            }
        }
        if let Some((left, right)) = span.halves() {
            self.unprotect(left);
            self.unprotect(right);
        }
    }

    /// Why a page must not be stopped, if so.
    fn refusal(&self, backing: Backing, is: Categories) -> Option<Refusal> {
        match backing {
            // Mapping over a part of a huge page frees nothing. Punching a part
            // out of one that is a memfd's does.
            Backing::Own if is.huge() && self.memfd.is_none() => Some(Refusal::Huge),
            // The frame shows: there is no copy to stop.
            Backing::Frame if is.file() => Some(Refusal::Raced),
            _ => None,
        }
    }
}
