//! Nothing goes on while the engine is held still, whatever was under way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::backend::sim::{Call, Failure, SimBackend, SimConfig, SimGuest, SimPageState, pattern};
use crate::{Config, Error, Ksm, LockPolicy, PageIndex, RegionId, RegionOptions, SpaceId};

const PAGES: u64 = 32;
const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

struct World {
    sim: SimBackend,
    ksm: Ksm<SimBackend>,
    space: SpaceId,
}

fn world(lock_policy: LockPolicy) -> World {
    let sim = SimBackend::new(SimConfig::default());
    let config = Config {
        lock_policy,
        window_pages: 1,
        ..Config::default()
    };
    let ksm = Ksm::new(sim.clone(), config).unwrap();
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    World { sim, ksm, space }
}

impl World {
    fn guest(&self) -> SimGuest {
        let guest = self.sim.guest(PAGES);
        for page in 0..PAGES {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
        guest
    }

    fn register(&self) -> RegionId {
        let guest = self.guest();
        self.ksm.register(self.space, guest, GUARDED).unwrap()
    }

    /// Holds the engine still for a moment, and looks whether all is held that is
    /// there then.
    fn hold_still(&self) {
        let quiesced = self.ksm.quiesce().unwrap();
        for _ in 0..4 {
            assert!(self.sim.busy().is_idle(), "{:?}", self.sim.busy());
            for region in self.ksm.layout.regions().iter() {
                assert!(region.is_busy(), "{} is not held", region.id);
            }
            thread::yield_now();
        }
        drop(quiesced);
    }

    /// Holds it still again and again while others do `others` again and again.
    fn hold_still_beside(&self, times: u64, others: &[&(dyn Fn() + Sync)]) {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for other in others {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        other();
                    }
                });
            }
            let _stop = StopOnDrop(&stop);
            for _ in 0..times {
                self.hold_still();
                thread::yield_now();
            }
        });
    }
}

/// So that a test that fails ends.
struct StopOnDrop<'s>(&'s AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn regions_come_when_it_goes_on() {
    for policy in [LockPolicy::PerRegion, LockPolicy::Global] {
        let world = world(policy);
        let parent = world.register();
        let quiesced = world.ksm.quiesce().unwrap();
        let known = || world.ksm.regions_of(world.space).unwrap().len();
        thread::scope(|scope| {
            let registering = scope.spawn(|| world.register());
            let restored = world.guest();
            let taking_over =
                scope.spawn(|| world.ksm.take_over(world.space, restored, GUARDED).unwrap());
            let clone = world.sim.guest(PAGES);
            let forking = scope.spawn(|| {
                let done = world.ksm.fork_region(parent, world.space, clone, GUARDED);
                done.unwrap()
            });
            thread::sleep(std::time::Duration::from_millis(100));
            assert_eq!(known(), 1, "a region came");
            drop(quiesced);
            for thread in [registering, taking_over, forking] {
                thread.join().unwrap();
            }
        });
        assert_eq!(known(), 4);
        world.ksm.check().unwrap();
    }
}

/// By whoever holds it still; and what was to be registered is as it was.
#[test]
fn nothing_is_registered_by_the_thread_that_holds_it() {
    let world = world(LockPolicy::PerRegion);
    let parent = world.register();
    let quiesced = world.ksm.quiesce().unwrap();
    let (guest, clone) = (world.guest(), world.sim.guest(PAGES));
    let refused = [
        world.ksm.register(world.space, guest.clone(), GUARDED),
        world.ksm.take_over(world.space, guest.clone(), GUARDED),
        world.ksm.fork_region(parent, world.space, clone, GUARDED),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(Error::Quiesced)), "{refused:?}");
    }
    for page in (0..PAGES).map(PageIndex) {
        assert_eq!(guest.state(page), SimPageState::Private);
    }
    drop(quiesced);
    world.ksm.take_over(world.space, guest, GUARDED).unwrap();
    world.ksm.check().unwrap();
}

/// Clones come under their parents' leases, which are waited for.
#[test]
fn it_is_held_beside_regions_that_come_and_change_their_shape() {
    for policy in [LockPolicy::PerRegion, LockPolicy::Global] {
        let world = world(policy);
        let parent = world.register();
        let fork = || {
            let clone = world.sim.guest(PAGES);
            let clone = world.ksm.fork_region(parent, world.space, clone, GUARDED);
            world.ksm.unregister(clone.unwrap()).unwrap();
        };
        let split = || {
            let region = world.register();
            let parts = world.ksm.split(region, PageIndex(7)).unwrap();
            for part in parts {
                world.ksm.unregister(part).unwrap();
            }
        };
        let scan = || {
            world.ksm.scan(64).unwrap();
        };
        world.hold_still_beside(100, &[&fork, &fork, &split, &scan]);
        world.ksm.check().unwrap();
    }
}

/// A region that cannot go, and is put back.
#[test]
fn it_is_held_beside_a_region_that_comes_back() {
    let world = world(LockPolicy::PerRegion);
    let regions = [world.register(), world.register()];
    for _ in 0..2 {
        world.ksm.scan(u64::MAX).unwrap();
    }
    world
        .sim
        .fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    let come_back = || {
        let left = world.ksm.unregister(regions[0]);
        assert!(matches!(left, Err(Error::StillShared { .. })), "{left:?}");
    };
    world.hold_still_beside(1000, &[&come_back]);
    world.sim.no_failures();
    world.ksm.unregister(regions[0]).unwrap();
    world.ksm.check().unwrap();
}
