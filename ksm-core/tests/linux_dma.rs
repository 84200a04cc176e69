//! Real DMA into guest memory while it is scanned and merged at full speed: on
//! pages that were never merged, and on copied ones, with and without pin
//! guards where the contract allows. Every byte must arrive.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // In helpers of tests.

mod linux_common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ksm_core::backend::linux::{LinuxBackend, StopMethod};
use ksm_core::page::{PageIndex, PageRange};
use ksm_core::{Config, Error, Ksm, Outcome, RegionId, RegionOptions};
use linux_common::{DirectFile, Guest, METHODS, Ring, backend, pages};

/// Guest pages that devices read into.
const PAGES: u64 = 64;
/// Contents that go round in them: bytes 1 to 4.
const CONTENTS: u64 = 4;

/// What page `page` holds after round `round`.
fn content(page: u64, round: u64) -> u8 {
    1 + ((page + round) % CONTENTS) as u8
}

/// A guest that devices read into, and another that holds all contents there
/// are, so that whatever arrives can be merged at first sight.
struct World {
    ksm: Ksm<LinuxBackend>,
    guest: Guest,
    region: RegionId,
    file: DirectFile,
    scans: AtomicBool,
}

impl World {
    fn new(method: StopMethod, dma_guarded: bool) -> Self {
        let config = Config {
            settle_passes: 0,
            ..Config::default()
        };
        let ksm = Ksm::new(backend(method), config).unwrap();
        let domain = ksm.create_domain().unwrap();
        let register = |guest: &Guest| {
            let space = ksm.create_space(domain).unwrap();
            let options = RegionOptions { dma_guarded };
            ksm.register(space, guest.source(), options).unwrap()
        };
        let others = Guest::new(2 * CONTENTS);
        for page in 0..2 * CONTENTS {
            others.fill(page, content(page, 0));
        }
        register(&others);
        let guest = Guest::new(PAGES);
        let region = register(&guest);
        while ksm.stats().pages_shared < CONTENTS {
            ksm.scan(1 << 20).unwrap();
        }
        let contents = (0..PAGES + CONTENTS).map(|page| content(page, 0));
        Self {
            ksm,
            guest,
            region,
            file: DirectFile::new(contents),
            scans: AtomicBool::new(true),
        }
    }

    /// Does `work` while another thread scans without a pause.
    fn while_scanning(&self, work: impl FnOnce()) {
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
            }
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                while self.scans.load(Ordering::Relaxed) {
                    self.ksm.scan(1 << 20).unwrap();
                }
            });
            let _ends = Ends(&self.scans);
            work();
        });
        self.ksm.check().unwrap();
    }

    /// Waits until the scanner has looked at everything twice.
    fn passes(&self) {
        let until = self.ksm.stats().full_scans + 3;
        let start = Instant::now();
        while self.ksm.stats().full_scans < until {
            assert!(start.elapsed() < Duration::from_secs(60), "no pass ends");
            thread::yield_now();
        }
    }

    /// Each page holds what was read into it in `round`.
    fn holds(&self, round: u64) {
        for page in 0..PAGES {
            let byte = content(page, round);
            assert_eq!(
                self.guest.ends(page),
                (byte, byte),
                "round {round}: page {page}, {:?}",
                self.ksm.explain(self.region, PageIndex(page))
            );
        }
    }

    fn count(&self, outcome: Outcome) -> u64 {
        let stats = self.ksm.region_stats(self.region).unwrap();
        stats.outcomes[outcome]
    }

    fn outcome(&self, page: u64) -> Outcome {
        let explained = self.ksm.explain(self.region, PageIndex(page));
        explained.unwrap().outcome
    }
}

fn all() -> PageRange {
    pages(0, PAGES)
}

/// A device that reads the contents of `round` into all pages. `pinned` is
/// called when pages are pinned and nothing is read yet, where there is such a
/// time.
type Device = fn(&World, round: u64, pinned: &dyn Fn());

/// Fixed buffers: pinned for long, here for some passes before they are used.
fn io_uring(world: &World, round: u64, pinned: &dyn Fn()) {
    let mut ring = Ring::new(&world.guest, all());
    pinned();
    for _ in 0..4 {
        ring.read(&world.file, round % CONTENTS);
    }
}

/// O_DIRECT: pinned for as long as a call takes.
fn o_direct(world: &World, round: u64, _: &dyn Fn()) {
    for piece in all().chunks(8) {
        let first = piece.start.0 + round % CONTENTS;
        for _ in 0..4 {
            world.file.read_into(first, &world.guest, piece);
        }
    }
}

const DEVICES: [(&str, Device, u64); 2] = [("io_uring", io_uring, 50), ("o_direct", o_direct, 100)];

/// Without guards: pages that were never merged, since each round begins with a
/// discard. The engine finds the pins itself.
#[test]
fn dma_to_pages_that_were_never_merged_arrives_without_guards() {
    for (name, device, rounds) in DEVICES {
        let world = World::new(StopMethod::Move, false);
        world.while_scanning(|| {
            for round in 0..rounds {
                world.ksm.discard(world.region, all()).unwrap();
                device(&world, round, &|| world.passes());
                world.holds(round);
                world.passes();
                world.holds(round);
            }
        });
        let (merged, pinned) = (world.count(Outcome::Merged), world.count(Outcome::Pinned));
        println!("{name}: {merged} merged, {pinned} found pinned");
        assert!(merged >= PAGES * rounds / 2, "{name}: {merged}");
        assert!(pinned > 0 || name == "o_direct");
    }
}

/// Without guards: copied pages, which are never merged again where DMA is not
/// declared guarded.
#[test]
fn dma_to_copied_pages_arrives_without_guards_where_none_are_promised() {
    for (name, device, rounds) in DEVICES {
        let world = World::new(StopMethod::Move, false);
        world.while_scanning(|| {
            for round in 0..rounds {
                device(&world, round, &|| world.passes());
                world.holds(round);
                world.passes();
                world.holds(round);
            }
        });
        let copied = world.ksm.region_stats(world.region).unwrap().pages_copied;
        println!("{name}: {copied} pages are copied");
        assert_eq!(copied, PAGES, "{name}: merged once, then left alone");
        assert_eq!(world.outcome(3), Outcome::CopiedUnguarded);
    }
}

/// With guards: copied pages, merged again and again between two guards. And
/// never-merged ones where not even their pins are noticed.
#[test]
fn dma_to_copied_pages_arrives_under_guards() {
    let runs = METHODS.map(|method| DEVICES.map(|device| (method, device)));
    for (method, (name, device, rounds)) in runs.into_iter().flatten() {
        let world = World::new(method, true);
        world.while_scanning(|| {
            for round in 0..rounds {
                let guard = world.ksm.pin(world.region, all()).unwrap();
                device(&world, round, &|| world.passes());
                world.passes();
                assert_eq!(world.outcome(7), Outcome::Pinned);
                world.holds(round);
                drop(guard);
                world.passes();
                world.holds(round);
                assert_eq!(world.outcome(7), Outcome::Merged, "{method:?} {name}");
            }
        });
        let (merged, pinned) = (world.count(Outcome::Merged), world.count(Outcome::Pinned));
        println!("{method:?} {name}: {merged} merged, {pinned} found pinned");
        assert!(merged >= PAGES * rounds && pinned >= PAGES * rounds);
    }
}

/// Whether what a device reads into a copied page arrives that was pinned before
/// a pass, with or without a guard. Nothing here depends on time.
fn arrives(guarded: bool) -> bool {
    let world = World::new(StopMethod::Move, true);
    let pass = || while world.ksm.scan(1 << 20).unwrap().passes == 0 {};
    for page in 0..PAGES {
        world.guest.fill(page, content(page, 0));
    }
    pass();
    assert_eq!(world.outcome(0), Outcome::Merged);
    let guard = guarded.then(|| world.ksm.pin(world.region, all()).unwrap());
    // Pinned for writing: copied now, and equal to the frames below.
    let mut ring = Ring::new(&world.guest, all());
    pass();
    pass();
    ring.read(&world.file, 1);
    let arrived = (0..PAGES).filter(|&page| world.guest.ends(page).0 == content(page, 1));
    let arrived = arrived.count() as u64;
    drop(guard);
    assert!(arrived == 0 || arrived == PAGES, "{arrived} pages");
    arrived == PAGES
}

/// What the guards are there for, and that these tests would see it: in a region
/// whose DMA is declared guarded, bytes that come without a guard are lost.
#[test]
fn the_guard_is_what_saves_the_bytes() {
    assert!(arrives(true));
    assert!(!arrives(false), "the tests above could not fail");
}

/// Memory that devices use is neither dropped nor given up.
#[test]
fn guarded_pages_are_not_discarded_and_their_region_stays() {
    let world = World::new(StopMethod::Move, true);
    let guard = world.ksm.pin(world.region, pages(4, 4)).unwrap();
    let refused = |done: Result<(), Error>| matches!(done, Err(Error::Pinned { .. }));
    assert!(refused(world.ksm.discard(world.region, pages(7, 4))));
    assert!(refused(world.ksm.unregister(world.region)));
    world.ksm.discard(world.region, pages(8, 4)).unwrap();
    drop(guard);
    world.ksm.discard(world.region, pages(7, 4)).unwrap();
    world.ksm.unregister(world.region).unwrap();
    let gone = world.ksm.pin(world.region, pages(4, 4));
    assert!(matches!(gone, Err(Error::NoRegion(_))));
}
