//! Stopping pages by moving them out (`UFFDIO_MOVE`), and putting them back.

use rustix::io::Errno;
use rustix::mm::Advice;

use super::journal::Journal;
use super::memory::LinuxMemory;
use super::uffd::{Mode, MoveStop};
use super::{RETRY_PAUSE, host_error, mapping, mapping_error};
use crate::backend::{Held, Refusal};
use crate::error::BackendError;
use crate::page::{PageIndex, PageRange};

/// How often a move is tried while the address space is changing.
const TRIES: u32 = 100;

/// How often an unregistering that found no memory is tried, a millisecond
/// apart.
const UNREGISTER_TRIES: u32 = 5_000;

impl LinuxMemory {
    /// Moves the pages of `range` out. Until they are back or replaced, whoever
    /// touches one waits.
    pub(super) fn move_out(&self, range: PageRange) -> Result<Held, BackendError> {
        if let Err(errno) = self.host.uffd.register(self.span_of(range), Mode::Both) {
            // A part of it may be registered.
            self.release(range);
            return Err(mapping_error("UFFDIO_REGISTER", errno));
        }
        match self.move_all(range) {
            Ok(held) if !held.held.is_empty() => Ok(held),
            none => {
                self.put_back(range);
                none
            }
        }
    }

    /// Moves are often short (design fact 6): what is out is what the kernel
    /// counted, and each page at which it stopped is looked at by itself.
    fn move_all(&self, range: PageRange) -> Result<Held, BackendError> {
        let mut held = Held::default();
        let mut at = range.start;
        let mut longest = range.len();
        let mut tries = 0;
        while at < range.end {
            let piece = PageRange::new(at, longest).intersection(range);
            let moved = self
                .host
                .uffd
                .move_pages(self.slots_of(piece), self.span_of(piece));
            if moved.pages > 0 {
                push(&mut held.held, PageRange::new(at, moved.pages));
                at = at.plus(moved.pages);
                tries = 0;
            }
            let left = piece.len() - moved.pages;
            let refusal = match moved.stop {
                None => {
                    longest = range.len();
                    continue;
                }
                // Perhaps it crosses from one mapping into the next.
                Some(MoveStop::Unfit) if left > 1 => {
                    longest = left / 2;
                    continue;
                }
                Some(MoveStop::Again) if tries < TRIES => {
                    tries += 1;
                    std::thread::yield_now();
                    continue;
                }
                Some(MoveStop::Hole) => Some(Refusal::Raced),
                Some(MoveStop::Busy) => self.move_busy(at),
                Some(stop) => return Err(error_of(stop)),
            };
            match refusal {
                Some(refusal) => held.refused.push((at, refusal)),
                None => push(&mut held.held, PageRange::one(at)),
            }
            at = at.plus(1);
        }
        Ok(held)
    }

    /// Tries once more to move a page that was busy; says why it cannot be.
    ///
    /// After a fork whose child is gone the page is the guest's alone, but the
    /// kernel finds out only at the next write (design fact 6): so pretend one.
    fn move_busy(&self, page: PageIndex) -> Option<Refusal> {
        let one = PageRange::one(page);
        let span = self.span_of(one);
        if self.host.pagemap.exclusive(span) == Ok(false) {
            return Some(Refusal::NotExclusive);
        }
        // Not while it is registered: were it discarded meanwhile, we would
        // wait for ourselves.
        if self.host.uffd.unregister(span).is_err() {
            return Some(Refusal::Pinned);
        }
        let written = mapping::advise(span, Advice::LinuxPopulateWrite);
        if self.host.uffd.register(span, Mode::Both).is_err() || written.is_err() {
            return Some(Refusal::NotExclusive);
        }
        let moved = self.host.uffd.move_pages(self.slots_of(one), span);
        match moved.stop {
            None => None,
            Some(MoveStop::Busy) => Some(Refusal::Pinned),
            Some(_) => Some(Refusal::Raced),
        }
    }

    /// Puts every page of `range` that is out, and not replaced, back to where
    /// it was, and ends the registration of what was not replaced. Can be
    /// repeated, by any thread.
    pub(super) fn put_back(&self, range: PageRange) {
        if range.iter().all(|page| self.journal.is_mapped(page)) {
            // What is left of it is dropped with that of other runs.
            return;
        }
        for staged in self.staged(range) {
            for kept in Journal::parts(staged, |page| !self.journal.is_replaced(page)) {
                self.move_back(kept);
            }
            // Nothing is lost: these are replaced, or their place is gone.
            let _ = mapping::drop_pages(self.slots_of(staged));
        }
        for kept in Journal::parts(range, |page| !self.journal.is_mapped(page)) {
            self.release(kept);
        }
    }

    /// The parts of `range` that have a page in the staging area.
    pub(super) fn staged(&self, range: PageRange) -> Vec<PageRange> {
        let range = range.intersection(self.journal.run());
        if range.is_empty() || !self.journal.is_out() || self.staging().is_none() {
            return Vec::new();
        }
        let mut staged = Vec::new();
        let scanned = self
            .host
            .pagemap
            .populated(self.slots_of(range), range.len(), |run| {
                let part = PageRange::new(range.start.plus(run.first), run.pages);
                push(&mut staged, part);
            });
        match scanned {
            Ok(_) => staged,
            // Then a move finds out, page by page.
            Err(_) => vec![range],
        }
    }

    /// Moves the pages of `range` back. Comes to an end only when all are, or
    /// have no place to go back to: to give up would be to lose them.
    fn move_back(&self, range: PageRange) {
        let mut at = range.start;
        let mut longest = range.len();
        let mut tries = 0;
        while at < range.end {
            let piece = PageRange::new(at, longest).intersection(range);
            let moved = self
                .host
                .uffd
                .move_pages(self.span_of(piece), self.slots_of(piece));
            at = at.plus(moved.pages);
            let left = piece.len() - moved.pages;
            match moved.stop {
                None => longest = range.len(),
                Some(MoveStop::Unfit) if left > 1 => longest = left / 2,
                // Nothing is out, or nothing is left to go back to.
                Some(MoveStop::Hole) => at = at.plus(1),
                Some(MoveStop::Again | MoveStop::NoMemory | MoveStop::Busy) if tries < TRIES => {
                    tries += 1;
                    std::thread::sleep(RETRY_PAUSE);
                }
                Some(_) if self.copy_back(at) => {
                    at = at.plus(1);
                    tries = 0;
                }
                Some(_) => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }

    /// Copies a page back that cannot be moved. Returns whether it is back, or
    /// has no place to go back to.
    fn copy_back(&self, page: PageIndex) -> bool {
        let one = PageRange::one(page);
        let span = self.span_of(one);
        // A mapping that replaced it is not registered: see `map_frames`.
        let replaced = self.host.uffd.write_protect(span, false) == Err(Errno::NOENT);
        replaced
            || matches!(
                self.host.uffd.copy_page(span, self.slots_of(one)),
                Ok(()) | Err(Errno::EXIST | Errno::NOENT)
            )
    }

    /// Ends the registration of `range`, and wakes whoever waits there.
    pub(super) fn release(&self, range: PageRange) {
        let span = self.span_of(range);
        for _ in 0..UNREGISTER_TRIES {
            match self.host.uffd.unregister(span) {
                // It may have to split a mapping, and none may be left.
                Err(Errno::NOMEM | Errno::AGAIN | Errno::INTR) => {
                    std::thread::sleep(RETRY_PAUSE);
                }
                // Other errors: a part of it has been unmapped.
                _ => return,
            }
        }
    }

    /// Makes sure that no page of an earlier run is out.
    pub(super) fn clear_staging(&self) {
        let run = self.journal.run();
        if self.journal.is_open() && !self.staged(run).is_empty() {
            self.put_back(run);
        }
    }
}

/// Adds `range` to a list in order, as one with the last if they touch.
pub(super) fn push(list: &mut Vec<PageRange>, range: PageRange) {
    match list.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => list.push(range),
    }
}

fn error_of(stop: MoveStop) -> BackendError {
    match stop {
        MoveStop::Again => BackendError::Again,
        MoveStop::NoMemory => BackendError::OutOfMemory,
        MoveStop::Other(errno) => host_error("UFFDIO_MOVE", errno),
        MoveStop::Occupied => host_error("UFFDIO_MOVE", Errno::EXIST),
        // Locked since it was registered, for one.
        MoveStop::Unfit | MoveStop::Hole | MoveStop::Busy => {
            host_error("UFFDIO_MOVE", Errno::INVAL)
        }
    }
}
