//! Guests made of threads, and the host calls that tests need. All `unsafe` of
//! the Linux tests is here.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ksm_core::RegisterError;
use ksm_core::backend::linux::{
    Fds, HostRegion, LinuxBackend, LinuxMemory, LinuxStore, StopMethod,
};
use ksm_core::backend::{
    Backend, Backing, FrameStore, Held, Memory, PageRun, PageState, RegionOptions,
};
use ksm_core::page::{FrameId, FrameRange, PAGE_SIZE_U64, PageBuf, PageIndex, PageRange};
use rustix::mm::Advice;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress, MmapRegion,
    mmap::MmapRegionBuilder,
};

/// Both ways to stop writes.
pub(crate) const METHODS: [StopMethod; 2] = [StopMethod::Move, StopMethod::WriteProtect];

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

/// Private anonymous guest memory.
#[derive(Clone)]
pub(crate) struct Guest(pub(crate) Arc<GuestRegionMmap>);

impl Guest {
    /// `pages` pages that never are huge.
    pub(crate) fn new(pages: u64) -> Self {
        let guest = Self::with_flags(pages, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        guest.advise(PageRange::new(PageIndex(0), pages), Advice::LinuxNoHugepage);
        guest
    }

    pub(crate) fn with_flags(pages: u64, flags: i32) -> Self {
        let region = MmapRegionBuilder::new((pages * PAGE_SIZE_U64) as usize)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(flags | libc::MAP_NORESERVE)
            .build()
            .unwrap();
        Self::of(region)
    }

    pub(crate) fn of(region: MmapRegion) -> Self {
        Self(Arc::new(
            GuestRegionMmap::new(region, GuestAddress(0)).unwrap(),
        ))
    }

    pub(crate) fn source(&self) -> HostRegion {
        HostRegion::new(Arc::clone(&self.0))
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.0.get_host_address(MemoryRegionAddress(0)).unwrap()
    }

    pub(crate) fn fill(&self, page: u64, byte: u8) {
        self.0
            .write_slice(
                full_of(byte).bytes(),
                MemoryRegionAddress(page * PAGE_SIZE_U64),
            )
            .unwrap();
    }

    pub(crate) fn fill_all(&self, range: PageRange, byte: u8) {
        for page in range.iter() {
            self.fill(page.0, byte);
        }
    }

    /// First and last byte of a page, read as a vCPU would.
    pub(crate) fn ends(&self, page: u64) -> (u8, u8) {
        let at = |offset| {
            let address = MemoryRegionAddress(page * PAGE_SIZE_U64 + offset);
            self.0.load(address, Ordering::Acquire).unwrap()
        };
        (at(0), at(PAGE_SIZE_U64 - 1))
    }

    /// Writes the first byte of a page, in a thread of its own.
    pub(crate) fn writes(&self, page: u64, byte: u8) -> Vcpu {
        let region = Arc::clone(&self.0);
        Vcpu(std::thread::spawn(move || {
            let address = MemoryRegionAddress(page * PAGE_SIZE_U64);
            region.store(byte, address, Ordering::Release).unwrap();
        }))
    }

    pub(crate) fn advise(&self, range: PageRange, advice: Advice) {
        self.try_advise(range, advice).unwrap();
    }

    pub(crate) fn try_advise(&self, range: PageRange, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: guest memory is never behind a Rust reference.
        unsafe {
            rustix::mm::madvise(
                self.address()
                    .wrapping_add(range.start.byte_offset() as usize)
                    .cast(),
                range.byte_len() as usize,
                advice,
            )
        }
    }

    /// The line of a field of smaps, for the mapping that `page` is in.
    pub(crate) fn smaps(&self, page: u64, field: &str) -> String {
        let address = self.address() as u64 + page * PAGE_SIZE_U64;
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in smaps.lines() {
            if let Some((range, _)) = line.split_once(' ')
                && let Some((start, end)) = range.split_once('-')
                && let (Ok(start), Ok(end)) =
                    (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
            {
                inside = (start..end).contains(&address);
            } else if inside && let Some(value) = line.strip_prefix(field) {
                return value.trim_start_matches(':').trim().to_owned();
            }
        }
        panic!("no {field} for {address:#x}");
    }

    pub(crate) fn vm_flags(&self, page: u64) -> Vec<String> {
        let flags = self.smaps(page, "VmFlags");
        flags.split_whitespace().map(str::to_owned).collect()
    }
}

/// A thread that accesses guest memory.
pub(crate) struct Vcpu(JoinHandle<()>);

impl Vcpu {
    pub(crate) fn new(run: impl FnOnce() + Send + 'static) -> Self {
        Self(std::thread::spawn(run))
    }

    /// Whether it is still waiting after a moment.
    pub(crate) fn waits(&self) -> bool {
        std::thread::sleep(MOMENT);
        !self.0.is_finished()
    }

    /// Sees it run on, or the test fails: it would wait for ever.
    pub(crate) fn runs_on(self) {
        let start = Instant::now();
        while !self.0.is_finished() {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "a vCPU was left hanging"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.join().unwrap();
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
        self.store.reserve(frames).unwrap();
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
}

/// Why attaching `guest` is refused.
pub(crate) fn refusal(guest: &Guest, options: RegionOptions) -> RegisterError {
    backend(StopMethod::Auto)
        .attach(guest.source(), options)
        .expect_err("it must be refused")
}
