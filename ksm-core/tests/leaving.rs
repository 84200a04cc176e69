//! Calls that meet a region while another thread takes it away: it is in no list of
//! regions then, and its pages may be stopped and shared all the same.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;

use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ksm_core::backend::sim::{Call, Failure, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::Step;
use ksm_core::{Config, Error, Ksm, PageIndex, RegionId, RegionOptions, SpaceId, Target};
use step_hooks::{stands_at, vanishes_at};

const PAGES: u64 = 8;
const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

/// How long a thread is given to show that it does not wait.
const SOON: Duration = Duration::from_millis(100);

/// Two guests that hold the same.
struct World {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    spaces: [SpaceId; 2],
    guests: [SimGuest; 2],
    regions: [RegionId; 2],
}

fn world() -> World {
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
    let domain = ksm.create_domain().unwrap();
    let spaces = [(); 2].map(|()| ksm.create_space(domain).unwrap());
    let guests = [(); 2].map(|()| {
        let guest = sim.guest(PAGES);
        for page in 0..PAGES {
            guest.write(PageIndex(page), &pattern(1 + page));
        }
        guest
    });
    let regions =
        [0, 1].map(|n: usize| ksm.register(spaces[n], guests[n].clone(), GUARDED).unwrap());
    World {
        sim,
        ksm,
        spaces,
        guests,
        regions,
    }
}

impl World {
    fn scan(&self) {
        self.ksm.scan(u64::MAX).unwrap();
    }

    /// A thread that takes the first region away, once that is in no list any more.
    fn leaves(&self) -> JoinHandle<Result<(), Error>> {
        let (ksm, region) = (Arc::clone(&self.ksm), self.regions[0]);
        let leaving = thread::spawn(move || ksm.unregister(region));
        while !self.ksm.regions_of(self.spaces[0]).unwrap().is_empty() {
            thread::yield_now();
        }
        leaving
    }
}

/// A call in another thread, and what it says.
fn apart<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (said, says) = mpsc::channel();
    thread::spawn(move || said.send(call()));
    says
}

/// What becomes of `call` in another thread, if that does not wait for ever.
fn said<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    apart(call).recv_timeout(100 * SOON).ok()
}

/// Whoever takes it away waits for the lease of a thread that is gone, and so does a
/// vCPU for its pages.
#[test]
fn a_region_that_leaves_is_recovered_from_who_was_in_it() {
    for step in [Step::Stopped, Step::Mapped, Step::Lifted] {
        let world = world();
        world.scan();
        let ksm = Arc::clone(&world.ksm);
        let dead = vanishes_at(step, 1, move || drop(ksm.scan(u64::MAX)));
        let leaving = world.leaves();
        assert!(world.ksm.recover(dead) >= 2, "{step:?}");
        assert!(
            world.sim.busy().is_idle(),
            "{step:?}: {:?}",
            world.sim.busy()
        );
        let left = said(|| leaving.join().unwrap());
        left.expect("it waits for who is gone").unwrap();
        world.ksm.check().unwrap();
        for page in (0..PAGES).map(PageIndex) {
            assert_eq!(world.guests[0].try_read(page), Some(*pattern(1 + page.0)));
        }
    }
}

/// It shares its pages until it is gone, and is its guest's if it cannot go.
#[test]
fn a_guest_is_dropped_while_its_region_cannot_leave() {
    let world = world();
    world.scan();
    let ksm = Arc::clone(&world.ksm);
    let (go, scanning) = stands_at(Step::Stopped, move || drop(ksm.scan(u64::MAX)));
    let leaving = world.leaves();
    let (ksm, space) = (Arc::clone(&world.ksm), world.spaces[0]);
    let dropped = apart(move || ksm.drop_space(space));
    let early = dropped.recv_timeout(SOON);
    assert!(early.is_err(), "its region was leaving: {early:?}");
    // The copies that it needs to leave.
    world
        .sim
        .fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    go.send(()).unwrap();
    scanning.join().unwrap();
    let left = leaving.join().unwrap();
    assert!(matches!(left, Err(Error::StillShared { .. })), "{left:?}");
    dropped.recv().unwrap().unwrap();
    world.sim.no_failures();
    assert!(world.ksm.spaces().iter().all(|&(known, _)| known != space));
    for page in (0..PAGES).map(PageIndex) {
        assert!(world.guests[0].read(page).is_zero());
    }
    world.ksm.check().unwrap();
    let domain = world.ksm.space_domain(world.spaces[1]).unwrap();
    world.ksm.remove_space(world.spaces[1]).unwrap();
    world.ksm.remove_domain(domain).unwrap();
}

/// Nothing is shared where unmerge says so.
#[test]
fn unmerge_reaches_a_region_that_leaves() {
    for whole in [false, true] {
        let world = world();
        world.scan();
        let ksm = Arc::clone(&world.ksm);
        let (go, scanning) = stands_at(Step::Stopped, move || drop(ksm.scan(u64::MAX)));
        let leaving = world.leaves();
        let target = match whole {
            true => Target::All,
            false => Target::Space(world.spaces[0]),
        };
        let ksm = Arc::clone(&world.ksm);
        let unmerged = apart(move || ksm.unmerge(target));
        let early = unmerged.recv_timeout(SOON);
        assert!(early.is_err(), "{target:?} was leaving: {early:?}");
        go.send(()).unwrap();
        scanning.join().unwrap();
        leaving.join().unwrap().unwrap();
        unmerged.recv().unwrap().unwrap();
        world.ksm.check().unwrap();
    }
}

/// Nor does the thread wait for itself that keeps it from leaving.
#[test]
fn who_holds_the_engine_still_drops_no_guest_whose_region_leaves() {
    let world = world();
    let quiesced = world.ksm.quiesce().unwrap();
    let leaving = world.leaves();
    let space = world.spaces[0];
    for refused in [
        world.ksm.drop_space(space),
        world.ksm.remove_space(space),
        world.ksm.unmerge(Target::Space(space)).map(drop),
        world.ksm.unmerge(Target::All).map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Quiesced)), "{refused:?}");
    }
    drop(quiesced);
    leaving.join().unwrap().unwrap();
    world.ksm.drop_space(space).unwrap();
}
