//! Pages, frames, their indexes and ranges: the only place where bytes and
//! pages are converted into one another.
//!
//! A **page** is a piece of guest memory, named by its [`PageIndex`]: its
//! linear index inside its region, in units of [`PAGE_SIZE`] bytes. A **frame**
//! is a piece of a domain's stable store, named by its [`FrameId`]. Many pages
//! may map one frame.

use std::fmt;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Size of a page and of a frame, in bytes.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;

/// [`PAGE_SIZE`] as `u64`, for byte offsets and counters.
pub const PAGE_SIZE_U64: u64 = 1 << PAGE_SHIFT;

/// Pages in `bytes`, rounding down.
#[must_use]
pub const fn pages_in(bytes: u64) -> u64 {
    bytes >> PAGE_SHIFT
}

/// Bytes in `pages`.
#[must_use]
pub const fn bytes_in(pages: u64) -> u64 {
    pages << PAGE_SHIFT
}

/// Whether `bytes` is a whole number of pages.
#[must_use]
pub const fn is_page_aligned(bytes: u64) -> bool {
    bytes & (PAGE_SIZE_U64 - 1) == 0
}

/// A page's number inside its region: 0 is its first, whatever the region was split
/// from or cloned from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The byte offset of the page's first byte inside its region.
    #[must_use]
    pub const fn byte_offset(self) -> u64 {
        bytes_in(self.0)
    }

    /// The page `n` pages after this one.
    #[must_use]
    pub const fn plus(self, n: u64) -> Self {
        Self(self.0 + n)
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of pages of one region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageRange {
    /// The first page.
    pub start: PageIndex,
    /// One past the last page.
    pub end: PageIndex,
}

impl PageRange {
    /// The `len` pages from `start` on.
    #[must_use]
    pub const fn new(start: PageIndex, len: u64) -> Self {
        Self {
            start,
            end: start.plus(len),
        }
    }

    /// One page.
    #[must_use]
    pub const fn one(page: PageIndex) -> Self {
        Self::new(page, 1)
    }

    /// How many pages the range holds.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether it holds none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Length in bytes.
    #[must_use]
    pub const fn byte_len(self) -> u64 {
        bytes_in(self.len())
    }

    /// Whether `page` is in the range.
    #[must_use]
    pub const fn contains(self, page: PageIndex) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// As many pages, each `n` pages further on.
    ///
    /// # Panics
    /// In debug builds, on overflow.
    #[must_use]
    pub const fn plus(self, n: u64) -> Self {
        Self {
            start: self.start.plus(n),
            end: self.end.plus(n),
        }
    }

    /// As many pages, each `n` pages before.
    ///
    /// # Panics
    /// In debug builds, where there are no such pages.
    #[must_use]
    pub const fn minus(self, n: u64) -> Self {
        Self {
            start: PageIndex(self.start.0 - n),
            end: PageIndex(self.end.0 - n),
        }
    }

    /// The pages that are in both ranges.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self {
            start,
            end: self.end.min(other.end).max(start),
        }
    }

    /// The pages, in order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = PageIndex> {
        (self.start.0..self.end.0).map(PageIndex)
    }

    /// The range cut into pieces of at most `len` pages, in order.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn chunks(self, len: u64) -> impl Iterator<Item = Self> {
        assert!(len > 0, "chunks of no page");
        let mut start = self.start;
        std::iter::from_fn(move || {
            let end = PageIndex(start.0.saturating_add(len)).min(self.end);
            let piece = Self { start, end };
            start = end;
            (!piece.is_empty()).then_some(piece)
        })
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// A frame's number inside its store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

impl FrameId {
    /// The byte offset of the frame's first byte inside its store.
    #[must_use]
    pub const fn byte_offset(self) -> u64 {
        bytes_in(self.0 as u64)
    }

    /// The frame `n` frames after this one.
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Self(self.0 + n)
    }
}

impl fmt::Display for FrameId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// `len` frames of one store with consecutive numbers, from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameRange {
    /// The first frame.
    pub start: FrameId,
    /// How many.
    pub len: u32,
}

impl FrameRange {
    /// One frame.
    #[must_use]
    pub const fn one(frame: FrameId) -> Self {
        Self {
            start: frame,
            len: 1,
        }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn byte_len(self) -> u64 {
        bytes_in(self.len as u64)
    }

    /// The frames, in order.
    pub fn iter(self) -> impl Iterator<Item = FrameId> {
        (self.start.0..self.start.0 + self.len).map(FrameId)
    }
}

/// A private copy of one page's bytes.
///
/// Guest memory changes under its reader, so it is never looked at in place:
/// a backend copies a page into a `PageBuf`, and everything else works on that.
#[derive(Clone)]
#[repr(align(64))]
pub struct PageBuf([u8; PAGE_SIZE]);

impl PageBuf {
    /// A page of zeros.
    #[must_use]
    pub fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE_SIZE]))
    }

    /// The bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; PAGE_SIZE] {
        &self.0
    }

    /// The bytes, to be written.
    pub const fn bytes_mut(&mut self) -> &mut [u8; PAGE_SIZE] {
        &mut self.0
    }

    /// Whether every byte is 0.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|&byte| byte == 0)
    }
}

impl PartialEq for PageBuf {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for PageBuf {}

impl fmt::Debug for PageBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageBuf({:02x?}..)", &self.0[..8])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_range_once() {
        let range = PageRange::new(PageIndex(3), 10);
        let pieces: Vec<_> = range.chunks(4).map(|p| (p.start.0, p.len())).collect();
        assert_eq!(pieces, [(3, 4), (7, 4), (11, 2)]);
        let whole: Vec<_> = range.chunks(u64::MAX).collect();
        assert_eq!(whole, [range]);
        let nothing = PageRange::new(PageIndex(7), 0);
        assert_eq!(nothing.chunks(1).count(), 0);
        assert_eq!(
            range.intersection(PageRange::new(PageIndex(20), 1)).len(),
            0
        );
    }
}
