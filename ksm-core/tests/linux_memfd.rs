//! Guests whose memory is a memfd of this process alone, by themselves and
//! beside others: they shrink page by page, and nothing of them is lost.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
#![cfg(feature = "linux")]

mod linux_common;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use ksm_core::backend::linux::{LinuxBackend, StopMethod};
use ksm_core::backend::{Backing, FrameStore, Memory, PageState};
use ksm_core::page::{FrameId, PageIndex};
use ksm_core::{Config, Ksm, Outcome, RegionId, RegionOptions, Target};
use linux_common::{Bench, Guest, backend, full_of, memfd, pages};
use rustix::fs::SealFlags;
use vm_memory::{Bytes, FileOffset, MemoryRegionAddress};

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

/// An engine with guests that trust one another.
struct World {
    ksm: Ksm<LinuxBackend>,
    guests: Vec<Guest>,
    regions: Vec<RegionId>,
}

impl World {
    fn new(config: Config, guests: Vec<Guest>) -> Self {
        let ksm = Ksm::new(backend(StopMethod::Auto), config).unwrap();
        let domain = ksm.create_domain().unwrap();
        let register = |guest: &Guest| {
            let space = ksm.create_space(domain).unwrap();
            ksm.register(space, guest.source(), GUARDED).unwrap()
        };
        let regions = guests.iter().map(register).collect();
        Self {
            ksm,
            guests,
            regions,
        }
    }

    fn passes(&self, count: u64) {
        let until = self.ksm.stats().full_scans + count;
        while self.ksm.stats().full_scans < until {
            self.ksm.scan(1 << 20).unwrap();
        }
        self.ksm.check().unwrap();
    }

    /// Pages of memory that the guests' files hold.
    fn file_pages(&self) -> u64 {
        self.guests.iter().map(Guest::file_pages).sum()
    }

    fn store_pages(&self) -> u64 {
        self.ksm.store_bytes().unwrap() / 4096
    }
}

/// A page's byte, all over.
fn content(page: u64) -> u8 {
    1 + (page % 250) as u8
}

/// Guests of 256 pages: 200 full ones, 40 zero ones, the others holes.
fn equal_guests(count: usize) -> Vec<Guest> {
    let guests: Vec<_> = (0..count).map(|_| Guest::memfd(256)).collect();
    for guest in &guests {
        (0..200).for_each(|page| guest.fill(page, content(page)));
        guest.fill_all(pages(200, 40), 0);
    }
    guests
}

#[test]
fn equal_guests_free_what_the_counters_claim() {
    let world = World::new(Config::default(), equal_guests(3));
    assert_eq!(world.file_pages(), 3 * 240);
    world.passes(2);
    let stats = world.ksm.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (200, 400));
    assert_eq!(stats.ksm_zero_pages, 3 * 40);
    let saved = 3 * 240 - world.file_pages() - world.store_pages();
    assert_eq!(saved, stats.pages_sharing + stats.ksm_zero_pages);
    assert_eq!((world.file_pages(), world.store_pages()), (0, 200));
    for guest in &world.guests {
        assert_eq!(guest.ends(7), (content(7), content(7)));
        assert_eq!(guest.ends(230), (0, 0));
    }
}

#[test]
fn a_write_is_copied_merged_again_and_unmerged() {
    let world = World::new(Config::default(), equal_guests(2));
    world.passes(2);
    let [one, other] = [&world.guests[0], &world.guests[1]];
    one.fill(7, 99);
    one.store(8, 98);
    world.passes(1);
    assert_eq!(world.ksm.stats().cow_breaks, 2);
    assert_eq!((one.ends(7), one.ends(8)), ((99, 99), (98, content(8))));
    assert_eq!((other.ends(7), other.ends(8)), ((8, 8), (9, 9)));
    assert_eq!(world.file_pages(), 0, "a copy is nobody's file");
    one.fill_all(pages(7, 1), content(7));
    one.fill_all(pages(8, 1), content(8));
    world.passes(2);
    let stats = world.ksm.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (200, 200));
    assert_eq!(world.ksm.unmerge(Target::All).unwrap(), 400);
    assert_eq!((world.store_pages(), world.file_pages()), (0, 0));
    for page in 0..200 {
        assert_eq!(one.ends(page), (content(page), content(page)));
    }
    world.passes(3);
    assert_eq!(world.ksm.stats().pages_sharing, 200);
}

#[test]
fn unregistered_memory_is_the_memfd_again() {
    let world = World::new(Config::default(), equal_guests(2));
    world.passes(2);
    world.guests[0].store(3, 77);
    for &region in &world.regions {
        world.ksm.unregister(region).unwrap();
    }
    assert_eq!(world.file_pages(), 400, "zero pages stay holes");
    for (number, guest) in world.guests.iter().enumerate() {
        for page in 0..256 {
            let byte = if page < 200 { content(page) } else { 0 };
            let first = if (number, page) == (0, 3) { 77 } else { byte };
            assert_eq!(guest.file_ends(page), (first, byte), "{number}: {page}");
            assert_eq!(guest.ends(page), (first, byte), "{number}: {page}");
        }
        // One mapping, and what is written there is in the file.
        for page in [0, 3, 128, 255] {
            assert!(guest.vm_flags(page).contains(&"sh".to_owned()));
            assert_eq!(guest.smaps(page, "Size"), "1024 kB");
            guest.store(page, 66);
            assert_eq!(guest.file_ends(page).0, 66);
        }
    }
    assert_eq!(world.store_pages(), 0);
}

#[test]
fn discarded_memory_reads_zero_and_is_freed() {
    let world = World::new(Config::default(), equal_guests(2));
    let [one, other] = [&world.guests[0], &world.guests[1]];
    one.fill(0, 255); // Stays its own.
    world.passes(2);
    one.fill(5, 99); // Copied.
    assert_eq!((one.file_pages(), other.file_pages()), (1, 1));
    world.ksm.discard(world.regions[0], pages(0, 100)).unwrap();
    assert_eq!(one.file_pages(), 0);
    for page in 0..200 {
        let byte = if page < 100 { 0 } else { content(page) };
        assert_eq!(one.ends(page), (byte, byte), "{page}");
        assert_eq!(other.ends(page), (content(page), content(page)), "{page}");
    }
    assert_eq!(one.file_pages(), 100, "a read fills the hole of a memfd");
    world.passes(2);
    assert_eq!(world.ksm.stats().pages_sharing, 100);
    assert_eq!(one.file_pages(), 0);
}

/// What was loaded by `write`, no page table has.
#[test]
fn memory_loaded_by_descriptor_is_merged() {
    let guests = [Guest::memfd(64), Guest::memfd(64)];
    for guest in &guests {
        for page in 10..20 {
            let at = page * 4096;
            rustix::io::pwrite(guest.file(), full_of(content(page)).bytes(), at).unwrap();
        }
    }
    let world = World::new(Config::default(), guests.to_vec());
    world.passes(2);
    assert_eq!(world.ksm.stats().pages_sharing, 10);
    assert_eq!(world.file_pages(), 0);
    assert_eq!(world.guests[1].ends(19), (content(19), content(19)));
}

/// As below and above the hole for devices.
#[test]
fn two_regions_of_one_memfd() {
    let file = Arc::new(std::fs::File::from(memfd(96)));
    let part = |first: u64, n| {
        let offset = FileOffset::from_arc(Arc::clone(&file), first * 4096);
        Guest::part_of(offset, n)
    };
    let guests = vec![part(64, 32), part(0, 32)];
    guests[0].fill_all(pages(0, 32), 5);
    guests[1].fill_all(pages(0, 32), 5);
    let world = World::new(Config::default(), guests);
    world.passes(2);
    assert_eq!(world.guests[0].file_pages(), 0);
    world.ksm.unregister(world.regions[0]).unwrap();
    assert_eq!(world.guests[0].file_pages(), 32);
    assert_eq!(world.guests[0].file_ends(64), (5, 5));
    assert_eq!(world.guests[1].ends(31), (5, 5));
}

/// One guest: private memory, a memfd of its own, and a window that another
/// process maps, which is not registered.
#[test]
fn a_guest_of_mixed_kinds() {
    let ksm = Ksm::new(backend(StopMethod::Auto), Config::default()).unwrap();
    let domain = ksm.create_domain().unwrap();
    let window = Guest::with_flags(16, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let (private, file) = (Guest::new(64), Guest::memfd(64));
    let space = ksm.create_space(domain).unwrap();
    for guest in [&window, &private, &file] {
        (0..16).for_each(|page| guest.fill(page, content(page)));
    }
    private.fill_all(pages(32, 8), 200);
    file.fill_all(pages(40, 8), 200);
    let regions = [&private, &file].map(|guest| {
        ksm.register(space, guest.source(), GUARDED)
            .expect("a region of its kind")
    });
    ksm.register(space, window.source(), GUARDED)
        .expect_err("memory of others too");
    while ksm.stats().full_scans < 2 {
        ksm.scan(1 << 20).unwrap();
    }
    ksm.check().unwrap();
    let stats = ksm.space_stats(space).unwrap();
    assert_eq!(stats.ksm_merging_pages, 2 * 16 + 2 * 8);
    assert_eq!(file.file_pages(), 0);
    for guest in [&window, &private, &file] {
        guest.store(3, 99);
        assert_eq!(guest.ends(3), (99, content(3)));
        assert_eq!(guest.ends(4), (content(4), content(4)));
    }
    for region in regions {
        ksm.unregister(region).unwrap();
    }
    assert_eq!(file.file_ends(3), (99, content(3)));
    assert_eq!(file.file_ends(47), (200, 200));
    assert_eq!(private.ends(39), (200, 200));
}

/// vCPUs increment while their memory is merged, unmerged, and taken out and in
/// again.
#[test]
fn no_increment_is_lost_when_memory_comes_and_goes() {
    const PAGES: u64 = 32;
    const ROUNDS: u64 = 300;
    let config = Config {
        settle_passes: 0,
        ..Config::default()
    };
    let guests: Vec<_> = (0..2).map(|_| Guest::memfd(PAGES)).collect();
    let world = World::new(config, guests);
    let domain = world.ksm.create_domain().unwrap();
    let together = Barrier::new(2);
    let spaces = [0, 1].map(|_| world.ksm.create_space(domain).unwrap());
    thread::scope(|scope| {
        let vcpus: Vec<_> = world
            .guests
            .iter()
            .map(|guest| {
                let together = &together;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        for page in 0..PAGES {
                            let at = MemoryRegionAddress(page * 4096 + 8 * page);
                            let value: u64 = guest.0.load(at, Ordering::Acquire).unwrap();
                            assert_eq!(value, round, "page {page}");
                            guest.0.store(round + 1, at, Ordering::Release).unwrap();
                        }
                        // Their memory is equal for a while.
                        together.wait();
                        thread::sleep(Duration::from_millis(1));
                        together.wait();
                    }
                })
            })
            .collect();
        let mut regions = world.regions.clone();
        let running = || vcpus.iter().any(|vcpu| !vcpu.is_finished());
        for turn in (0..).take_while(|_| running()) {
            world.ksm.scan(1 << 20).unwrap();
            if turn % 7 == 0 {
                world.ksm.unmerge(Target::All).unwrap();
            }
            if turn % 20 == 0 {
                for (at, guest) in world.guests.iter().enumerate() {
                    world.ksm.unregister(regions[at]).unwrap();
                    regions[at] = world
                        .ksm
                        .register(spaces[at], guest.source(), GUARDED)
                        .unwrap();
                }
            }
        }
        vcpus.into_iter().for_each(|vcpu| vcpu.join().unwrap());
    });
    let merged = world.ksm.stats().outcomes[Outcome::Merged];
    assert!(merged > 100, "hardly anything was merged: {merged}");
    world.ksm.check().unwrap();
    for guest in &world.guests {
        for page in 0..PAGES {
            let at = MemoryRegionAddress(page * 4096 + 8 * page);
            let value: u64 = guest.0.load(at, Ordering::Acquire).unwrap();
            assert_eq!(value, ROUNDS);
        }
    }
}

/// Once sealed, no page can be freed: then none is merged, and none is lost.
#[test]
fn a_memfd_sealed_later_is_left_alone() {
    let guests = vec![Guest::memfd(16), Guest::memfd(16)];
    guests.iter().for_each(|guest| guest.fill(4, 9));
    let world = World::new(Config::default(), guests);
    for guest in &world.guests {
        rustix::fs::fcntl_add_seals(guest.file(), SealFlags::FUTURE_WRITE).unwrap();
    }
    world.passes(3);
    let found = world.ksm.explain(world.regions[0], PageIndex(4)).unwrap();
    assert_eq!(found.outcome, Outcome::Refused);
    assert_eq!(world.ksm.stats().pages_sharing, 0);
    assert_eq!(world.guests[0].ends(4), (9, 9));
    world.guests[0].writes(4, 1).runs_on();
}

/// A guest whose place in memory and in its file are equal, as far as huge pages
/// are concerned.
fn guest_with_huge_pages(n: u64) -> Guest {
    let place = |guest: &Guest| guest.address() as u64 % (512 * 4096);
    let file = Arc::new(std::fs::File::from(memfd(n + 512)));
    let at = |offset| Guest::part_of(FileOffset::from_arc(Arc::clone(&file), offset), n);
    let mut offset = 0;
    for _ in 0..100 {
        // A new mapping comes to lie where the last one was, unless another
        // thread takes that place.
        let guest = at(offset);
        if place(&guest) == offset {
            return guest;
        }
        offset = place(&guest);
    }
    panic!("no mapping where huge pages can be");
}

/// Of a huge page of a memfd, a merged part is freed.
#[test]
fn parts_of_huge_pages_are_freed() {
    let guest = guest_with_huge_pages(3 * 512);
    guest.fill_all(pages(0, 3 * 512), 7);
    let first = guest.first_huge_page();
    guest
        .collapse(pages(first, 512))
        .expect("this test needs a kernel with huge pages for memfds");
    let bench = Bench::with(backend(StopMethod::Auto), guest.clone(), GUARDED);
    let huge = |bench: &Bench| bench.runs(pages(first, 512)).iter().any(|run| run.huge);
    assert!(huge(&bench));
    bench.frames(0, 256, 7);
    let before = guest.file_pages();
    for (start, n) in [(first + 1, 255), (first + 256, 255)] {
        let range = pages(start, n);
        bench.stop_all(range, Backing::Own);
        let vcpu = guest.writes(start + 9, 8);
        assert!(vcpu.waits());
        bench
            .memory
            .share(range, Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.memory.lift(range, Backing::Own);
        vcpu.runs_on();
        assert_eq!(guest.ends(start + 9), (8, 7));
    }
    assert_eq!(before - guest.file_pages(), 510);
    assert_eq!(guest.ends(first), (7, 7));
    assert_eq!(guest.ends(first + 511), (7, 7));
    assert!(!huge(&bench));
}

/// The page map says FILE of both: what the engine merged is told apart by the
/// engine's records, and what is nowhere in the page table is not held.
#[test]
fn own_pages_and_frames_in_the_page_map() {
    let bench = Bench::with(backend(StopMethod::Auto), Guest::memfd(16), GUARDED);
    bench.guest.fill_all(pages(0, 4), 7);
    bench.merge(pages(0, 2), 0, 7);
    bench.guest.fill(1, 8);
    assert_eq!(bench.state(0), None, "merged, untouched");
    assert_eq!(bench.guest.ends(0), (7, 7));
    let states = [0, 1, 2, 5].map(|page| bench.state(page));
    let (file, private) = (Some(PageState::File), Some(PageState::Private));
    assert_eq!(states, [file, private, file, None]);
    // A hole is not held, and holds no marker afterwards.
    let held = bench.stop(pages(2, 4), Backing::Own);
    assert_eq!(held.held, [pages(2, 2)]);
    bench.guest.writes(5, 1).runs_on();
    bench.memory.lift(pages(2, 4), Backing::Own);
    assert_eq!(bench.state(4), None);
    assert_eq!(bench.state(5), file);
    assert_eq!(bench.store.allocated_bytes().unwrap(), 2 * 4096);
}
