//! Busy regions, by each policy. Passes are counted, never time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use crate::{Config, Ksm, LockPolicy, PageIndex, RegionId, RegionOptions, SpaceId};

const PAGES: u64 = 64;

struct World {
    sim: SimBackend,
    ksm: Ksm<SimBackend>,
    space: SpaceId,
    regions: Vec<RegionId>,
}

/// `regions` regions that all hold the same pages.
fn world(lock_policy: LockPolicy, regions: usize) -> World {
    let sim = SimBackend::new(SimConfig::default());
    let config = Config {
        lock_policy,
        window_pages: 16,
        ..Config::default()
    };
    let ksm = Ksm::new(sim.clone(), config).unwrap();
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    let mut world = World {
        sim,
        ksm,
        space,
        regions: Vec::new(),
    };
    for _ in 0..regions {
        let guest = world.guest();
        let region = world.register(guest);
        world.regions.push(region);
    }
    world
}

impl World {
    fn guest(&self) -> SimGuest {
        let guest = self.sim.guest(PAGES);
        for page in 0..PAGES {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
        guest
    }

    fn register(&self, guest: SimGuest) -> RegionId {
        let options = RegionOptions::default();
        self.ksm.register(self.space, guest, options).unwrap()
    }

    /// One pass, and how many times regions were put off or left alone in it.
    fn pass(&self) -> (u64, u64) {
        let (mut deferred, mut skipped) = (0, 0);
        loop {
            let report = self.ksm.scan(16).unwrap();
            deferred += report.regions_deferred;
            skipped += report.regions_skipped;
            if report.passes == 1 {
                return (deferred, skipped);
            }
        }
    }

    fn merged(&self, region: usize) -> u64 {
        let stats = self.ksm.region_stats(self.regions[region]).unwrap();
        stats.ksm_merging_pages
    }

    fn scanned(&self, region: usize) -> u64 {
        let region = self.ksm.layout.region(self.regions[region]).unwrap();
        let tally = region.tally();
        tally.pages_scanned
    }
}

/// The pass looks at everything else before it waits for the busy region, and
/// looks at that in the same pass.
#[test]
fn a_busy_region_is_put_off_and_looked_at_in_the_same_pass() {
    let world = world(LockPolicy::PerRegion, 3);
    let busy = world.ksm.layout.region(world.regions[0]).unwrap();
    let guard = busy.lock().unwrap();
    thread::scope(|scope| {
        let pass = scope.spawn(|| world.pass());
        while world.scanned(1) < PAGES || world.scanned(2) < PAGES {
            thread::yield_now();
        }
        assert_eq!(
            world.scanned(0),
            0,
            "nobody is in beside the lease's holder"
        );
        drop(guard);
        let (deferred, skipped) = pass.join().unwrap();
        assert_eq!((deferred, skipped), (1, 0));
    });
    assert_eq!(world.scanned(0), PAGES);
}

/// However much others are after a region, it is merged by the pass by which it
/// would be if it were left alone, and however much is scanned, each of them gets
/// the region: its lease is taken in turn.
#[test]
fn a_region_in_demand_starves_nobody_and_is_not_starved() {
    let world = world(LockPolicy::PerRegion, 3);
    let busy = world.ksm.layout.region(world.regions[0]).unwrap();
    let taken = [const { AtomicU64::new(0) }; 3];
    let stop = AtomicBool::new(false);
    let at_it = Barrier::new(4);
    thread::scope(|scope| {
        for taken in &taken {
            scope.spawn(|| {
                at_it.wait();
                while !stop.load(Ordering::Relaxed) {
                    let guard = busy.lock().unwrap();
                    thread::yield_now();
                    drop(guard);
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        at_it.wait();
        // The first pass learns, the second one merges, as in peace.
        world.pass();
        world.pass();
        let merged: Vec<_> = (0..3).map(|region| world.merged(region)).collect();
        let before = taken.each_ref().map(|taken| taken.load(Ordering::Relaxed));
        let went_on = |(taken, before): (&AtomicU64, u64)| taken.load(Ordering::Relaxed) > before;
        while !taken.iter().zip(before).all(went_on) {
            world.pass();
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(merged, [PAGES; 3]);
    });
    world.ksm.check().unwrap();
}

/// What the other two policies are there to show: one lock for the layout stalls
/// the pass, and merely trying it starves the regions.
#[test]
fn one_lock_stalls_the_pass_or_starves_the_regions() {
    let world_global = world(LockPolicy::Global, 2);
    let change = world_global.ksm.layout_turn().unwrap().unwrap();
    thread::scope(|scope| {
        let pass = scope.spawn(|| world_global.pass());
        for _ in 0..1000 {
            thread::yield_now();
        }
        assert!(!pass.is_finished() && world_global.scanned(0) == 0);
        drop(change);
        assert_eq!(pass.join().unwrap(), (0, 0));
    });

    let world = world(LockPolicy::TrySkip, 2);
    thread::scope(|scope| {
        let change = world.ksm.layout_turn().unwrap().unwrap();
        let passes = scope.spawn(|| (0..10).map(|_| world.pass().1).sum::<u64>());
        assert_eq!(passes.join().unwrap(), 20, "two regions, ten passes");
        assert_eq!(world.scanned(0) + world.scanned(1), 0);
        drop(change);
    });
    world.pass();
    world.pass();
    assert_eq!([world.merged(0), world.merged(1)], [PAGES; 2]);
}

/// A region that comes while a pass runs is looked at by that pass; when nothing
/// comes, there is no second traversal.
#[test]
fn what_comes_in_the_middle_is_seen_by_the_same_pass() {
    let world = world(LockPolicy::PerRegion, 2);
    let first = world.ksm.scan(16).unwrap();
    assert_eq!(first.passes, 0);
    let late = world.register(world.guest());
    let rest = world.ksm.scan(u64::MAX).unwrap();
    assert_eq!((rest.passes, rest.second_traversals), (1, 1));
    assert_eq!(first.pages_scanned + rest.pages_scanned, 3 * PAGES);
    assert_eq!(world.ksm.region_stats(late).unwrap().ksm_rmap_items, PAGES);
    let quiet = world.ksm.scan(u64::MAX).unwrap();
    assert_eq!((quiet.passes, quiet.second_traversals), (1, 0));
}

/// A layout that changes all the time does not keep a pass from ending.
#[test]
fn a_pass_ends_though_regions_come_all_the_time() {
    let world = world(LockPolicy::PerRegion, 1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let region = world.register(world.sim.guest(PAGES));
                world.ksm.unregister(region).unwrap();
            }
        });
        for _ in 0..20 {
            world.pass();
        }
        stop.store(true, Ordering::Relaxed);
    });
    world.ksm.check().unwrap();
}
