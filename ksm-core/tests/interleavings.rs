//! Calls that meet at the worst moment: each is a bug that was found by reading.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;
mod world;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ksm_core::backend::sim::{Call, Failure, pattern};
use ksm_core::fault::Step;
use ksm_core::{Config, FrameId, PageIndex, RegionId, RegionOptions};
use step_hooks::{Standing, vanishes_at};
use world::{GUARDED, World, range};

fn world() -> World {
    World::new(Config::default())
}

impl World {
    /// The regions of two guests that hold the same, merged.
    fn merged_pair(&self) -> [RegionId; 2] {
        let register = |()| self.register(&self.guest(8, 1));
        let regions = [(); 2].map(register);
        self.passes(2);
        regions
    }
}

/// No memory for frames, and none for the copies that would undo what was taken over.
#[test]
fn a_take_over_that_finds_no_memory_loses_nothing() {
    let world = world();
    let guest = world.guest(1100, 1);
    world.sim.fail_nth(Call::Fill, Failure::OutOfMemory, 1050);
    world
        .sim
        .fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    let done = world.ksm.take_over(world.space, guest.clone(), GUARDED);
    assert!(done.is_err());
    world.sim.no_failures();
    for page in (0..1100).map(PageIndex) {
        assert_eq!(guest.read(page), *pattern(1 + page.0), "{page}");
    }
}

/// What a device holds is copied to a clone, and is no write of the guest.
#[test]
fn a_fork_breaks_nothing_and_counts_nothing() {
    let world = world();
    let guest = world.guest(8, 1);
    for page in 0..4 {
        assert!(guest.pin(PageIndex(page)));
    }
    let (ksm, space, unguarded) = (&world.ksm, world.space, RegionOptions::default());
    let parent = ksm.register(space, guest, unguarded).unwrap();
    let clone = ksm.fork_region(parent, space, world.sim.guest(8), unguarded);
    clone.unwrap();
    assert_eq!(world.ksm.region_stats(parent).unwrap().cow_breaks, 0);
}

/// A region that is being taken away has pages stopped, too.
#[test]
fn quiesce_waits_for_a_region_that_leaves() {
    let world = world();
    let regions = world.merged_pair();
    let ksm = Arc::clone(&world.ksm);
    let leaving = Standing::at(Step::Stopped, 1, move || {
        ksm.unregister(regions[0]).unwrap()
    });
    leaving.is_there();
    let (ksm, sim) = (Arc::clone(&world.ksm), world.sim.clone());
    let (said, says) = mpsc::channel();
    let quiet = thread::spawn(move || {
        let quiesced = ksm.quiesce().unwrap();
        said.send(sim.busy()).unwrap();
        drop(quiesced);
    });
    let early = says.recv_timeout(Duration::from_millis(300));
    leaving.go();
    leaving.ends();
    quiet.join().unwrap();
    assert!(early.is_err(), "quiesced while {early:?}");
}

/// Whoever comes after ends what it had under way, and the region stands again.
#[test]
fn a_thread_that_vanishes_while_it_unregisters_leaves_nothing_stopped() {
    let world = world();
    let regions = world.merged_pair();
    let ksm = Arc::clone(&world.ksm);
    let dead = vanishes_at(Step::Stopped, 1, move || drop(ksm.unregister(regions[0])));
    let leases = world.ksm.recover(dead);
    assert!(
        world.sim.busy().is_idle(),
        "{leases} {:?}",
        world.sim.busy()
    );
}

/// What takes the place of a region while the engine is brought to a stop is held
/// as well.
#[test]
fn quiesce_holds_the_parts_of_what_is_split() {
    let world = world();
    let regions = world.merged_pair();
    // A place for a frame to go to.
    for region in regions {
        world.ksm.discard(region, range(0, 1)).unwrap();
    }
    let ksm = Arc::clone(&world.ksm);
    let moving = Standing::at(Step::Stopped, 1, move || {
        drop(ksm.move_frame(regions[0], PageIndex(7)));
    });
    moving.is_there();
    let ksm = Arc::clone(&world.ksm);
    let splitting = thread::spawn(move || ksm.split(regions[1], PageIndex(4)).unwrap());
    thread::sleep(Duration::from_millis(100));
    let (said, says) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ksm = Arc::clone(&world.ksm);
    let quiet = thread::spawn(move || {
        let quiesced = ksm.quiesce().unwrap();
        said.send(()).unwrap();
        ended.recv().unwrap();
        drop(quiesced);
    });
    thread::sleep(Duration::from_millis(100));
    moving.go();
    let parts = splitting.join().unwrap();
    says.recv().unwrap();
    let ksm = Arc::clone(&world.ksm);
    let (done, is_done) = mpsc::channel();
    let discarding = thread::spawn(move || {
        ksm.discard(parts[0], range(0, 4)).unwrap();
        done.send(()).unwrap();
    });
    let early = is_done.recv_timeout(Duration::from_millis(300));
    end.send(()).unwrap();
    quiet.join().unwrap();
    discarding.join().unwrap();
    moving.ends();
    assert!(
        early.is_err(),
        "a part was changed while the engine was held still"
    );
}

/// The parts of a region do not outlive its guest.
#[test]
fn a_space_is_dropped_while_its_region_is_split() {
    for round in 0..20 {
        let world = world();
        let guests = [world.guest(6000, 1), world.guest(6000, 1)];
        let region = world.register(&guests[0]);
        let other = world.ksm.space_domain(world.space).unwrap();
        let other = world.ksm.create_space(other).unwrap();
        world
            .ksm
            .register(other, guests[1].clone(), GUARDED)
            .unwrap();
        world.passes(2);
        let ksm = Arc::clone(&world.ksm);
        let splitting = thread::spawn(move || ksm.split(region, PageIndex(3000)));
        let mut left;
        loop {
            left = world.ksm.regions_of(world.space).unwrap().len();
            if left != 1 {
                break;
            }
        }
        if left == 0 {
            let unmerged = world.ksm.unmerge(ksm_core::Target::Space(world.space));
            let dropped = world.ksm.drop_space(world.space);
            let parts = splitting.join().unwrap().unwrap();
            let pages = world
                .ksm
                .region_stats(parts[0])
                .map(|stats| stats.ksm_merging_pages);
            panic!(
                "round {round}: unmerge of the space {unmerged:?}, drop_space {dropped:?}, \
                    the first part: {pages:?} merged, page 0 zero: {}",
                guests[0].read(PageIndex(0)).is_zero()
            );
        }
        splitting.join().unwrap().unwrap();
    }
}

/// What was planned for a clone goes with the thread that planned it.
#[test]
fn frames_of_a_clone_whose_maker_vanished_are_given_back() {
    let world = world();
    let guest = world.guest(100, 1);
    let parent = world.register(&guest);
    let clone = world.sim.guest(100);
    let (ksm, space) = (Arc::clone(&world.ksm), world.space);
    let dead = vanishes_at(Step::Planned, 1, move || {
        drop(ksm.fork_region(parent, space, clone, GUARDED));
    });
    assert_eq!(world.ksm.recover(dead), 1);
    for page in 0..100 {
        guest.write(PageIndex(page), &pattern(500 + page));
    }
    world.passes(3);
    assert_eq!(world.ksm.stats().pages_shared, 0);
    assert_eq!(world.ksm.store_bytes().unwrap(), 0);
}

/// One item stands for the pages of all clones, on the new frame as on the old.
#[test]
fn a_frame_moves_with_all_its_clones() {
    let world = World::new(Config {
        max_page_sharing: 4,
        ..Config::default()
    });
    let parent = world.register(&world.guest(2, 6));
    let World { sim, ksm, space } = world;
    let mut clones = vec![parent];
    for _ in 0..8 {
        let clone = ksm.fork_region(parent, space, sim.guest(2), GUARDED);
        clones.push(clone.unwrap());
    }
    for &clone in &clones {
        ksm.discard(clone, range(0, 1)).unwrap();
    }
    assert_eq!(ksm.sharers(parent, PageIndex(1)).unwrap().len(), 9);
    let moved = ksm.move_frame(parent, PageIndex(1)).unwrap().unwrap();
    assert_eq!((moved.to, moved.moved), (FrameId(0), 9));
    assert_eq!(ksm.stats().pages_shared + ksm.stats().pages_sharing, 9);
    ksm.check().unwrap();
}

/// Two large guests that share all they have, while a thread splits the first.
struct Splitting {
    world: World,
    regions: [RegionId; 2],
    thread: thread::JoinHandle<Result<[RegionId; 2], ksm_core::Error>>,
}

fn beside_a_split() -> Splitting {
    let world = world();
    let guests = [world.guest(6000, 1), world.guest(6000, 1)];
    let regions = guests.each_ref().map(|guest| world.register(guest));
    world.passes(2);
    let ksm = Arc::clone(&world.ksm);
    let thread = thread::spawn(move || ksm.split(regions[0], PageIndex(3000)));
    while world.ksm.regions_of(world.space).unwrap().len() == 2 {}
    Splitting {
        world,
        regions,
        thread,
    }
}

/// Everything means what a region is split into meanwhile as well.
#[test]
fn unmerge_all_beside_a_split() {
    let Splitting {
        world,
        thread: splitting,
        ..
    } = beside_a_split();
    let unmerged = world.ksm.unmerge(ksm_core::Target::All);
    splitting.join().unwrap().unwrap();
    let stats = world.ksm.stats();
    assert_eq!(stats.pages_shared, 0, "unmerge said {unmerged:?}");
}

/// A shared frame's sharers are found while one of their regions is split.
#[test]
fn unshare_frame_beside_a_split() {
    let Splitting {
        world,
        regions,
        thread: splitting,
    } = beside_a_split();
    let sharers = world.ksm.sharers(regions[1], PageIndex(5)).unwrap().len();
    let done = world.ksm.unshare_frame(regions[1], PageIndex(5));
    splitting.join().unwrap().unwrap();
    assert!(done.is_ok(), "{sharers} sharers; {done:?}");
}

/// A guest that is no more gets no memory.
#[test]
fn no_clone_comes_to_a_space_that_was_dropped() {
    let world = world();
    let guest = world.guest(8, 1);
    let parent = world.register(&guest);
    let domain = world.ksm.space_domain(world.space).unwrap();
    let other = world.ksm.create_space(domain).unwrap();
    let clone = world.sim.guest(8);
    let (ksm, source) = (Arc::clone(&world.ksm), clone.clone());
    let forking = Standing::at(Step::Planned, 1, move || {
        println!(
            "fork: {:?}",
            ksm.fork_region(parent, other, source, GUARDED)
        );
    });
    forking.is_there();
    world.ksm.drop_space(other).unwrap();
    forking.go();
    forking.ends();
    assert!(world.ksm.spaces().iter().all(|space| space.0 != other));
    for sharer in world.ksm.sharers(parent, PageIndex(0)).unwrap() {
        assert_ne!(sharer.space, other, "a region of a space that is no more");
    }
}

/// The region is there again, and can be taken away.
#[test]
fn an_unregister_whose_thread_vanished_can_be_repeated() {
    let world = world();
    let regions = world.merged_pair();
    let ksm = Arc::clone(&world.ksm);
    let dead = vanishes_at(Step::Lifted, 1, move || drop(ksm.unregister(regions[0])));
    world.ksm.recover(dead);
    let done = world.ksm.unregister(regions[0]);
    assert!(done.is_ok(), "{done:?}");
}
