//! Guests made of threads.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ksm_core::backend::linux::HostRegion;
use ksm_core::page::{PAGE_SIZE, PAGE_SIZE_U64, PageIndex, PageRange};
use rustix::fs::MemfdFlags;
use rustix::mm::Advice;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
    MmapRegion,
};

use super::{MOMENT, full_of};

/// Guest memory, and whether it is declared to be a memfd of this process.
#[derive(Clone)]
pub(crate) struct Guest(pub(crate) Arc<GuestRegionMmap>, bool);

impl Guest {
    /// `pages` private anonymous pages that never are huge.
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
        let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
        Self(Arc::new(region), false)
    }

    /// `pages` pages of a memfd of its own.
    pub(crate) fn memfd(pages: u64) -> Self {
        let file = FileOffset::new(memfd(pages).into(), 0);
        Self::part_of(file, pages)
    }

    /// `pages` pages of a file, declared to be a memfd of this process alone.
    pub(crate) fn part_of(file: FileOffset, pages: u64) -> Self {
        let region = MmapRegionBuilder::new((pages * PAGE_SIZE_U64) as usize)
            .with_file_offset(file)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED)
            .build()
            .unwrap();
        Self::of(region).declared_owned()
    }

    /// The same guest, declared to be a memfd of this process alone.
    pub(crate) fn declared_owned(self) -> Self {
        Self(self.0, true)
    }

    pub(crate) fn source(&self) -> HostRegion {
        let source = HostRegion::new(Arc::clone(&self.0));
        if self.1 { source.memfd_owned() } else { source }
    }

    pub(crate) fn file(&self) -> &File {
        self.0.file_offset().unwrap().file()
    }

    /// Pages of memory that its file holds.
    pub(crate) fn file_pages(&self) -> u64 {
        let blocks = rustix::fs::fstat(self.file()).unwrap().st_blocks;
        u64::try_from(blocks).unwrap() * 512 / PAGE_SIZE_U64
    }

    /// First and last byte of a page, as its file has them.
    pub(crate) fn file_ends(&self, page: u64) -> (u8, u8) {
        let mut buf = [1; PAGE_SIZE];
        self.file()
            .read_exact_at(&mut buf, page * PAGE_SIZE_U64)
            .unwrap();
        (buf[0], buf[PAGE_SIZE - 1])
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

    /// Makes huge pages of `range`.
    pub(crate) fn collapse(&self, range: PageRange) -> std::io::Result<()> {
        // SAFETY: guest memory is never behind a Rust reference, and its content
        // stays.
        let done = unsafe {
            let start = self.pointer(range.start.0).cast();
            libc::madvise(start, range.byte_len() as usize, libc::MADV_COLLAPSE)
        };
        match done {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
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

    /// Writes the first byte of a page.
    pub(crate) fn store(&self, page: u64, byte: u8) {
        let address = MemoryRegionAddress(page * PAGE_SIZE_U64);
        self.0.store(byte, address, Ordering::Release).unwrap();
    }

    pub(super) fn pointer(&self, page: u64) -> *mut u8 {
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

    /// Mappings that the guest's memory consists of.
    pub(crate) fn mappings(&self) -> usize {
        let start = self.address() as u64;
        let end = start + self.0.len();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let touches = |line: &&str| {
            let (range, _) = line.split_once(' ').unwrap();
            let (from, upto) = range.split_once('-').unwrap();
            let at = |text| u64::from_str_radix(text, 16).unwrap();
            at(from) < end && start < at(upto)
        };
        maps.lines().filter(touches).count()
    }

    /// The first page at an address where a huge page can start.
    pub(crate) fn first_huge_page(&self) -> u64 {
        let page = self.address() as u64 / PAGE_SIZE_U64;
        page.next_multiple_of(512) - page
    }
}

/// A memfd of `pages` pages, all of them holes.
pub(crate) fn memfd(pages: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("guest", flags).unwrap();
    rustix::fs::ftruncate(&fd, pages * PAGE_SIZE_U64).unwrap();
    fd
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

    /// A thread that does `work`.
    pub(crate) fn run(work: impl FnOnce() + Send + 'static) -> Self {
        Self(std::thread::spawn(work))
    }
}
