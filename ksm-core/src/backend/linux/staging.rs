//! [`Staging`]: where the pages of a run are while they are out, and [`Stagings`],
//! those that nobody uses now.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vm_memory::VolatileSlice;

use super::journal::MAX_STOP;
use super::mapping::{self, Attributes};
use super::span::Span;
use super::uffd::{Mode, Userfaultfd};
use crate::page::{PAGE_SIZE, PageBuf};
use crate::sync::Mutex;

/// Places in the area, in pages: what a pass merges together, 16 MiB, has room in it.
const PLACES: u64 = 16 * MAX_STOP;

/// Places for the pages of several runs, one after the other, so that those that
/// have been replaced are dropped together: that takes the lock of the address
/// space. Known to nobody else, so the pages in it do not change.
#[derive(Debug)]
pub(super) struct Staging {
    span: Span,
    /// The first place of the run that was stopped last.
    run: AtomicU64,
    /// The first place that was not used since all were dropped.
    next: AtomicU64,
}

/// Empty staging areas, for the next region that is merged: to map one takes five
/// system calls that wait for the lock of the address space, and few are needed at
/// a time.
#[derive(Debug, Default)]
pub(super) struct Stagings(Mutex<Vec<Arc<Staging>>>);

impl Stagings {
    /// One that nobody else uses, to which `uffd` moves pages.
    ///
    /// # Errors
    /// The call that failed, where one had to be mapped.
    pub(super) fn take(&self, uffd: &Userfaultfd) -> Result<Arc<Staging>, (&'static str, Errno)> {
        let spare = self.0.lock().pop();
        spare.map_or_else(|| Ok(Arc::new(Staging::new(uffd)?)), Ok)
    }

    /// Takes back one that was swept, from the only one that used it.
    pub(super) fn give_back(&self, staging: Arc<Staging>) {
        self.0.lock().push(staging);
    }
}

impl Staging {
    fn new(uffd: &Userfaultfd) -> Result<Self, (&'static str, Errno)> {
        let attributes = Attributes {
            no_reserve: true,
            dont_dump: true,
            no_huge: true,
            ..Attributes::default()
        };
        let span = mapping::map_anonymous(PLACES, attributes);
        // From here on dropping it unmaps it.
        let staging = Self {
            span: span.map_err(|errno| ("mmap of staging", errno))?,
            run: AtomicU64::new(0),
            next: AtomicU64::new(0),
        };
        let applied = attributes.apply(staging.span);
        applied.map_err(|errno| ("madvise of staging", errno))?;
        let registered = uffd.register(staging.span, Mode::Missing);
        registered.map_err(|errno| ("UFFDIO_REGISTER", errno))?;
        Ok(staging)
    }

    /// Makes room for a run of `pages` pages. Nothing of the last one is out.
    pub(super) fn begin(&self, pages: u64) -> Result<(), Errno> {
        if self.next.load(Ordering::Acquire) + pages > PLACES {
            self.sweep()?;
        }
        let first = self.next.load(Ordering::Acquire);
        self.run.store(first, Ordering::Release);
        self.next.store(first + pages, Ordering::Release);
        Ok(())
    }

    /// Drops all pages. None is out.
    pub(super) fn sweep(&self) -> Result<(), Errno> {
        let used = self.next.load(Ordering::Acquire);
        if used > 0 {
            mapping::drop_pages(self.span.part(0, used))?;
            self.next.store(0, Ordering::Release);
        }
        Ok(())
    }

    /// The places of `pages` pages of the run, from its `first` on.
    pub(super) fn slots(&self, first: u64, pages: u64) -> Span {
        self.span
            .part(self.run.load(Ordering::Acquire) + first, pages)
    }

    /// Copies the page in a place of the run that is taken.
    pub(super) fn read(&self, slot: u64, buf: &mut PageBuf) {
        copy_page(self.slots(slot, 1), buf);
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        mapping::unmap(self.span);
    }
}

/// Copies a present page of memory that this backend mapped itself.
pub(super) fn copy_page(page: Span, buf: &mut PageBuf) {
    debug_assert_eq!(page.pages(), 1);
    // SAFETY: the page is mapped and stays so while `page` is in use (see
    // `Span`); a volatile slice is no Rust reference.
    let slice = unsafe { VolatileSlice::new(page.pointer().cast::<u8>(), PAGE_SIZE) };
    slice.copy_to(&mut buf.bytes_mut()[..]);
}

/// Fills a page of memory that this backend mapped itself.
pub(super) fn fill_page(page: Span, buf: &PageBuf) {
    debug_assert_eq!(page.pages(), 1);
    // SAFETY: as in `copy_page`; the page is writable and nobody else's.
    let slice = unsafe { VolatileSlice::new(page.pointer().cast::<u8>(), PAGE_SIZE) };
    slice.copy_from(&buf.bytes()[..]);
}
