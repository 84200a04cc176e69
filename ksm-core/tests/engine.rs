//! The engine's calls, one by one, on the simulated backend.
#![allow(clippy::unwrap_used)]

mod world;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::page::{PageIndex, PageRange};
use ksm_core::{Config, Error, Ksm, Outcome, RegionId, SpaceId, Target};
use world::{GUARDED, fill, is_sane};

/// An engine with two guests of `pages` pages in one domain.
struct World {
    sim: SimBackend,
    ksm: Ksm<SimBackend>,
    guests: [SimGuest; 2],
    spaces: [SpaceId; 2],
    regions: [RegionId; 2],
}

fn world(pages: u64) -> World {
    world_with(pages, Config::default())
}

fn world_with(pages: u64, config: Config) -> World {
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Ksm::new(sim.clone(), config).unwrap();
    let domain = ksm.create_domain().unwrap();
    let guests = [sim.guest(pages), sim.guest(pages)];
    let spaces = [0, 1].map(|_| ksm.create_space(domain).unwrap());
    let regions = [0, 1].map(|i| {
        let guest = guests[i].clone();
        ksm.register(spaces[i], guest, GUARDED).unwrap()
    });
    World {
        sim,
        ksm,
        guests,
        spaces,
        regions,
    }
}

impl World {
    /// Page `n` of either guest holds content `1 + n`.
    fn fill(&self) {
        for guest in &self.guests {
            fill(guest, |page| 1 + page);
        }
    }

    fn passes(&self, count: u64) {
        world::passes(&self.ksm, count);
    }

    fn shared(&self) -> (u64, u64) {
        let stats = self.ksm.stats();
        (stats.pages_shared, stats.pages_sharing)
    }

    fn outcome(&self, guest: usize, page: u64) -> Outcome {
        let page = PageIndex(page);
        self.ksm.explain(self.regions[guest], page).unwrap().outcome
    }
}

#[test]
fn equal_pages_are_merged_in_the_second_pass() {
    let world = world(64);
    world.fill();
    world.passes(1);
    assert_eq!(world.shared(), (0, 0));
    assert_eq!(world.ksm.stats().pages_volatile, 128);
    world.passes(1);
    assert_eq!(world.shared(), (64, 64));
    assert_eq!(world.guests[1].read(PageIndex(9)), *pattern(10));
    let page = world.ksm.explain(world.regions[0], PageIndex(9)).unwrap();
    assert_eq!(
        (page.outcome, page.sharers, page.copied),
        (Outcome::Merged, 2, false)
    );
}

#[test]
fn a_written_page_is_noticed_and_merged_again() {
    let world = world(8);
    world.fill();
    world.passes(2);
    world.guests[0].write(PageIndex(3), &pattern(99));
    world.passes(1);
    assert_eq!(world.shared(), (8, 7));
    assert_eq!(world.ksm.stats().cow_breaks, 1);
    assert_eq!(world.outcome(0, 3), Outcome::Volatile);
    world.passes(1);
    assert_eq!(world.outcome(0, 3), Outcome::Unique);
    assert_eq!(world.ksm.stats().pages_unshared, 1);
    world.guests[0].write(PageIndex(3), &pattern(4));
    world.passes(1);
    assert_eq!(world.shared(), (8, 8));
    assert_eq!(
        world
            .ksm
            .region_stats(world.regions[0])
            .unwrap()
            .pages_copied,
        0
    );
}

#[test]
fn a_frame_that_nobody_maps_gives_its_memory_back() {
    let world = world(8);
    world.fill();
    world.passes(2);
    let full = world.ksm.store_bytes().unwrap();
    for guest in &world.guests {
        guest.write(PageIndex(3), &pattern(99));
    }
    world.passes(1);
    assert_eq!(world.ksm.store_bytes().unwrap(), full - 4096);
    assert_eq!(world.ksm.stats().frames_lingering, 1);
    world.passes(1);
    assert_eq!(world.shared(), (8, 8));
    assert_eq!(world.ksm.stats().frames_lingering, 0);
}

#[test]
fn zero_pages_cost_no_frame() {
    let world = world(8);
    for guest in &world.guests {
        for page in 0..8 {
            guest.write(PageIndex(page), &pattern(7));
            guest.write(PageIndex(page), &ksm_core::page::PageBuf::zeroed());
        }
    }
    world.passes(2);
    let stats = world.ksm.stats();
    assert_eq!((stats.ksm_zero_pages, stats.pages_shared), (16, 0));
    assert_eq!(world.ksm.store_bytes().unwrap(), 0);
    world.guests[0].write(PageIndex(0), &pattern(1));
    world.passes(1);
    assert_eq!(world.ksm.stats().ksm_zero_pages, 15);
}

#[test]
fn mappings_are_spent_on_long_runs_first() {
    // Scarce beside 2 x 256 pages: a run of 40 and single pages.
    let world = world_with(
        256,
        Config {
            max_vmas: Some(10),
            ..Config::default()
        },
    );
    for guest in &world.guests {
        for page in (0..40).chain([60, 80, 100, 120]) {
            guest.write(PageIndex(page), &pattern(1 + page));
        }
    }
    world.passes(2);
    assert_eq!(world.shared(), (40, 40));
    assert_eq!(world.outcome(0, 60), Outcome::VmaBudget);
    world.passes(8);
    let stats = world.ksm.stats();
    assert_eq!((stats.pages_sharing, stats.vmas), (42, 10));
    assert!(stats.vmas <= world.sim.vmas());
    let left_out = [60, 80, 100, 120].map(|page| world.outcome(0, page));
    let held_back = left_out.iter().filter(|is| **is == Outcome::VmaBudget);
    assert_eq!(held_back.count(), 2, "{left_out:?}");
}

#[test]
fn nothing_merges_across_domains() {
    let world = world(8);
    let other = world.ksm.create_domain().unwrap();
    let space = world.ksm.create_space(other).unwrap();
    let guest = world.sim.guest(8);
    world.ksm.register(space, guest.clone(), GUARDED).unwrap();
    world.fill();
    fill(&guest, |page| 1 + page);
    world.passes(3);
    assert_eq!(world.shared(), (8, 8));
    assert_eq!(world.ksm.domain_stats(other).unwrap().pages_unshared, 8);
}

#[test]
fn unmerge_gives_every_page_a_copy() {
    let world = world(32);
    world.fill();
    world.passes(2);
    let range = PageRange::new(PageIndex(4), 8);
    let some = Target::Pages(world.regions[0], range);
    assert_eq!(world.ksm.unmerge(some).unwrap(), 8);
    assert_eq!(world.shared(), (32, 24));
    assert_eq!(
        world.ksm.unmerge(Target::Space(world.spaces[1])).unwrap(),
        32
    );
    assert_eq!(world.ksm.unmerge(Target::All).unwrap(), 24);
    assert_eq!(world.shared(), (0, 0));
    assert_eq!(world.ksm.store_bytes().unwrap(), 0);
    is_sane(&world.ksm, "unmerged");
    assert_eq!(world.guests[0].read(PageIndex(31)), *pattern(32));
}

#[test]
fn unregister_leaves_plain_memory_and_no_frame_behind() {
    let world = world(32);
    world.fill();
    world.passes(2);
    for region in world.regions {
        world.ksm.unregister(region).unwrap();
    }
    let stats = world.ksm.stats();
    assert_eq!((stats.pages_shared, stats.frames_lingering), (0, 0));
    is_sane(&world.ksm, "unregistered");
    for guest in &world.guests {
        assert_eq!(guest.read(PageIndex(5)), *pattern(6));
    }
    let gone = world.ksm.region_stats(world.regions[0]).unwrap_err();
    assert!(matches!(gone, Error::NoRegion(_)));
}

#[test]
fn discarded_pages_read_as_zero_and_are_forgotten() {
    let world = world(32);
    world.fill();
    world.passes(2);
    world.guests[0].write(PageIndex(5), &pattern(77));
    let range = PageRange::new(PageIndex(4), 4);
    world.ksm.discard(world.regions[0], range).unwrap();
    is_sane(&world.ksm, "discarded");
    assert_eq!(world.shared(), (32, 28));
    for page in range.iter() {
        assert!(world.guests[0].read(page).is_zero());
        assert_eq!(world.guests[1].read(page), *pattern(1 + page.0));
    }
    let past = PageRange::new(PageIndex(30), 4);
    let error = world.ksm.discard(world.regions[0], past).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { pages: 32, .. }));
}

#[test]
fn a_quiesced_engine_stands_still() {
    let world = world(8);
    world.fill();
    world.passes(1);
    let quiesced = world.ksm.quiesce().unwrap();
    assert!(matches!(world.ksm.scan(100), Err(Error::Quiesced)));
    let unmerge = world.ksm.unmerge(Target::All);
    assert!(matches!(unmerge, Err(Error::Quiesced)));
    let first = PageRange::one(PageIndex(0));
    let discard = world.ksm.discard(world.regions[0], first);
    assert!(matches!(discard, Err(Error::Quiesced)));
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| world.ksm.scan(100)).join());
    assert!(elsewhere.unwrap().unwrap().busy);
    drop(quiesced);
    world.passes(2);
    assert_eq!(world.shared(), (8, 8));
}

/// Whoever reads counters for a time series takes one that falls for a restart.
#[test]
fn no_counter_falls_while_regions_come_and_go() {
    const ROUNDS: u64 = 200;
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Ksm::new(sim.clone(), Config::default()).unwrap();
    let domain = ksm.create_domain().unwrap();
    let space = ksm.create_space(domain).unwrap();
    let guest = sim.guest(64);
    fill(&guest, |page| page / 2);
    let counters = || {
        let (all, mine) = (
            ksm.domain_stats(domain).unwrap(),
            ksm.space_stats(space).unwrap(),
        );
        let outcomes = all.outcomes.iter().chain(mine.outcomes.iter());
        let outcomes = outcomes.map(|(_, count)| count);
        let others = [
            all.pages_scanned,
            all.cow_breaks,
            mine.cow_breaks,
            mine.lease_waits,
        ];
        outcomes.chain(others).collect::<Vec<_>>()
    };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let region = ksm.register(space, guest.clone(), GUARDED).unwrap();
                for _ in 0..3 {
                    ksm.scan(u64::MAX).unwrap();
                }
                ksm.unregister(region).unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut before = counters();
        while !done.load(Ordering::Relaxed) {
            let now = counters();
            for (at, (was, is)) in before.iter().zip(&now).enumerate() {
                assert!(is >= was, "counter {at} fell from {was} to {is}");
            }
            before = now;
        }
    });
    let scanned = ksm.domain_stats(domain).unwrap().pages_scanned;
    assert!(scanned >= ROUNDS * 62, "{scanned}");
}
