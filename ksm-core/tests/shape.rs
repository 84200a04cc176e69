//! Regions that are split, cloned, moved, taken over and dropped, on the simulated
//! backend.
#![allow(clippy::unwrap_used)]

mod world;

use ksm_core::backend::sim::{SimPageState, pattern};
use ksm_core::{Config, Error, PageIndex, RegionId, Target};
use world::{GUARDED, World, range};

/// Small windows, so that clones are made in several steps.
fn world() -> World {
    World::new(Config {
        window_pages: 1,
        ..Config::default()
    })
}

impl World {
    fn sharers(&self, region: RegionId, page: u64) -> Vec<(RegionId, u64)> {
        let sharers = self.ksm.sharers(region, PageIndex(page)).unwrap();
        let place = |sharer: &ksm_core::Sharer| (sharer.region, sharer.page.0);
        sharers.iter().map(place).collect()
    }
}

#[test]
fn the_middle_of_a_region_leaves() {
    let world = world();
    let [one, other] = [(); 2].map(|()| world.guest(30, 1));
    let [cut, whole] = [&one, &other].map(|guest| world.register(guest));
    world.passes(2);
    let left = world.ksm.unregister_part(cut, range(10, 20)).unwrap();
    world.ksm.check().unwrap();
    let [before, behind] = left[..] else {
        panic!("{left:?}")
    };
    let pages = |region| world.ksm.region_stats(region).unwrap().pages;
    assert_eq!((pages(before), pages(behind)), (10, 10));
    assert!(matches!(
        world.ksm.region_stats(cut),
        Err(Error::NoRegion(_))
    ));
    // What stays is still shared, found under its new name and number.
    assert_eq!(world.sharers(whole, 5), [(whole, 5), (before, 5)]);
    assert_eq!(world.sharers(whole, 25), [(whole, 25), (behind, 5)]);
    assert_eq!(world.sharers(whole, 15), [(whole, 15)]);
    for page in 0..30 {
        assert_eq!(one.read(PageIndex(page)), *pattern(1 + page));
        let plain = one.state(PageIndex(page)) == SimPageState::Private;
        assert_eq!(plain, (10..20).contains(&page));
    }
    // The end of it, and its beginning.
    let left = world.ksm.unregister_part(behind, range(4, 10)).unwrap();
    assert_eq!(left.len(), 1);
    let left = world.ksm.unregister_part(before, range(0, 10)).unwrap();
    assert_eq!(left, []);
    world.passes(2);
    assert_eq!(world.sharers(whole, 5), [(whole, 5)]);
}

#[test]
fn pin_guards_stay_where_they_are_when_a_region_is_split() {
    let world = world();
    let guest = world.guest(20, 1);
    let region = world.register(&guest);
    let pin = world.ksm.pin(region, range(8, 12)).unwrap();
    let [first, second] = world.ksm.split(region, PageIndex(10)).unwrap();
    let held = |region, pages| world.ksm.discard(region, pages);
    assert!(matches!(
        held(first, range(8, 9)),
        Err(Error::Pinned { .. })
    ));
    assert!(matches!(
        held(second, range(1, 2)),
        Err(Error::Pinned { .. })
    ));
    held(second, range(2, 10)).unwrap();
    assert!(matches!(
        world.ksm.unregister(second),
        Err(Error::Pinned { .. })
    ));
    drop(pin);
    world.ksm.unregister(second).unwrap();
    world.ksm.unregister(first).unwrap();
}

#[test]
fn clones_share_all_they_can_and_never_meet() {
    let world = world();
    let guest = world.guest(40, 1);
    let parent = world.register(&guest);
    // One page is in use by a device.
    let pin = world.ksm.pin(parent, range(7, 8)).unwrap();
    let domain = world.ksm.space_domain(world.space).unwrap();
    let clones = [(); 3].map(|()| {
        let space = world.ksm.create_space(domain).unwrap();
        let memory = world.sim.guest(40);
        let clone = world
            .ksm
            .fork_region(parent, space, memory.clone(), GUARDED);
        (clone.unwrap(), memory, space)
    });
    drop(pin);
    world.ksm.check().unwrap();
    let stats = world.ksm.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (39, 3 * 39));
    assert_eq!(clones[0].1.state(PageIndex(7)), SimPageState::Private);
    let all = [parent, clones[0].0, clones[1].0, clones[2].0];
    assert_eq!(world.sharers(clones[1].0, 3), all.map(|region| (region, 3)));

    guest.write(PageIndex(3), &pattern(900));
    clones[0].1.write(PageIndex(3), &pattern(901));
    world.passes(1);
    assert_eq!(
        world.sharers(clones[1].0, 3),
        [(clones[1].0, 3), (clones[2].0, 3)]
    );
    // The parent goes, and takes nothing with it.
    world.ksm.unregister(parent).unwrap();
    world.ksm.check().unwrap();
    assert_eq!(clones[1].1.read(PageIndex(3)), *pattern(4));
    assert_eq!(clones[0].1.read(PageIndex(3)), *pattern(901));
    for (_, memory, _) in &clones {
        for page in (0..40).filter(|&page| page != 3) {
            assert_eq!(memory.read(PageIndex(page)), *pattern(1 + page));
        }
    }
    // A clone goes content and all.
    world.ksm.drop_space(clones[2].2).unwrap();
    assert!(clones[2].1.read(PageIndex(5)).is_zero());
    world.passes(2);
    assert_eq!(world.sharers(clones[1].0, 3), [(clones[1].0, 3)]);
}

#[test]
fn a_clone_needs_memory_like_its_parents_and_the_same_domain() {
    let world = world();
    let parent = world.register(&world.guest(8, 1));
    let fork = |space, memory| {
        let clone = world.ksm.fork_region(parent, space, memory, GUARDED);
        clone.unwrap_err().to_string()
    };
    let short = fork(world.space, world.sim.guest(7));
    assert!(short.contains("must be as long"), "{short}");
    let full = fork(world.space, world.guest(8, 1));
    assert!(full.contains("hold no page"), "{full}");
    let other = world.ksm.create_domain().unwrap();
    let other = world.ksm.create_space(other).unwrap();
    let far = fork(other, world.sim.guest(8));
    assert!(far.contains("another trust domain"), "{far}");
    world.ksm.check().unwrap();
    assert_eq!(world.ksm.regions_of(world.space).unwrap(), [parent]);
}

/// The linear index stays right; and where COW is broken first, there is none to
/// be wrong.
#[test]
fn a_region_moves() {
    for unmerge_first in [false, true] {
        let world = world();
        let guests = [(); 2].map(|()| world.guest(16, 1));
        let [moving, other] = [&guests[0], &guests[1]].map(|guest| world.register(guest));
        world.passes(2);
        guests[0].write(PageIndex(9), &pattern(77));
        if unmerge_first {
            world.ksm.unmerge(Target::All).unwrap();
        }
        let place = world.sim.guest(16);
        let moved = world.ksm.move_region(moving, place.clone()).unwrap();
        world.ksm.check().unwrap();
        let shared: &[_] = if unmerge_first {
            &[]
        } else {
            &[(other, 4), (moved, 4)]
        };
        assert_eq!(world.sharers(moved, 4), shared);
        for page in (0..16).map(PageIndex) {
            let content = if page.0 == 9 { 77 } else { 1 + page.0 };
            assert_eq!(place.read(page), *pattern(content));
            assert!(guests[0].read(page).is_zero());
        }
        world.passes(3);
        assert_eq!(world.sharers(other, 4), [(other, 4), (moved, 4)]);
    }
}

/// A snapshot that two guests are restored from is in the store once, in long
/// runs, and a clone of it costs the mappings alone.
#[test]
fn what_is_taken_over_is_shared_at_once() {
    let world = world();
    let restored = [(); 2].map(|()| {
        let guest = world.guest(64, 1);
        // A hole of zeros in the middle.
        for page in 30..40 {
            guest.write(PageIndex(page), &pattern(0));
        }
        let region = world.ksm.take_over(world.space, guest.clone(), GUARDED);
        (region.unwrap(), guest)
    });
    world.ksm.check().unwrap();
    let stats = world.ksm.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (54, 54));
    let vmas = world.ksm.region_stats(restored[1].0).unwrap().vmas;
    assert_eq!(vmas, 2, "one run on each side of the hole");
    assert_eq!(restored[0].1.state(PageIndex(35)), SimPageState::Absent);
    let clone = world.sim.guest(64);
    let forked = world
        .ksm
        .fork_region(restored[0].0, world.space, clone.clone(), GUARDED);
    forked.unwrap();
    assert_eq!(world.ksm.store_bytes().unwrap(), 54 * 4096);
    assert_eq!(clone.read(PageIndex(50)), *pattern(51));
    assert!(clone.read(PageIndex(35)).is_zero());
}

/// Of several threads that are after one region each gets it or is told that it is
/// gone, and nothing is left behind by those who came too late.
#[test]
fn threads_are_after_the_same_region() {
    for round in 0..30 {
        let world = world();
        let guest = world.guest(24, 1);
        let region = world.register(&guest);
        world.passes(2);
        let start = std::sync::Barrier::new(4);
        let after = |call: &(dyn Fn() -> Result<(), Error> + Sync)| {
            start.wait();
            match call() {
                Ok(()) => true,
                Err(Error::NoRegion(_)) => false,
                Err(error) => panic!("{error}"),
            }
        };
        let place = world.sim.guest(24);
        let ksm = &world.ksm;
        let wins = std::thread::scope(|scope| {
            let threads = [
                scope.spawn(|| after(&|| ksm.split(region, PageIndex(5 + round % 9)).map(drop))),
                scope.spawn(|| after(&|| ksm.unregister(region))),
                scope.spawn(|| after(&|| ksm.move_region(region, place.clone()).map(drop))),
                scope.spawn(|| after(&|| ksm.discard(region, range(20, 24)))),
            ];
            threads.map(|thread| thread.join().unwrap())
        });
        let won = wins[..3].iter().filter(|won| **won).count();
        assert_eq!(won, 1, "{wins:?}");
        world.ksm.check().unwrap();
        let left = world.ksm.regions_of(world.space).unwrap();
        assert_eq!(
            left.len(),
            [2, 0, 1][wins.iter().position(|won| *won).unwrap()]
        );
        for region in left {
            // It lives: it can be pinned, and unregistered.
            drop(world.ksm.pin(region, range(0, 1)).unwrap());
            world.ksm.unregister(region).unwrap();
        }
        let holder = if wins[2] { &place } else { &guest };
        for page in (0..20).map(PageIndex) {
            assert_eq!(holder.read(page), *pattern(1 + page.0));
        }
        assert_eq!(world.ksm.store_bytes().unwrap(), 0);
    }
}
