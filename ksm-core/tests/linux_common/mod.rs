//! Guests made of threads, and the host calls that tests need. All `unsafe` of
//! the Linux tests is here.
#![allow(dead_code, unused_imports)] // No test file uses all of it.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod child;
mod dma;
mod guest;
mod host;

use std::time::{Duration, Instant};

pub(crate) use child::{View, again, become_nobody};
pub(crate) use dma::{DirectFile, Ring};
pub(crate) use guest::{Guest, Vcpu, memfd};
pub(crate) use host::*;
use ksm_core::RegisterError;
use ksm_core::backend::linux::{Fds, LinuxBackend, LinuxMemory, LinuxStore, StopMethod};
use ksm_core::backend::{
    Backend, Backing, FrameStore, Held, Memory, PageRun, PageState, RegionOptions,
};
use ksm_core::page::{FrameId, FrameRange, PageBuf, PageIndex, PageRange};

/// Both ways to stop writes.
pub(crate) const METHODS: [StopMethod; 2] = [StopMethod::Move, StopMethod::WriteProtect];

/// What a guest is made of, and how its writes are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Private anonymous memory.
    Anonymous(StopMethod),
    /// A memfd of this process alone.
    Memfd,
}

/// All of them.
pub(crate) const KINDS: [Kind; 3] = [
    Kind::Anonymous(StopMethod::Move),
    Kind::Anonymous(StopMethod::WriteProtect),
    Kind::Memfd,
];

impl Kind {
    /// A guest of this kind.
    pub(crate) fn guest(self, pages: u64) -> Guest {
        match self {
            Self::Anonymous(_) => Guest::new(pages),
            Self::Memfd => Guest::memfd(pages),
        }
    }

    /// A backend for such guests: on that of a memfd, other guests are moved.
    pub(crate) fn backend(self) -> LinuxBackend {
        match self {
            Self::Anonymous(method) => backend(method),
            Self::Memfd => backend(StopMethod::Move),
        }
    }
}

/// Long enough for a thread that can run to have run; short enough to wait for
/// in vain where one must not.
pub(crate) const MOMENT: Duration = Duration::from_millis(60);

/// A backend; says plainly what is missing where there is none.
pub(crate) fn backend(method: StopMethod) -> LinuxBackend {
    let fds = Fds::open().unwrap_or_else(|error| panic!("these tests need userfaultfd: {error}"));
    LinuxBackend::with_stop_method(fds, method)
        .unwrap_or_else(|error| panic!("these tests need {method:?}: {error}"))
}

/// `n` pages from `start` on.
pub(crate) fn pages(start: u64, n: u64) -> PageRange {
    PageRange::new(PageIndex(start), n)
}

/// A page full of `byte`.
pub(crate) fn full_of(byte: u8) -> Box<PageBuf> {
    let mut buf = PageBuf::zeroed();
    buf.bytes_mut().fill(byte);
    buf
}

/// Why attaching `guest` is refused.
pub(crate) fn refusal(guest: &Guest, options: RegionOptions) -> RegisterError {
    backend(StopMethod::Auto)
        .attach(guest.source(), options)
        .expect_err("it must be refused")
}

/// Waits until `done`, or the test fails.
pub(crate) fn eventually(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "it never happens"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An attached guest with a store.
pub(crate) struct Bench {
    pub(crate) guest: Guest,
    pub(crate) memory: LinuxMemory,
    pub(crate) store: LinuxStore,
    pub(crate) backend: LinuxBackend,
}

impl Bench {
    /// `n` pages; copied ones can be stopped.
    pub(crate) fn new(method: StopMethod, n: u64) -> Self {
        Self::with(
            backend(method),
            Guest::new(n),
            RegionOptions { dma_guarded: true },
        )
    }

    pub(crate) fn with(backend: LinuxBackend, guest: Guest, options: RegionOptions) -> Self {
        let memory = backend.attach(guest.source(), options).unwrap();
        let store = backend.open_store().unwrap();
        Self {
            guest,
            memory,
            store,
            backend,
        }
    }

    /// Frames full of `byte`, from `first` on.
    pub(crate) fn frames(&self, first: u32, n: u32, byte: u8) {
        let frames = FrameRange {
            start: FrameId(first),
            len: n,
        };
        for frame in frames.iter() {
            self.store.fill(frame, &full_of(byte)).unwrap();
        }
    }

    pub(crate) fn stop(&self, range: PageRange, backing: Backing) -> Held {
        self.memory.stop(range, backing).unwrap()
    }

    /// Stops all of `range`.
    pub(crate) fn stop_all(&self, range: PageRange, backing: Backing) {
        let held = self.stop(range, backing);
        assert_eq!(held.held, [range], "{held:?}");
        assert!(held.refused.is_empty(), "{held:?}");
    }

    /// Merges `range`, which is full of `byte`, with fresh frames from `first` on.
    pub(crate) fn merge(&self, range: PageRange, first: u32, byte: u8) {
        self.frames(first, u32::try_from(range.len()).unwrap(), byte);
        self.stop_all(range, Backing::Own);
        self.memory
            .share(range, Backing::Own, &self.store, FrameId(first))
            .unwrap();
        self.memory.lift(range, Backing::Own);
    }

    pub(crate) fn runs(&self, within: PageRange) -> Vec<PageRun> {
        let mut runs = Vec::new();
        let end = self
            .memory
            .populated(within, within.len(), &mut runs)
            .unwrap();
        assert_eq!(end, within.end);
        runs
    }

    /// What the page map says of a page.
    pub(crate) fn state(&self, page: u64) -> Option<PageState> {
        self.runs(pages(page, 1)).first().map(|run| run.state)
    }

    pub(crate) fn held(&self, page: u64, backing: Backing) -> Box<PageBuf> {
        let mut buf = PageBuf::zeroed();
        self.memory
            .read_held(PageIndex(page), backing, &mut buf)
            .unwrap();
        buf
    }

    /// Whether pages are stopped by moving them out.
    pub(crate) fn moves(&self, method: StopMethod) -> bool {
        assert_eq!(self.backend.capabilities().stop_method, method);
        method == StopMethod::Move
    }

    /// Puts frames, or else zero pages, in place of all pages of `range` that
    /// are zero, and takes the frames away again. Returns how many.
    pub(crate) fn replace_zeros(&self, range: PageRange, frame: Option<FrameId>) -> u64 {
        let held = self.stop(range, Backing::Own);
        let zeros: Vec<_> = held
            .held
            .iter()
            .flat_map(|held| held.iter())
            .filter(|page| self.held(page.0, Backing::Own).is_zero())
            .map(PageRange::one)
            .collect();
        for &one in &zeros {
            match frame {
                None => self.memory.zero(one, Backing::Own),
                Some(first) => self.memory.share(one, Backing::Own, &self.store, first),
            }
            .unwrap();
        }
        self.memory.lift(range, Backing::Own);
        for &one in zeros.iter().filter(|_| frame.is_some()) {
            self.memory.populate(one).unwrap();
            assert_eq!(self.stop(one, Backing::Frame).held, [one]);
            self.memory.restore(one).unwrap();
            self.memory.lift(one, Backing::Frame);
        }
        zeros.len() as u64
    }
}
