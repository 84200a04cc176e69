//! Guests made of threads, and the host calls that tests need. All `unsafe` of
//! the Linux tests is here.
#![allow(dead_code)] // No test file uses all of it.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

    /// The same, once `go` is set.
    pub(crate) fn writes_after(&self, go: &Arc<AtomicBool>, page: u64, byte: u8) -> Vcpu {
        let (guest, go) = (self.clone(), Arc::clone(go));
        Vcpu::run(move || {
            while !go.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            guest.store(page, byte);
        })
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

impl Guest {
    /// Writes the first byte of a page.
    pub(crate) fn store(&self, page: u64, byte: u8) {
        let address = MemoryRegionAddress(page * PAGE_SIZE_U64);
        self.0.store(byte, address, Ordering::Release).unwrap();
    }

    fn pointer(&self, page: u64) -> *mut u8 {
        self.address().wrapping_add((page * PAGE_SIZE_U64) as usize)
    }

    /// Fresh memory in place of `range`, unknown to the engine.
    pub(crate) fn map_anonymous_over(&self, range: PageRange) {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: guest memory is never behind a Rust reference.
        unsafe {
            mmap_anonymous(
                self.pointer(range.start.0).cast(),
                range.byte_len() as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
            )
        }
        .unwrap();
    }

    /// mlock.
    pub(crate) fn lock(&self, range: PageRange) {
        // SAFETY: locking changes no content.
        unsafe {
            rustix::mm::mlock(
                self.pointer(range.start.0).cast(),
                range.byte_len() as usize,
            )
        }
        .unwrap();
    }

    /// The kernel writes a zero to the first byte of a page, on behalf of a
    /// thread.
    pub(crate) fn kernel_reads_into(&self, page: u64) -> Vcpu {
        let guest = self.clone();
        Vcpu::run(move || {
            let zeros = std::fs::File::open("/dev/zero").unwrap();
            // SAFETY: one byte of guest memory, which is never behind a Rust
            // reference and is kept mapped by `guest`.
            let read = unsafe { libc::read(zeros.as_raw_fd(), guest.pointer(page).cast(), 1) };
            assert_eq!(read, 1);
        })
    }
}

impl Vcpu {
    /// A thread that does `work`.
    pub(crate) fn run(work: impl FnOnce() + Send + 'static) -> Self {
        Self(std::thread::spawn(work))
    }
}

/// Whether pages can be swapped out here.
pub(crate) fn swap_is_on() -> bool {
    std::fs::read_to_string("/proc/swaps")
        .unwrap()
        .lines()
        .count()
        > 1
}

/// A userfaultfd that does not stop the kernel.
pub(crate) fn user_mode_only_userfaultfd() -> OwnedFd {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | 1;
    // SAFETY: userfaultfd takes flags and returns a descriptor of ours.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, flags);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd as i32)
    }
}

/// A child that shares the memory it was forked with, and does nothing.
pub(crate) struct Child(libc::pid_t);

impl Child {
    pub(crate) fn fork() -> Self {
        // SAFETY: the child calls nothing but pause, which is async-signal-safe.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            loop {
                // SAFETY: takes nothing.
                unsafe { libc::pause() };
            }
        }
        Self(pid)
    }

    /// Kills it and waits until it is gone.
    pub(crate) fn end(self) {
        drop(self);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: our own child, not waited for yet.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Guest pages that are fixed buffers of an io_uring: pinned for DMA.
pub(crate) struct FixedBuffers(#[allow(dead_code)] OwnedFd);

impl FixedBuffers {
    pub(crate) fn new(guest: &Guest, range: PageRange) -> Self {
        const IORING_REGISTER_BUFFERS: libc::c_uint = 0;
        let mut params = [0_u64; 15]; // struct io_uring_params, 120 bytes.
        let buffer = libc::iovec {
            iov_base: guest.pointer(range.start.0).cast(),
            iov_len: range.byte_len() as usize,
        };
        // SAFETY: `params` and `buffer` are what the calls take, and outlive
        // them; the pages stay mapped while they are pinned or longer.
        unsafe {
            let fd = libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr());
            assert!(
                fd >= 0,
                "this test needs io_uring: {}",
                std::io::Error::last_os_error()
            );
            let fd = OwnedFd::from_raw_fd(fd as i32);
            let registered = libc::syscall(
                libc::SYS_io_uring_register,
                fd.as_raw_fd(),
                IORING_REGISTER_BUFFERS,
                &raw const buffer,
                1,
            );
            assert_eq!(registered, 0, "{}", std::io::Error::last_os_error());
            Self(fd)
        }
    }
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

impl Guest {
    /// Makes pages read-only.
    pub(crate) fn protect_from_writes(&self, range: PageRange) {
        // SAFETY: guest memory is never behind a Rust reference.
        unsafe {
            rustix::mm::mprotect(
                self.pointer(range.start.0).cast(),
                range.byte_len() as usize,
                rustix::mm::MprotectFlags::READ,
            )
        }
        .unwrap();
    }

    /// Unmaps pages, to which the caller maps something again.
    pub(crate) fn unmap(&self, range: PageRange) {
        // SAFETY: guest memory is never behind a Rust reference; nobody touches
        // the pages until they are mapped again.
        unsafe {
            rustix::mm::munmap(
                self.pointer(range.start.0).cast(),
                range.byte_len() as usize,
            )
        }
        .unwrap();
    }

    /// The first page at an address where a huge page can start.
    pub(crate) fn first_huge_page(&self) -> u64 {
        let page = self.address() as u64 / PAGE_SIZE_U64;
        page.next_multiple_of(512) - page
    }
}

impl Bench {
    /// Whether pages are stopped by moving them out.
    pub(crate) fn moves(&self, method: StopMethod) -> bool {
        assert_eq!(self.backend.capabilities().stop_method, method);
        method == StopMethod::Move
    }
}

/// A field of /proc/self/status, in KiB.
pub(crate) fn status_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// PR_SET_MEMORY_MERGE.
pub(crate) fn set_memory_merge(on: bool) {
    // SAFETY: takes no pointer; merging by the kernel changes no content.
    let set = unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, libc::c_ulong::from(on), 0, 0, 0) };
    assert_eq!(set, 0, "this test needs a kernel with KSM");
}

/// mlockall(MCL_FUTURE), or munlockall.
pub(crate) fn lock_future_mappings(on: bool) {
    // SAFETY: locking changes no content.
    let done = unsafe {
        if on {
            libc::mlockall(libc::MCL_FUTURE)
        } else {
            libc::munlockall()
        }
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

impl Bench {
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

/// Every mapping that the process may have and does not use.
pub(crate) struct SpentVmas {
    start: *mut std::ffi::c_void,
    len: usize,
}

impl SpentVmas {
    pub(crate) fn all() -> Self {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let len = (limit + 2) * 4096;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: memory of our own, which nobody uses: every other page of it
        // gets another protection, and so a mapping of its own.
        unsafe {
            let start =
                mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags).unwrap();
            for page in (0..limit).step_by(2) {
                let at = start.wrapping_byte_add(page * 4096);
                if mprotect(at, 4096, MprotectFlags::READ).is_err() {
                    return Self { start, len };
                }
            }
        }
        panic!("the limit was never met");
    }
}

impl Drop for SpentVmas {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: our own, and nobody uses it.
            unsafe { rustix::mm::munmap(self.start, self.len) }.unwrap();
        }
    }
}
