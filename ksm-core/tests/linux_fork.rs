//! Clones, moves, splits and restored snapshots on real memory, with threads that
//! write as vCPUs do and a pass that goes on all the while.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod linux_common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::page::{PAGE_SIZE, PAGE_SIZE_U64, PageIndex};
use ksm_core::{Config, Error, Ksm, RegionId, RegionOptions, SpaceId};
use linux_common::{Guest, KINDS, Kind, full_of, pages};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, MemoryRegionAddress};

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };
const PAGES: u64 = 512;
/// Pages that threads count up, from the first on.
const COUNTERS: u64 = 32;

struct World {
    ksm: Ksm<LinuxBackend>,
    space: SpaceId,
}

fn world(kind: Kind) -> World {
    let ksm = Ksm::new(kind.backend(), Config::default()).unwrap();
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    World { ksm, space }
}

impl World {
    fn register(&self, guest: &Guest) -> RegionId {
        let source = guest.source();
        self.ksm.register(self.space, source, GUARDED).unwrap()
    }

    fn fork(&self, parent: RegionId, kind: Kind) -> (RegionId, Guest) {
        let clone = kind.guest(PAGES);
        let source = clone.source();
        let region = self.ksm.fork_region(parent, self.space, source, GUARDED);
        (region.unwrap(), clone)
    }

    /// Passes, until `stop`.
    fn scan_until(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.ksm.scan(u64::MAX).unwrap();
        }
    }
}

fn counter(guest: &Guest, page: u64) -> u64 {
    let address = MemoryRegionAddress(page * PAGE_SIZE_U64);
    guest.0.load(address, Ordering::Acquire).unwrap()
}

/// Counts the first word of each counter page up, over and over, and demands that
/// it is what was written last.
fn count(guest: &Guest, stop: &AtomicBool) -> u64 {
    let mut round = counter(guest, 0);
    while !stop.load(Ordering::Relaxed) {
        for page in 0..COUNTERS {
            assert_eq!(counter(guest, page), round, "page {page} lost a write");
            let address = MemoryRegionAddress(page * PAGE_SIZE_U64);
            guest
                .0
                .store(round + 1, address, Ordering::Release)
                .unwrap();
        }
        round += 1;
    }
    round
}

/// Contents of which each is there four times, in runs of eight pages.
fn fill(guest: &Guest) {
    for page in COUNTERS..PAGES {
        let content = 1 + (page / 8 % 15) as u8 * 8 + (page % 8) as u8;
        guest.fill(page, content);
    }
}

fn same(one: &Guest, other: &Guest) {
    for page in COUNTERS..PAGES {
        assert_eq!(one.ends(page), other.ends(page), "page {page}");
    }
}

/// A running parent is cloned again and again: it loses nothing, each clone holds
/// for each page what the parent held at some time in between, and what is
/// written to one is not seen by another.
#[test]
fn a_running_guest_is_cloned() {
    for kind in KINDS {
        let world = world(kind);
        let parent = kind.guest(PAGES);
        fill(&parent);
        let region = world.register(&parent);
        let stop = AtomicBool::new(false);
        let clones = thread::scope(|scope| {
            scope.spawn(|| world.scan_until(&stop));
            let vcpu = scope.spawn(|| count(&parent, &stop));
            while counter(&parent, COUNTERS - 1) == 0 {
                thread::yield_now();
            }
            let clones: Vec<_> = (0..6)
                .map(|_| {
                    let before = counter(&parent, COUNTERS - 1);
                    let (id, clone) = world.fork(region, kind);
                    let after = counter(&parent, 0);
                    for page in 0..COUNTERS {
                        let value = counter(&clone, page);
                        assert!((before..=after).contains(&value), "{kind:?}: {value}");
                    }
                    (id, clone)
                })
                .collect();
            stop.store(true, Ordering::Relaxed);
            assert!(vcpu.join().unwrap() > 0);
            clones
        });
        world.ksm.check().unwrap();
        for (number, (_, clone)) in (1..).zip(&clones) {
            same(&parent, clone);
            clone.fill(100, 200 + number);
        }
        for (number, (_, clone)) in (1..).zip(&clones) {
            assert_eq!(clone.ends(100).0, 200 + number);
        }
        let sharers = world.ksm.sharers(region, PageIndex(101)).unwrap();
        assert!(sharers.len() > clones.len(), "{kind:?}: {}", sharers.len());
        // Clones go, one content and all; the others keep every byte.
        world.ksm.unregister(clones[0].0).unwrap();
        world.ksm.discard(clones[1].0, pages(0, PAGES)).unwrap();
        world.ksm.unregister(clones[1].0).unwrap();
        world.ksm.unregister(region).unwrap();
        world.ksm.check().unwrap();
        assert_eq!(clones[1].1.ends(200), (0, 0));
        for (_, clone) in [&clones[0], &clones[2], &clones[5]] {
            for page in (COUNTERS..PAGES).filter(|&page| page != 100) {
                assert_eq!(clone.ends(page), parent.ends(page));
            }
        }
    }
}

/// Splitting, and taking parts out, beside vCPUs and a pass.
#[test]
fn a_running_guests_region_is_split_and_part_of_it_leaves() {
    for kind in KINDS {
        let world = world(kind);
        let [guest, other] = [(); 2].map(|()| {
            let guest = kind.guest(PAGES);
            fill(&guest);
            guest
        });
        let (region, whole) = (world.register(&guest), world.register(&other));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| world.scan_until(&stop));
            let vcpu = scope.spawn(|| count(&guest, &stop));
            while counter(&guest, COUNTERS - 1) == 0 {
                thread::yield_now();
            }
            let mut rest = region;
            // A page here, a page there: each split waits for one run at most.
            for cut in [8, 3, 40, 77, 100] {
                let [_, behind] = world.ksm.split(rest, PageIndex(cut)).unwrap();
                rest = behind;
            }
            let left = world.ksm.unregister_part(rest, pages(50, 100)).unwrap();
            assert_eq!(left.len(), 2);
            while world.ksm.region_stats(whole).unwrap().ksm_merging_pages == 0 {
                thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
            assert!(vcpu.join().unwrap() > 0);
        });
        world.ksm.check().unwrap();
        same(&guest, &other);
        for region in world.ksm.regions_of(world.space).unwrap() {
            world.ksm.unregister(region).unwrap();
        }
        same(&guest, &other);
    }
}

#[test]
fn a_guest_moves_to_another_address() {
    for kind in KINDS {
        let world = world(kind);
        let [guest, other] = [(); 2].map(|()| {
            let guest = kind.guest(PAGES);
            fill(&guest);
            guest
        });
        let (region, whole) = (world.register(&guest), world.register(&other));
        for _ in 0..3 {
            world.ksm.scan(u64::MAX).unwrap();
        }
        guest.fill(90, 250);
        let sharers = world.ksm.sharers(whole, PageIndex(91)).unwrap().len();
        let place = kind.guest(PAGES);
        let moved = world.ksm.move_region(region, place.source()).unwrap();
        world.ksm.check().unwrap();
        assert_eq!(guest.ends(91), (0, 0), "{kind:?}");
        assert_eq!(place.ends(90), (250, 250));
        place.fill(90, other.ends(90).0);
        same(&place, &other);
        let found = world.ksm.sharers(whole, PageIndex(91)).unwrap();
        assert_eq!(found.len(), sharers, "{kind:?}");
        assert!(found.iter().any(|sharer| sharer.region == moved));
    }
}

/// A snapshot file of `PAGES` pages, every fifth of them zero.
fn snapshot(name: &str) -> File {
    let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    for page in 0..PAGES {
        let mut content = full_of(if page % 5 == 4 { 0 } else { 7 });
        if page % 5 != 4 {
            content.bytes_mut()[..8].copy_from_slice(&page.to_le_bytes());
        }
        file.write_all(content.bytes()).unwrap();
    }
    file
}

fn restored(file: &File) -> Guest {
    let at = FileOffset::new(file.try_clone().unwrap(), 0);
    let region = MmapRegionBuilder::new(PAGES as usize * PAGE_SIZE)
        .with_file_offset(at)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
        .build()
        .unwrap();
    Guest::of(region)
}

/// A private mapping of a snapshot file cannot be registered, but taken over: then
/// it is in the store once however many guests are restored from it, and nothing
/// of the file is mapped any more.
#[test]
fn restored_snapshots_are_taken_over() {
    for method in linux_common::METHODS {
        let world = world(Kind::Anonymous(method));
        let file = snapshot("ksm-snapshot");
        let guests = [(); 2].map(|()| restored(&file));
        let refused = world.ksm.register(world.space, guests[0].source(), GUARDED);
        assert!(matches!(refused, Err(Error::Register(_))), "{refused:?}");
        // The VMM has patched a page meanwhile.
        guests[0].fill(11, 99);
        let regions = guests.each_ref().map(|guest| {
            let taken = world.ksm.take_over(world.space, guest.source(), GUARDED);
            taken.unwrap()
        });
        world.ksm.check().unwrap();
        let stats = world.ksm.stats();
        let contents = PAGES - PAGES / 5;
        assert_eq!(stats.pages_shared + stats.pages_sharing, 2 * contents);
        assert_eq!(stats.pages_shared, contents + 1, "but for the patched page");
        let clone = Guest::new(PAGES);
        let forked = world
            .ksm
            .fork_region(regions[0], world.space, clone.source(), GUARDED);
        forked.unwrap();
        assert_eq!(clone.ends(11), (99, 99));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("ksm-snapshot"), "the file is still mapped");

        // They live as others do: written to, merged again, given back.
        for guest in [&guests[0], &guests[1], &clone] {
            guest.fill(20, 50);
            guest.fill(4, 51);
        }
        for _ in 0..3 {
            world.ksm.scan(u64::MAX).unwrap();
        }
        for page in [20, 4] {
            let sharers = world.ksm.sharers(regions[1], PageIndex(page)).unwrap();
            assert_eq!(sharers.len(), 3, "{method:?}: page {page}");
        }
        for region in world.ksm.regions_of(world.space).unwrap() {
            world.ksm.unregister(region).unwrap();
        }
        let mut content = [0; PAGE_SIZE];
        for page in (0..PAGES).filter(|page| ![4, 11, 20].contains(page)) {
            let offset = page * PAGE_SIZE_U64;
            file.read_exact_at(&mut content, offset).unwrap();
            for guest in [&guests[0], &guests[1], &clone] {
                let mut seen = [0; PAGE_SIZE];
                let at = MemoryRegionAddress(offset);
                guest.0.read_slice(&mut seen, at).unwrap();
                assert_eq!(seen, content, "page {page}");
            }
        }
    }
}

/// Memory whose take-over fails in the middle keeps its bytes, and nobody's
/// userfaultfd has any of it.
#[test]
fn a_snapshot_for_which_mappings_do_not_suffice() {
    for method in linux_common::METHODS {
        let config = Config {
            max_vmas: Some(PAGES / 10),
            ..Config::default()
        };
        let ksm = Ksm::new(Kind::Anonymous(method).backend(), config).unwrap();
        let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
        let file = snapshot("ksm-refused");
        let guest = restored(&file);
        let taken = ksm.take_over(space, guest.source(), GUARDED);
        assert!(matches!(taken, Err(Error::VmaBudget { .. })), "{taken:?}");
        let sizes = [0, PAGES - 1].map(|page| guest.smaps(page, "Size"));
        assert_ne!(sizes[0], sizes[1], "it failed before the middle");
        for page in 0..PAGES {
            let flags = guest.vm_flags(page);
            let registered = flags.iter().any(|flag| flag == "uw" || flag == "um");
            assert!(!registered, "{method:?}: page {page} is {flags:?}");
            let is = if page % 5 == 4 { 0 } else { 7 };
            assert_eq!(guest.ends(page).1, is, "{method:?}: page {page}");
        }
    }
}

/// A file in memory, which userfaultfd knows how to handle, never shows again where
/// a restored guest has zeros.
#[test]
fn a_snapshot_in_memory_does_not_show_where_pages_are_dropped() {
    for method in linux_common::METHODS {
        let world = world(Kind::Anonymous(method));
        let mut file = File::from(linux_common::memfd(PAGES));
        for _ in 0..PAGES {
            file.write_all(full_of(7).bytes()).unwrap();
        }
        let guest = restored(&file);
        // The VMM has patched a page meanwhile.
        guest.fill(11, 0);
        let region = world.ksm.take_over(world.space, guest.source(), GUARDED);
        let region = region.unwrap();
        assert_eq!(guest.ends(11), (0, 0), "{method:?}");
        world.ksm.discard(region, pages(20, 3)).unwrap();
        assert_eq!(guest.ends(21), (0, 0), "{method:?}");
        world.ksm.unregister(region).unwrap();
        assert_eq!(guest.ends(21), (0, 0), "{method:?}");
        assert_eq!(guest.ends(30), (7, 7), "{method:?}");
        assert_eq!(world.ksm.store_bytes().unwrap(), 0, "{method:?}");
    }
}
