//! [`Memfd`]: guest memory that is a file of this process alone.
//!
//! What differs from private anonymous memory: the file, not the page table,
//! holds the guest's bytes. Frames that are mapped over a range free nothing, so
//! the range is punched out of the file as well; whatever is mapped there again
//! shows what the file holds, so the file is made to hold the right thing first.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, OFlags, SealFlags, SeekFrom, Stat, fallocate, fcntl_get_seals, fcntl_getfl,
    fstat, major, minor, seek,
};
use rustix::io::{Errno, pwrite};
use vm_memory::FileOffset;

use super::mapping::{self, Attributes};
use super::smaps::Mapping;
use super::span::Span;
use super::store::transfer;
use super::{host_error, mapping_error};
use crate::backend::PageRun;
use crate::error::{BackendError, MemfdFault, RegisterError};
use crate::page::{PAGE_SIZE, PageBuf, PageIndex, PageRange, bytes_in, pages_in};

/// Seals under which no page can be freed (design fact 1).
const NO_PUNCH: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);

/// The file behind a region, and where in it the region starts.
#[derive(Debug)]
pub(super) struct Memfd {
    file: Arc<File>,
    /// Offset of the region's first byte.
    start: u64,
    /// Major and minor number of its device, and its inode, as smaps has them.
    identity: ((u32, u32), u64),
}

impl Memfd {
    /// Checks what can be checked of the file of a region of `pages` pages. That
    /// it is mapped there, and nowhere else, is vetted with the mappings.
    pub(super) fn new(at: Option<&FileOffset>, pages: u64) -> Result<Self, MemfdFault> {
        let at = at.ok_or(MemfdFault::NoFile)?;
        let (file, start) = (Arc::clone(at.arc()), at.start());
        // Only files in memory have seals, and only those without a name cannot
        // be opened by others.
        let seals = fcntl_get_seals(&file).map_err(|_| MemfdFault::NotMemfd)?;
        let stat = fstat(&file).map_err(|_| MemfdFault::NotMemfd)?;
        if stat.st_nlink != 0 {
            return Err(MemfdFault::NotMemfd);
        }
        let end = start.checked_add(bytes_in(pages));
        if end.is_none_or(|end| u64::try_from(stat.st_size).unwrap_or(0) < end) {
            return Err(MemfdFault::Short);
        }
        if seals.intersects(NO_PUNCH) {
            return Err(MemfdFault::Sealed);
        }
        let mode = fcntl_getfl(&file).map(|flags| flags & OFlags::RWMODE);
        if mode != Ok(OFlags::RDWR) {
            return Err(MemfdFault::ReadOnly);
        }
        Ok(Self {
            identity: identity(&stat),
            file,
            start,
        })
    }

    /// The same file, for the part of the region from `page` on.
    pub(super) fn from(&self, page: PageIndex) -> Self {
        Self {
            file: Arc::clone(&self.file),
            start: self.offset(page),
            identity: self.identity,
        }
    }

    /// Checks that `map`, in which `address` lies, shows the file there: the byte
    /// at `offset` of the region.
    pub(super) fn vet(
        &self,
        map: &Mapping,
        address: u64,
        offset: u64,
    ) -> Result<(), RegisterError> {
        let shown = map.offset + (address - map.start);
        let is_there = map.shared && self.is_of(map) && shown == self.start + offset;
        if is_there {
            return Ok(());
        }
        Err(RegisterError::Memfd {
            address,
            why: MemfdFault::NotMappedThere,
        })
    }

    /// Checks that `map` shows the region's part of the file nowhere but in
    /// `span`: there it would not follow a merge.
    pub(super) fn vet_other(&self, map: &Mapping, span: Span) -> Result<(), RegisterError> {
        if !self.is_of(map) {
            return Ok(());
        }
        let (start, end) = (span.address(), span.address() + span.bytes());
        let shows = |from: u64, upto: u64| {
            let offset = map.offset + (from - map.start);
            from < upto && offset < self.start + span.bytes() && self.start < offset + (upto - from)
        };
        for (from, upto) in [
            (map.start, map.end.min(start)),
            (map.start.max(end), map.end),
        ] {
            if shows(from, upto) {
                return Err(RegisterError::Memfd {
                    address: start,
                    why: MemfdFault::MappedTwice { address: from },
                });
            }
        }
        Ok(())
    }

    fn is_of(&self, map: &Mapping) -> bool {
        (map.device, map.inode) == self.identity
    }

    /// Refuses once somebody has sealed it, while nothing has changed yet.
    pub(super) fn check_seals(&self) -> Result<(), BackendError> {
        match fcntl_get_seals(&self.file) {
            Ok(seals) if seals.intersects(NO_PUNCH) => {
                Err(host_error("punching a sealed memfd", Errno::PERM))
            }
            Ok(_) => Ok(()),
            Err(errno) => Err(host_error("fcntl(F_GET_SEALS)", errno)),
        }
    }

    /// Frees the pages of `range`: the file holds zeros there, and so does what
    /// is mapped of it.
    pub(super) fn punch(&self, range: PageRange) -> Result<(), BackendError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match fallocate(
                &self.file,
                flags,
                self.offset(range.start),
                range.byte_len(),
            ) {
                Err(Errno::INTR) => {}
                done => return done.map_err(|errno| host_error("fallocate(PUNCH_HOLE)", errno)),
            }
        }
    }

    /// Up to `max_pages` pages of `range` for which the file holds memory and that
    /// are not in `runs`; all in order.
    ///
    /// This moves the position of the descriptor, which nobody else uses.
    pub(super) fn hidden(
        &self,
        range: PageRange,
        max_pages: u64,
        runs: &[PageRun],
    ) -> Vec<PageRange> {
        let mut hidden = Vec::new();
        let mut left = max_pages;
        let mut add = |start, end| {
            let part = PageRange { start, end };
            if !part.is_empty() && left > 0 {
                let part = PageRange::new(start, part.len().min(left));
                left -= part.len();
                hidden.push(part);
            }
            left > 0
        };
        let mut known = runs.iter().map(|run| run.range).peekable();
        let mut at = range.start;
        while let Some(data) = self.data_from(at, range.end) {
            // A run may reach over holes, where frames are mapped.
            at = at.max(data.start);
            while let Some(run) = known.next_if(|run| run.start < data.end) {
                add(at, run.start);
                at = at.max(run.end);
            }
            if !add(at, data.end) {
                break;
            }
            at = at.max(data.end);
        }
        hidden
    }

    /// The next pages for which the file holds memory, from `from` on and before
    /// `end`.
    fn data_from(&self, from: PageIndex, end: PageIndex) -> Option<PageRange> {
        if from >= end {
            return None;
        }
        // At the end of the data the answer is ENXIO.
        let start = seek(&self.file, SeekFrom::Data(self.offset(from))).ok()?;
        let behind = seek(&self.file, SeekFrom::Hole(start)).ok()?;
        let page = |offset: u64| PageIndex(pages_in(offset - self.start));
        let found = PageRange {
            start: page(start),
            end: page(behind),
        };
        let found = found.intersection(PageRange { start: from, end });
        (!found.is_empty()).then_some(found)
    }

    /// Writes a page that is not mapped.
    pub(super) fn write(&self, page: PageIndex, content: &PageBuf) -> Result<(), BackendError> {
        transfer("pwrite", PAGE_SIZE, |done| {
            let offset = self.offset(page) + done as u64;
            pwrite(&self.file, &content.bytes()[done..], offset)
        })
    }

    /// Maps the pages of `range` at `span`, without what was carried there.
    pub(super) fn map_over(
        &self,
        span: Span,
        range: PageRange,
        attributes: Attributes,
    ) -> Result<(), BackendError> {
        let offset = self.offset(range.start);
        mapping::map_shared_over(span, attributes, self.file.as_fd(), offset)
            .map_err(|errno| mapping_error("mmap", errno))
    }

    fn offset(&self, page: PageIndex) -> u64 {
        self.start + page.byte_offset()
    }
}

fn identity(stat: &Stat) -> ((u32, u32), u64) {
    ((major(stat.st_dev), minor(stat.st_dev)), stat.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::PageState;

    #[test]
    fn what_the_page_map_does_not_say_is_hidden() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
        file.set_len(bytes_in(32)).unwrap();
        // The region's first page is the file's third.
        let at = FileOffset::new(file, bytes_in(2));
        let memfd = Memfd::new(Some(&at), 30).unwrap();
        let range = |start, len| PageRange::new(PageIndex(start), len);
        for page in [0, 1, 2, 3, 10, 11, 20].map(PageIndex) {
            memfd.write(page, &PageBuf::zeroed()).unwrap();
        }
        let run = |range| PageRun {
            range,
            state: PageState::File,
            huge: false,
        };
        let hidden = |within, max, runs: &[PageRun]| memfd.hidden(within, max, runs);
        let all = range(0, 30);
        assert_eq!(
            hidden(all, 100, &[]),
            [range(0, 4), range(10, 2), range(20, 1)]
        );
        assert_eq!(hidden(all, 5, &[]), [range(0, 4), range(10, 1)]);
        assert_eq!(hidden(range(11, 9), 100, &[]), [range(11, 1)]);
        let runs = [range(1, 1), range(2, 9), range(15, 3)].map(run);
        let expected = [range(0, 1), range(11, 1), range(20, 1)];
        assert_eq!(hidden(all, 100, &runs), expected);
        assert_eq!(hidden(all, 100, &[run(all)]), []);
        memfd.punch(all).unwrap();
        assert_eq!(hidden(all, 100, &[]), []);
    }
}
