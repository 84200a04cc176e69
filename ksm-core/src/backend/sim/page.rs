//! One page of the model.

use std::sync::Arc;

use super::config::Stop;
use super::rng::Rng;
use crate::backend::PageState;
use crate::page::{FrameId, PAGE_SIZE, PageBuf};

/// A page whose bytes follow from `number`: equal for equal numbers, different
/// for different ones, and all zero for 0.
#[must_use]
pub fn pattern(number: u64) -> Box<PageBuf> {
    let mut page = PageBuf::zeroed();
    if number > 0 {
        let mut rng = Rng::new(number);
        let words = page.bytes_mut().chunks_exact_mut(8);
        // The number itself comes first, so that no two patterns are equal.
        for (at, word) in words.enumerate() {
            let value = if at == 0 { number } else { rng.next() };
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    page
}

/// A page's state, as in the table of [`backend`](crate::backend).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SimPageState {
    /// Nothing there.
    Absent,
    /// The page of zeros.
    Zero,
    /// Bytes of its own.
    Private,
    /// Bytes of its own, swapped out.
    Swapped,
    /// Writes wait.
    Stopped,
    /// Reads and writes wait.
    Out,
    /// A frame shows.
    Merged,
    /// Bytes of its own, over a frame.
    Copied,
}

/// A frame of a store, by the store's number.
pub(super) type Below = Option<(usize, FrameId)>;

/// Where a page's bytes are.
#[derive(Clone, Debug)]
pub(super) enum Bytes {
    /// Not in the page table: what lies below would show.
    Nowhere,
    /// In the page table: what lies below shows (the zero page, or the frame).
    Below,
    /// In a page of its own.
    Own(Arc<PageBuf>),
    /// In swap.
    Swap(Arc<PageBuf>),
}

/// Who waits at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// Nobody.
    Free,
    /// Writers: it is write-protected. Survives a dropped copy.
    Stopped,
    /// All: its bytes stand in the staging area.
    Out,
    /// All: it was out, its bytes were given up, and nobody was woken yet.
    Gone,
}

/// One page.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) below: Below,
    pub(super) bytes: Bytes,
    pub(super) hold: Hold,
    pub(super) huge: bool,
    pub(super) pinned: bool,
    /// Shared with a child of a fork.
    pub(super) forked: bool,
}

impl Page {
    pub(super) const fn absent() -> Self {
        Self {
            below: None,
            bytes: Bytes::Nowhere,
            hold: Hold::Free,
            huge: false,
            pinned: false,
            forked: false,
        }
    }

    /// Whether it has bytes of its own, in memory or in swap.
    pub(super) const fn own(&self) -> Option<&Arc<PageBuf>> {
        match &self.bytes {
            Bytes::Own(bytes) | Bytes::Swap(bytes) => Some(bytes),
            Bytes::Nowhere | Bytes::Below => None,
        }
    }

    /// Whether the engine stopped it or took it out, and has not put something
    /// else in its place.
    pub(super) const fn is_held(&self) -> bool {
        matches!(self.hold, Hold::Stopped | Hold::Out)
    }

    /// What the page map says. A page that is out is not in it; a
    /// write-protect marker without a page reads as swapped. Where guest memory
    /// is a file, its own pages are pages of that, and those in swap are nowhere.
    pub(super) const fn mapped(&self, stop: Stop) -> Option<PageState> {
        match (&self.hold, &self.bytes, &self.below) {
            (_, Bytes::Own(_), None) if matches!(stop, Stop::Memfd) => Some(PageState::File),
            (Hold::Free, Bytes::Swap(_), None) if matches!(stop, Stop::Memfd) => None,
            (Hold::Out | Hold::Gone, ..) | (Hold::Free, Bytes::Nowhere, _) => None,
            (Hold::Stopped, Bytes::Nowhere, _) | (_, Bytes::Swap(_), _) => Some(PageState::Swapped),
            (_, Bytes::Own(_), _) => Some(PageState::Private),
            (_, Bytes::Below, None) => Some(PageState::Zero),
            (_, Bytes::Below, Some(_)) => Some(PageState::File),
        }
    }

    pub(super) const fn state(&self) -> SimPageState {
        match (self.hold, &self.bytes, &self.below) {
            (Hold::Stopped, ..) => SimPageState::Stopped,
            (Hold::Out | Hold::Gone, ..) => SimPageState::Out,
            (Hold::Free, Bytes::Own(_) | Bytes::Swap(_), Some(_)) => SimPageState::Copied,
            (Hold::Free, Bytes::Nowhere | Bytes::Below, Some(_)) => SimPageState::Merged,
            (Hold::Free, Bytes::Own(_), None) => SimPageState::Private,
            (Hold::Free, Bytes::Swap(_), None) => SimPageState::Swapped,
            (Hold::Free, Bytes::Below, None) => SimPageState::Zero,
            (Hold::Free, Bytes::Nowhere, None) => SimPageState::Absent,
        }
    }
}

/// What a guest, or the host on its behalf, does to a page's bytes.
#[derive(Clone, Debug)]
pub(super) enum Write {
    Whole(Arc<PageBuf>),
    /// One byte. The rest stays.
    Byte(usize, u8),
    /// None: it is only made the guest's own, as for a write.
    Same,
    /// They are dropped; whatever lies below shows.
    Drop,
}

impl Write {
    /// The page's bytes after it, given those before it.
    pub(super) fn on(&self, before: &Arc<PageBuf>) -> Arc<PageBuf> {
        match self {
            Self::Whole(bytes) => Arc::clone(bytes),
            Self::Same => Arc::clone(before),
            Self::Byte(at, value) => {
                let mut after = PageBuf::clone(before);
                after.bytes_mut()[at % PAGE_SIZE] = *value;
                Arc::new(after)
            }
            Self::Drop => unreachable!("a dropped page has no bytes"),
        }
    }
}
