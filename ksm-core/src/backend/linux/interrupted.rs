//! A replacement that ends between two system calls: what another thread finds,
//! and makes of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress};

use super::*;
use crate::backend::{Backing, FrameStore, Memory, Settled};
use crate::page::{FrameId, FrameRange, PAGE_SIZE, PageBuf, PageIndex, PageRange};

const RANGE: PageRange = PageRange {
    start: PageIndex(2),
    end: PageIndex(6),
};
const BYTE: u8 = 7;

struct Bench {
    guest: Arc<GuestRegionMmap>,
    memory: LinuxMemory,
    store: LinuxStore,
}

impl Bench {
    /// A guest whose RANGE is full of `byte` and stopped.
    fn stopped(method: StopMethod, byte: u8) -> Self {
        let fds = Fds::open().unwrap_or_else(|error| panic!("this test needs {error}"));
        let backend = LinuxBackend::with_stop_method(fds, method).unwrap();
        let guest =
            Arc::new(GuestRegionMmap::from_range(GuestAddress(0), 8 * PAGE_SIZE, None).unwrap());
        let options = RegionOptions { dma_guarded: true };
        let memory = backend
            .attach(HostRegion::new(Arc::clone(&guest)), options)
            .unwrap();
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
        bench.store.reserve(frames).unwrap();
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
        assert!(self.memory.staging.is_empty().unwrap());
        // As good as new: it can be stopped as what it is now.
        self.fill(1);
        self.stop(now);
        self.memory.lift(RANGE, now);
        self.fill(2);
    }
}

const METHODS: [StopMethod; 2] = [StopMethod::Move, StopMethod::WriteProtect];

#[test]
fn stopped_and_no_more_is_kept() {
    for method in METHODS {
        Bench::stopped(method, BYTE).settles(Backing::Own, Settled::Kept, BYTE, Backing::Own);
    }
}

#[test]
fn lifted_halfway_is_kept() {
    let bench = Bench::stopped(StopMethod::Move, BYTE);
    let two = PageRange::new(RANGE.start, 2);
    let moved = bench
        .memory
        .host
        .uffd
        .move_pages(bench.memory.span_of(two), bench.memory.slots_of(two));
    assert_eq!(moved.pages, 2);
    bench.settles(Backing::Own, Settled::Kept, BYTE, Backing::Own);
    let bench = Bench::stopped(StopMethod::Move, BYTE);
    let span = bench.memory.span_of(RANGE);
    let slots = bench.memory.slots_of(RANGE);
    assert_eq!(bench.memory.host.uffd.move_pages(span, slots).pages, 4);
    bench.settles(Backing::Own, Settled::Kept, BYTE, Backing::Own);
}

#[test]
fn mapped_and_not_written_down_is_replaced() {
    for method in METHODS {
        let bench = Bench::stopped(method, BYTE);
        bench.map_frames_only();
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn mapped_and_not_registered_again_is_replaced() {
    for method in METHODS {
        let bench = Bench::stopped(method, BYTE);
        bench.map_frames_only();
        bench.memory.journal.mapped(RANGE);
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn mapped_and_registered_again_is_replaced() {
    for method in METHODS {
        let bench = Bench::stopped(method, BYTE);
        bench
            .memory
            .share(RANGE, Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.settles(Backing::Own, Settled::Replaced, BYTE, Backing::Frame);
    }
}

#[test]
fn zeroed_in_part_is_replaced() {
    for method in METHODS {
        let bench = Bench::stopped(method, 0);
        bench.memory.journal.zeroed(RANGE);
        bench.settles(Backing::Own, Settled::Replaced, 0, Backing::Own);
        let bench = Bench::stopped(method, 0);
        bench.memory.zero(RANGE, Backing::Own).unwrap();
        bench.settles(Backing::Own, Settled::Replaced, 0, Backing::Own);
    }
}

#[test]
fn frames_stopped_replaced_and_not_written_down() {
    for method in METHODS {
        for replace in [false, true] {
            let bench = Bench::stopped(method, BYTE);
            bench
                .memory
                .share(RANGE, Backing::Own, &bench.store, FrameId(0))
                .unwrap();
            bench.memory.lift(RANGE, Backing::Own);
            bench.memory.populate(RANGE).unwrap();
            bench.stop(Backing::Frame);
            if replace {
                bench.map_frames_only();
                bench.settles(Backing::Frame, Settled::Replaced, BYTE, Backing::Frame);
            } else {
                bench.settles(Backing::Frame, Settled::Kept, BYTE, Backing::Frame);
            }
        }
    }
}
