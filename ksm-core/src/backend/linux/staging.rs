//! [`Staging`]: where the pages of a run are while they are out.

use std::sync::Arc;

use rustix::io::Errno;
use vm_memory::VolatileSlice;

use super::caps::Host;
use super::journal::MAX_STOP;
use super::mapping::{self, Attributes};
use super::span::Span;
use super::uffd::Mode;
use crate::page::{PAGE_SIZE, PageBuf};

/// A place for each page of the longest run. Known to nobody else, so the pages
/// in it do not change.
#[derive(Debug)]
pub(super) struct Staging {
    host: Arc<Host>,
    span: Span,
}

impl Staging {
    /// Maps a staging area. Until [`Staging::open`] nothing can be moved to it.
    pub(super) fn new(host: Arc<Host>) -> Result<Self, Errno> {
        let attributes = Attributes {
            no_reserve: true,
            dont_dump: true,
            no_huge: true,
            ..Attributes::default()
        };
        let span = mapping::map_anonymous(MAX_STOP, attributes)?;
        let staging = Self { host, span };
        attributes.apply(span)?;
        Ok(staging)
    }

    /// Lets pages be moved to it.
    pub(super) fn open(&self) -> Result<(), Errno> {
        self.host.uffd.register(self.span, Mode::Missing)
    }

    /// The places of `pages` pages of the run, from its `first` on.
    pub(super) fn slots(&self, first: u64, pages: u64) -> Span {
        self.span.part(first, pages)
    }

    /// Copies the page in a place that is taken.
    pub(super) fn read(&self, slot: u64, buf: &mut PageBuf) {
        copy_page(self.span.part(slot, 1), buf);
    }

    /// Whether no page is out.
    pub(super) fn is_empty(&self) -> Result<bool, Errno> {
        let mut found = false;
        self.host
            .pagemap
            .populated(self.span, 1, |_| found = true)?;
        Ok(!found)
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
