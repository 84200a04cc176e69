//! A replacement that ends between two system calls: what another thread finds,
//! and makes of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
};

use super::memfd::Memfd;
use super::*;
use crate::backend::{Backing, FrameStore, Memory, Settled};
use crate::page::{FrameId, FrameRange, PAGE_SIZE, PageBuf, PageIndex, PageRange};

const RANGE: PageRange = PageRange {
    start: PageIndex(2),
    end: PageIndex(6),
};
const BYTE: u8 = 7;

/// What the guest is made of, and how its writes are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Moved,
    Protected,
    Memfd,
}

const KINDS: [Kind; 3] = [Kind::Moved, Kind::Protected, Kind::Memfd];

impl Kind {
    fn method(self) -> StopMethod {
        match self {
            Self::Protected => StopMethod::WriteProtect,
            _ => StopMethod::Auto,
        }
    }

    /// A guest of 8 pages.
    fn guest(self) -> Arc<GuestRegionMmap> {
        const BYTES: usize = 8 * PAGE_SIZE;
        if self != Self::Memfd {
            let region = GuestRegionMmap::from_range(GuestAddress(0), BYTES, None);
            return Arc::new(region.unwrap());
        }
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, BYTES as u64).unwrap();
        let region = MmapRegionBuilder::new(BYTES)
            .with_file_offset(FileOffset::new(fd.into(), 0))
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED)
            .build()
            .unwrap();
        Arc::new(GuestRegionMmap::new(region, GuestAddress(0)).unwrap())
    }
}

struct Bench {
    guest: Arc<GuestRegionMmap>,
    memory: LinuxMemory,
    store: LinuxStore,
}

impl Bench {
    /// A guest whose RANGE is full of `byte` and stopped.
    fn stopped(kind: Kind, byte: u8) -> Self {
        let fds = Fds::open().unwrap_or_else(|error| panic!("this test needs {error}"));
        let backend = LinuxBackend::with_stop_method(fds, kind.method()).unwrap();
        let guest = kind.guest();
        let source = HostRegion::new(Arc::clone(&guest));
        let source = match kind {
            Kind::Memfd => source.memfd_owned(),
            _ => source,
        };
        let options = RegionOptions { dma_guarded: true };
        let memory = backend.attach(source, options).unwrap();
        let store = backend.open_store().unwrap();
        let bench = Self {
            guest,
            memory,
            store,
        };
        bench.fill(byte);
        let frames = FrameRange {
            start: FrameId(0),
            len: 4,
        };
        let mut content = PageBuf::zeroed();
        content.bytes_mut().fill(byte);
        for frame in frames.iter() {
            bench.store.fill(frame, &content).unwrap();
        }
        bench.stop(Backing::Own);
        bench
    }

    fn fill(&self, byte: u8) {
        for page in RANGE.iter() {
            let address = MemoryRegionAddress(page.byte_offset());
            self.guest.write_slice(&[byte; PAGE_SIZE], address).unwrap();
        }
    }

    fn stop(&self, backing: Backing) {
        assert_eq!(self.memory.stop(RANGE, backing).unwrap().held, [RANGE]);
    }

    /// Pages of memory that the guest's memfd holds; none if it has none.
    fn file_pages(&self) -> u64 {
        let file = self.guest.file_offset();
        file.map_or(0, |at| {
            let blocks = rustix::fs::fstat(at.file()).unwrap().st_blocks;
            u64::try_from(blocks).unwrap() * 512 / PAGE_SIZE as u64
        })
    }

    /// RANGE merged, then copied, then stopped as what it is.
    fn copied(kind: Kind, byte: u8) -> Self {
        let bench = Self::stopped(kind, byte);
        bench
            .memory
            .share(RANGE, Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.memory.lift(RANGE, Backing::Own);
        bench.memory.populate(RANGE).unwrap();
        bench.stop(Backing::Frame);
        assert_eq!(bench.file_pages(), 0);
        bench
    }

    fn memfd(&self) -> &Memfd {
        self.memory.memfd.as_ref().unwrap()
    }

    /// The bytes of RANGE stand in the memfd, which is not mapped there yet.
    fn write_copies_only(&self, byte: u8) {
        let mut content = PageBuf::zeroed();
        content.bytes_mut().fill(byte);
        for page in RANGE.iter() {
            self.memfd().write(page, &content).unwrap();
        }
    }

    fn map_memfd_only(&self) {
        let span = self.memory.span_of(RANGE);
        let attributes = mapping::Attributes::default();
        self.memfd().map_over(span, RANGE, attributes).unwrap();
    }

    /// The bytes of RANGE stand in memory that was moved over it, and no more.
    fn move_copies_only(&self, byte: u8) {
        let scratch = self.memory.anchored(RANGE).unwrap();
        let mut content = PageBuf::zeroed();
        content.bytes_mut().fill(byte);
        for place in 0..RANGE.len() {
            staging::fill_page(scratch.span().part(place, 1), &content);
        }
        scratch.move_over(self.memory.span_of(RANGE)).unwrap();
    }

    fn map_frames_only(&self) {
        let span = self.memory.span_of(RANGE);
        mapping::map_file_over(span, mapping::Attributes::default(), self.store.fd(), 0).unwrap();
    }

    /// The range settles as `expected`, twice; holds `byte`; and is free, also
    /// where a vCPU waited already.
    fn settles(self, backing: Backing, expected: Settled, byte: u8, now: Backing) {
        let guest = Arc::clone(&self.guest);
        let vcpu = std::thread::spawn(move || {
            let address = MemoryRegionAddress(RANGE.start.plus(1).byte_offset());
            guest.store(99u8, address, Ordering::Release).unwrap();
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        for _ in 0..2 {
            assert_eq!(self.memory.settle(RANGE, backing), expected);
        }
        vcpu.join().unwrap();
        for page in RANGE.iter() {
            let address = MemoryRegionAddress(page.byte_offset());
            let mut bytes = [0; PAGE_SIZE];
            self.guest.read_slice(&mut bytes, address).unwrap();
            let first = if page == RANGE.start.plus(1) {
                99
            } else {
                byte
            };
            assert_eq!((bytes[0], bytes[4095]), (first, byte), "page {page}");
        }
        self.memory.rest();
        assert!(self.memory.staging().is_none(), "others may have it");
        // As good as new: it can be stopped as what it is now.
        self.fill(1);
        self.stop(now);
        self.memory.lift(RANGE, now);
        self.fill(2);
    }
}

#[test]
fn stopped_and_no_more_is_kept() {
    for kind in KINDS {
        Bench::stopped(kind, BYTE).settles(Backing::Own, Settled::Kept, BYTE, Backing::Own);
    }
}

#[test]
fn lifted_halfway_is_kept() {
    let bench = Bench::stopped(Kind::Moved, BYTE);
    let two = PageRange::new(RANGE.start, 2);
    let moved = bench
        .memory
        .host
        .uffd
        .move_pages(bench.memory.span_of(two), bench.memory.slots_of(two));
    assert_eq!(moved.pages, 2);
    bench.settles(Backing::Own, Settled::Kept, BYTE, Backing::Own);
    let bench = Bench::stopped(Kind::Moved, BYTE);
    let span = bench.memory.span_of(RANGE);
    let slots = bench.memory.slots_of(RANGE);
    assert_eq!(bench.memory.host.uffd.move_pages(span, slots).pages, 4);
    bench.settles(Backing::Own, Settled::Kept, BYTE, Backing::Own);
}

#[test]
fn mapped_and_not_written_down_is_replaced() {
    for kind in KINDS {
        let bench = Bench::stopped(kind, BYTE);
        bench.map_frames_only();
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn mapped_and_not_registered_again_is_replaced() {
    for kind in KINDS {
        let bench = Bench::stopped(kind, BYTE);
        bench.map_frames_only();
        bench.memory.journal.mapped(RANGE);
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn mapped_and_registered_again_is_replaced() {
    for kind in KINDS {
        let bench = Bench::stopped(kind, BYTE);
        bench
            .memory
            .share(RANGE, Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn zeroed_in_part_is_replaced() {
    for kind in KINDS {
        let bench = Bench::stopped(kind, 0);
        bench.memory.journal.zeroed(RANGE);
        bench.settles(Backing::Own, Settled::Replaced, 0, Backing::Own);
        let bench = Bench::stopped(kind, 0);
        bench.memory.zero(RANGE, Backing::Own).unwrap();
        bench.settles(Backing::Own, Settled::Replaced, 0, Backing::Own);
    }
}

#[test]
fn frames_stopped_replaced_and_not_written_down() {
    for kind in KINDS {
        for replace in [false, true] {
            let bench = Bench::copied(kind, BYTE);
            if replace {
                bench.map_frames_only();
                bench.settles(Backing::Frame, Settled::Replaced, BYTE, Backing::Frame);
            } else {
                bench.settles(Backing::Frame, Settled::Kept, BYTE, Backing::Frame);
            }
        }
    }
}

#[test]
fn mapped_and_not_punched_is_punched() {
    for written_down in [false, true] {
        let bench = Bench::stopped(Kind::Memfd, BYTE);
        assert_eq!(bench.file_pages(), 4);
        bench.map_frames_only();
        if written_down {
            bench.memory.journal.mapped(RANGE);
        }
        assert_eq!(bench.memory.settle(RANGE, Backing::Own), Settled::Replaced);
        assert_eq!(bench.file_pages(), 0);
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn written_back_and_not_mapped_is_kept() {
    let bench = Bench::copied(Kind::Memfd, BYTE);
    bench.write_copies_only(BYTE);
    bench.settles(Backing::Frame, Settled::Kept, BYTE, Backing::Frame);
}

/// What an interrupted restore has left in the memfd never shows.
#[test]
fn written_back_and_not_mapped_is_gone_after_a_discard() {
    for zero in [false, true] {
        let bench = Bench::copied(Kind::Memfd, 0);
        bench.write_copies_only(BYTE);
        if zero {
            bench.memory.zero(RANGE, Backing::Frame).unwrap();
            bench.memory.lift(RANGE, Backing::Frame);
        } else {
            bench.memory.lift(RANGE, Backing::Frame);
            bench.memory.discard(RANGE, Backing::Frame).unwrap();
        }
        assert_eq!(bench.file_pages(), 0);
        let mut bytes = [1; PAGE_SIZE];
        let address = MemoryRegionAddress(RANGE.start.byte_offset());
        bench.guest.read_slice(&mut bytes, address).unwrap();
        assert_eq!(bytes, [0; PAGE_SIZE]);
    }
}

/// The memfd holds the guest's only bytes then: it must not be punched.
#[test]
fn written_back_and_mapped_is_replaced() {
    for written_down in [false, true] {
        let bench = Bench::copied(Kind::Memfd, BYTE);
        bench.write_copies_only(BYTE);
        bench.map_memfd_only();
        if written_down {
            bench.memory.journal.mapped(RANGE);
        }
        bench.settles(Backing::Frame, Settled::Replaced, BYTE, Backing::Own);
    }
}

#[test]
fn copies_moved_and_not_written_down_is_replaced() {
    for kind in [Kind::Moved, Kind::Protected] {
        for written_down in [false, true] {
            let bench = Bench::copied(kind, BYTE);
            bench.move_copies_only(BYTE);
            if written_down {
                bench.memory.journal.mapped(RANGE);
            }
            bench.settles(Backing::Frame, Settled::Replaced, BYTE, Backing::Own);
        }
    }
}

/// Frames gave way to the memfd, which was punched before.
#[test]
fn zeros_mapped_and_not_written_down_is_replaced() {
    let bench = Bench::copied(Kind::Memfd, 0);
    bench.memfd().punch(RANGE).unwrap();
    bench.map_memfd_only();
    bench.settles(Backing::Frame, Settled::Replaced, 0, Backing::Own);
}

/// What an earlier run has left in the staging area is not put back over pages of a
/// later one that was stopped in place.
#[test]
fn what_earlier_runs_left_stays_away() {
    const OTHER: u8 = 9;
    for ended in [false, true] {
        let bench = Bench::copied(Kind::Moved, BYTE);
        bench.memory.lift(RANGE, Backing::Frame);
        bench.fill(OTHER);
        bench.stop(Backing::Frame);
        let mut content = PageBuf::zeroed();
        content.bytes_mut().fill(OTHER);
        for frame in (4..8).map(FrameId) {
            bench.store.fill(frame, &content).unwrap();
        }
        let shared = bench
            .memory
            .share(RANGE, Backing::Frame, &bench.store, FrameId(4));
        shared.unwrap();
        bench.memory.lift(RANGE, Backing::Frame);
        bench.memory.populate(RANGE).unwrap();
        bench.stop(Backing::Frame);
        bench.memory.reuse(RANGE).unwrap();
        if ended {
            bench.memory.lift(RANGE, Backing::Frame);
        }
        bench.memory.detach();
        for page in RANGE.iter() {
            let address = MemoryRegionAddress(page.byte_offset());
            let mut bytes = [0; PAGE_SIZE];
            bench.guest.read_slice(&mut bytes, address).unwrap();
            assert_eq!((bytes[0], bytes[4095]), (OTHER, OTHER), "page {page}");
        }
    }
}
