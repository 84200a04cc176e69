//! [`Span`]: whole pages of host memory in this backend's care.

use std::ffi::c_void;

use crate::page::{PAGE_SIZE, bytes_in};

/// Whole pages of host memory that this backend may remap, move and stop:
/// pages of an attached region, or memory that it mapped itself.
///
/// Making one is what is unsafe; the calls that take one rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    start: usize,
    pages: u64,
}

impl Span {
    /// The `pages` pages at address `start`.
    ///
    /// # Safety
    /// For as long as the span or a part of it is used: the pages are mapped,
    /// nobody else unmaps them, no Rust reference points into them, and whoever
    /// owns them agreed that they are replaced by others of equal content.
    pub(super) const unsafe fn new(start: usize, pages: u64) -> Self {
        Self { start, pages }
    }

    /// Address of the first byte, as the kernel takes it.
    pub(super) const fn address(self) -> u64 {
        self.start as u64
    }

    /// Pointer to the first byte.
    pub(super) const fn pointer(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// How many pages.
    pub(super) const fn pages(self) -> u64 {
        self.pages
    }

    /// Length in bytes, as the kernel takes it.
    pub(super) const fn bytes(self) -> u64 {
        bytes_in(self.pages)
    }

    /// Length in bytes.
    pub(super) fn byte_len(self) -> usize {
        usize_from(self.bytes())
    }

    /// The `pages` pages from the `first`th on.
    ///
    /// # Panics
    /// If they are not all inside.
    pub(super) fn part(self, first: u64, pages: u64) -> Self {
        assert!(
            first
                .checked_add(pages)
                .is_some_and(|end| end <= self.pages),
            "{first}+{pages} pages of {}",
            self.pages
        );
        Self {
            start: self.start + usize_from(first) * PAGE_SIZE,
            pages,
        }
    }

    /// The span cut in two, unless it is a single page.
    pub(super) fn halves(self) -> Option<(Self, Self)> {
        let half = self.pages / 2;
        (half > 0).then(|| (self.part(0, half), self.part(half, self.pages - half)))
    }
}

/// A length or offset in memory.
pub(super) fn usize_from(value: u64) -> usize {
    usize::try_from(value).expect("a length in memory fits in usize on the 64-bit hosts we support")
}
