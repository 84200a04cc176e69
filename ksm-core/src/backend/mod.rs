//! What the engine needs from its host: the contract, and its two
//! implementations.
//!
//! The algorithm knows nothing of Linux. It sees a guest's memory as a
//! [`Memory`]: pages that are in one of the states below, and a handful of
//! calls that move them from one to another. [`linux`] does it with
//! userfaultfd, a memfd and mmap on a live guest; [`sim`] does it on a model
//! whose guests, failures and interleavings come from a seed.
//!
//! # Page states
//!
//! | state | the guest reads | the guest writes | who brings a page here |
//! |---|---|---|---|
//! | absent | zero (and the page becomes zero) | it becomes private | the host, [`Memory::discard`], [`Memory::zero`], [`Memory::vacate`] |
//! | zero | zero | it becomes private | a read of an absent page |
//! | private | its own bytes | its own bytes | a write, [`Memory::fill`] |
//! | swapped | its own bytes (private again) | its own bytes (private again) | the host |
//! | stopped | its own bytes | waits | [`Memory::stop`] from private, swapped, copied |
//! | out | waits | waits | [`Memory::stop`] from private, swapped; the bytes stand in a staging area |
//! | merged | the frame's bytes | it becomes copied | [`Memory::share`] from stopped and out, [`Memory::reuse`] from stopped, [`Memory::adopt`] |
//! | copied | its own bytes | its own bytes | a write to a merged page, [`Memory::populate`] |
//!
//! Memory may be a file of its own. Then there is no page of zeros (a read of an
//! absent page makes it private), and what is absent from the page table may
//! still have bytes, which [`Memory::populated`] finds if they are in memory.
//!
//! The last two differ from the others in their [`Backing`]: below them lies a
//! frame of the store. A copied page still *names* that frame (it would show
//! again if the copy were dropped), so the frame's number stays taken.
//!
//! [`Memory::lift`] takes every page that is still stopped or out back to where
//! it came from and wakes whoever waited. [`Memory::restore`] takes stopped
//! copied pages back to private.
//!
//! # Who may call what
//!
//! Every call that changes a page's state is made under the lease of its
//! region, which the engine holds; so a backend never sees two of them at once
//! for one region. The guest, the host and other users of the memory are
//! not bound by it: between any two calls a page that is not stopped can be
//! read, written, swapped or discarded.

#[cfg(feature = "linux")]
pub mod linux;
pub mod sim;

use std::fmt::Debug;

use crate::error::{BackendError, RegisterError};
use crate::page::{FrameId, FrameRange, PageBuf, PageIndex, PageRange};

/// A host: makes stores, and takes guest memory under its care.
pub trait Backend: Send + Sync + 'static {
    /// What the embedder hands over to be registered: a piece of guest memory.
    type Source;
    /// A registered piece of guest memory.
    type Memory: Memory<Store = Self::Store>;
    /// Where shared frames live.
    type Store: FrameStore;

    /// How many more virtual memory areas the process may have now; `None` if
    /// there is no limit to them.
    fn free_vmas(&self) -> Option<u64>;

    /// Makes an empty store.
    ///
    /// # Errors
    /// Whatever the host says when it has no file descriptor or memory to give.
    fn open_store(&self) -> Result<Self::Store, BackendError>;

    /// Takes a piece of guest memory under care. Its contents and its users
    /// notice nothing.
    ///
    /// # Errors
    /// [`RegisterError`] when pages of this memory could never be merged safely.
    fn attach(
        &self,
        source: Self::Source,
        options: RegionOptions,
    ) -> Result<Self::Memory, RegisterError>;

    /// The same for memory that nobody uses yet and whose every page is replaced
    /// ([`Memory::adopt`], [`Memory::vacate`]) before anybody does: it may be a
    /// private mapping of a file.
    ///
    /// # Errors
    /// As [`Backend::attach`].
    fn attach_unused(
        &self,
        source: Self::Source,
        options: RegionOptions,
    ) -> Result<Self::Memory, RegisterError> {
        self.attach(source, options)
    }
}

/// What the embedder says of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// All DMA to this memory (`O_DIRECT`, fixed `io_uring` buffers, VFIO) goes
    /// through pin guards ([`Ksm::pin`](crate::Ksm::pin)), or there is none. Only
    /// then are copied pages merged again, and their mappings given back: on them
    /// no host call can tell whether a device still writes to the copy, so **what
    /// a device writes to such memory without a guard can be lost**. Off by
    /// default: then DMA to pages that the kernel pins needs no guards, and a page that
    /// was merged and written to since stays as it is. DMA to pages that it only holds
    /// a reference to (`vmsplice`, direct I/O on NFS) needs them in any case.
    pub dma_guarded: bool,
}

/// What lies below a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backing {
    /// The guest's own memory, as it was registered.
    Own,
    /// A frame of the store: the page is merged or copied.
    Frame,
}

/// What the page map says of a populated page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Present, holding bytes of its own. Below a page backed by a frame this
    /// means: copied.
    Private,
    /// Present, the host's page of zeros.
    Zero,
    /// Present, a page of a file shows. Below a page backed by a frame this is
    /// the frame: merged (and touched). Below the guest's own memory, which may be
    /// a file itself, these are the guest's own bytes: private.
    File,
    /// Swapped out, holding bytes of its own.
    Swapped,
}

/// Neighbouring populated pages of one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The pages.
    pub range: PageRange,
    /// What they all are.
    pub state: PageState,
    /// Whether they are parts of huge pages.
    pub huge: bool,
}

/// Why [`Memory::stop`] did not stop a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// A device may be reading or writing it.
    Pinned,
    /// Another process shares it since a fork.
    NotExclusive,
    /// It went away, or was written, while it was being stopped.
    Raced,
    /// It is part of a huge page, and this host cannot split it.
    Huge,
}

/// What [`Memory::stop`] did: every page of the range is in exactly one of the
/// two lists, both in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The pages that are stopped or out.
    pub held: Vec<PageRange>,
    /// The others, running as before.
    pub refused: Vec<(PageIndex, Refusal)>,
}

/// How far a call got whose caller vanished: see [`Memory::settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The new mapping is in place.
    Replaced,
    /// The old pages are in place, running again.
    Kept,
}

/// The frames of one domain: equal in content to the pages that map them,
/// never written once a page maps them.
pub trait FrameStore: Debug + Send + Sync + 'static {
    /// Writes a frame that no page maps. One that had no memory has some from here
    /// on.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] when there is none to be had. The frame may
    /// hold memory after an error, and its content is unspecified.
    fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError>;

    /// Reads a frame. One that was never filled, or was punched, reads as zero.
    ///
    /// # Errors
    /// None in the ordinary.
    fn read(&self, frame: FrameId, buf: &mut PageBuf) -> Result<(), BackendError>;

    /// Gives the memory of `frames` back. Pages that map them must all have
    /// been copied: the copies stay.
    ///
    /// # Errors
    /// None in the ordinary; the memory is then still held.
    fn punch(&self, frames: FrameRange) -> Result<(), BackendError>;

    /// Bytes of memory that the store holds now, as the host counts them.
    ///
    /// # Errors
    /// When the host cannot say.
    fn allocated_bytes(&self) -> Result<u64, BackendError>;
}

/// A registered piece of guest memory. See the module for the states.
///
/// Each `range` is inside the memory, not empty, and of one [`Backing`], which
/// the caller knows: a backend keeps no record of single pages.
pub trait Memory: Debug + Send + Sync + Sized + 'static {
    /// The store whose frames pages of this memory may map.
    type Store: FrameStore;

    /// Gives the memory up: it can be attached again when this returns. From here
    /// on it is only looked at ([`Memory::populated`], [`Memory::read`]), by a pass
    /// that has not noticed yet. Dropping it does the same. The second time it
    /// does nothing.
    fn detach(&self);

    /// Cuts the memory in two, the second part beginning with `page`, which is
    /// not the first. From here on the parts are looked after apart, and this one
    /// is only looked at: to detach it does nothing. To be called with nothing
    /// stopped.
    ///
    /// # Errors
    /// Nothing has changed.
    fn split(&self, page: PageIndex) -> Result<(Self, Self), BackendError>;

    /// Length, in pages.
    fn len(&self) -> u64;

    /// Whether it holds no page. Registered memory always holds one.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Looks for populated pages in `within`, in order, and appends them to
    /// `runs`, at most `max_pages`. Holes are stepped over without a cost for
    /// each page, and never filled. Returns where to look on: `within.end` when
    /// everything has been seen.
    ///
    /// # Errors
    /// When the page map cannot be read.
    fn populated(
        &self,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> Result<PageIndex, BackendError>;

    /// The pages of `within` that hold bytes of their own though
    /// [`Memory::populated`] does not say so: those of a file that are swapped
    /// out. `runs` is what that said of `within`. In order.
    fn hidden(&self, within: PageRange, runs: &[PageRun]) -> Vec<PageRange> {
        let _ = (within, runs);
        Vec::new()
    }

    /// Copies a page as the guest sees it now. The copy may be torn: the guest
    /// can write meanwhile.
    ///
    /// # Errors
    /// When the page is no longer there to be read.
    fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), BackendError>;

    /// The longest range that [`Memory::stop`] takes, in pages.
    fn max_stop(&self) -> u64;

    /// Stops writes to the populated pages of `range`: from here on, until
    /// [`Memory::lift`], no held page changes. Pages of [`Backing::Frame`] must
    /// be copied ones of a region whose options say `dma_guarded`.
    ///
    /// # Errors
    /// When none could be stopped; all of them run as before.
    fn stop(&self, range: PageRange, backing: Backing) -> Result<Held, BackendError>;

    /// Copies a held page.
    ///
    /// # Errors
    /// None in the ordinary.
    fn read_held(
        &self,
        page: PageIndex,
        backing: Backing,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError>;

    /// Puts `first` and the frames after it in place of the held pages of
    /// `range`, which are equal to them byte for byte. The old pages are freed.
    /// The range is of [`Backing::Frame`] afterwards.
    ///
    /// # Errors
    /// [`BackendError::NoVmas`] and others: the old pages are still held.
    fn share(
        &self,
        range: PageRange,
        backing: Backing,
        store: &Self::Store,
        first: FrameId,
    ) -> Result<(), BackendError>;

    /// Drops the copies of a held range of [`Backing::Frame`], so that the
    /// frames below show again, to which they are equal byte for byte.
    ///
    /// # Errors
    /// The copies are still held.
    fn reuse(&self, range: PageRange) -> Result<(), BackendError>;

    /// Puts zero pages in place of held pages that are all zero. The range is
    /// of [`Backing::Own`] afterwards.
    ///
    /// # Errors
    /// The old pages are still held.
    fn zero(&self, range: PageRange, backing: Backing) -> Result<(), BackendError>;

    /// Puts private pages with the same bytes in place of a held range of
    /// [`Backing::Frame`], which is of [`Backing::Own`] afterwards.
    ///
    /// # Errors
    /// The copies are still held.
    fn restore(&self, range: PageRange) -> Result<(), BackendError>;

    /// Whether pages that were restored need no mapping of their own beside the
    /// guest's other private pages: only then does it give mappings back.
    fn rejoins(&self) -> bool {
        false
    }

    /// Ends a stop: every page of `range` that is still held goes back to where
    /// it was, with its bytes, and whoever waited for any page of `range` is
    /// woken. `backing` is what the range had when it was stopped; parts of it
    /// may have been replaced since. Does nothing to pages that are not held.
    fn lift(&self, range: PageRange, backing: Backing);

    /// No stop is going to follow for now: does what earlier ones have left to be
    /// done once for many, freeing pages that were replaced, say. Nothing is
    /// stopped.
    fn rest(&self) {}

    /// For a [`Memory::share`], [`Memory::zero`] or [`Memory::restore`] of
    /// `range` whose caller vanished before or after the call, never inside it:
    /// says which, and lifts the range.
    fn settle(&self, range: PageRange, backing: Backing) -> Settled;

    /// Gives every page of a range of [`Backing::Frame`] a copy of its own,
    /// with nothing of it stopped. May stop short: ask the page map.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`], [`BackendError::Again`].
    fn populate(&self, range: PageRange) -> Result<(), BackendError>;

    /// Maps `first` and the frames after it in place of pages of [`Backing::Own`]
    /// which nobody uses yet: pages of a clone, of a place that memory moves to, or
    /// of a guest that was just restored. What they held is given up. The range is
    /// of [`Backing::Frame`] afterwards.
    ///
    /// Whoever does not know whether a call came to its end repeats it: pages that
    /// map these frames already do so afterwards, and a second time costs no mapping.
    ///
    /// # Errors
    /// [`BackendError::NoVmas`] and others: the pages are as they were.
    fn adopt(
        &self,
        range: PageRange,
        store: &Self::Store,
        first: FrameId,
    ) -> Result<(), BackendError>;

    /// Puts absent pages in place of pages of [`Backing::Own`] which nobody uses
    /// yet.
    ///
    /// # Errors
    /// The pages are as they were.
    fn vacate(&self, range: PageRange) -> Result<(), BackendError>;

    /// Writes an absent page of [`Backing::Own`] that nobody uses yet.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] and others.
    fn fill(&self, page: PageIndex, content: &PageBuf) -> Result<(), BackendError>;

    /// Drops the content of `range`: the guest reads zeros, whatever lay below.
    /// The range is of [`Backing::Own`] afterwards.
    ///
    /// Whoever does not know whether a call came to its end repeats it, with the
    /// backing there was before; a second time costs no mapping.
    ///
    /// # Errors
    /// The pages are as they were.
    fn discard(&self, range: PageRange, backing: Backing) -> Result<(), BackendError>;
}
