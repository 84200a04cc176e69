//! Calls that meet a region while another thread takes it away: it is in no list of
//! regions then, and its pages may be stopped and shared all the same.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;
mod world;

use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ksm_core::backend::sim::{Call, Failure, SimGuest, pattern};
use ksm_core::fault::Step;
use ksm_core::{Config, Error, RegionId, SpaceId, Target};
use step_hooks::{Standing, vanishes_at};
use world::{GUARDED, World, is_sane, range, reads};

const PAGES: u64 = 8;

/// How long a thread is given to show that it does not wait.
const SOON: Duration = Duration::from_millis(100);

/// Two guests that hold the same, the first one in the space of its world.
struct Pair {
    world: World,
    guests: [SimGuest; 2],
    regions: [RegionId; 2],
    other: SpaceId,
}

fn pair() -> Pair {
    let world = World::new(Config::default());
    let guests = [(); 2].map(|()| world.guest(PAGES, 1));
    let domain = world.ksm.space_domain(world.space).unwrap();
    let other = world.ksm.create_space(domain).unwrap();
    let register = |space, guest: &SimGuest| world.ksm.register(space, guest.clone(), GUARDED);
    let regions = [(world.space, &guests[0]), (other, &guests[1])];
    let regions = regions.map(|(space, guest)| register(space, guest).unwrap());
    Pair {
        world,
        guests,
        regions,
        other,
    }
}

impl Pair {
    /// A thread that stands where it has the first region's pages stopped.
    fn is_merged(&self) -> Standing {
        self.world.passes(1);
        let ksm = Arc::clone(&self.world.ksm);
        let merging = Standing::at(Step::Stopped, 1, move || drop(ksm.scan(u64::MAX)));
        merging.is_there();
        merging
    }

    /// A thread that takes the first region away, once that is in no list any more.
    fn leaves(&self) -> JoinHandle<Result<(), Error>> {
        let (ksm, region) = (Arc::clone(&self.world.ksm), self.regions[0]);
        let leaving = thread::spawn(move || ksm.unregister(region));
        while !self.lists_none() {
            thread::yield_now();
        }
        leaving
    }

    fn lists_none(&self) -> bool {
        let listed = self.world.ksm.regions_of(self.world.space);
        listed.unwrap().is_empty()
    }
}

/// A call in another thread, and what it says.
fn apart<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (said, says) = mpsc::channel();
    thread::spawn(move || said.send(call()));
    says
}

/// Whoever takes it away waits for the lease of a thread that is gone, and so does a
/// vCPU for its pages.
#[test]
fn a_region_that_leaves_is_recovered_from_who_was_in_it() {
    for step in [Step::Stopped, Step::Mapped, Step::Lifted] {
        let pair = pair();
        let ksm = &pair.world.ksm;
        pair.world.passes(1);
        let scanner = Arc::clone(ksm);
        let dead = vanishes_at(step, 1, move || drop(scanner.scan(u64::MAX)));
        let leaving = pair.leaves();
        assert!(ksm.recover(dead) >= 2, "{step:?}");
        let left = apart(|| leaving.join().unwrap());
        let left = left.recv_timeout(100 * SOON);
        left.expect("it waits for who is gone").unwrap();
        let when = format!("gone at {step:?}");
        is_sane(ksm, &when);
        reads(&pair.guests[0], |page| pattern(1 + page), &when);
    }
}

/// It shares its pages until it is gone, and is its guest's if it cannot go.
#[test]
fn a_guest_is_dropped_while_its_region_cannot_leave() {
    let pair = pair();
    let World { sim, ksm, space } = &pair.world;
    let merging = pair.is_merged();
    let leaving = pair.leaves();
    let (dropper, space) = (Arc::clone(ksm), *space);
    let dropped = apart(move || dropper.drop_space(space));
    let early = dropped.recv_timeout(SOON);
    assert!(early.is_err(), "its region was leaving: {early:?}");
    // The copies that it needs to leave.
    sim.fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    merging.go();
    merging.ends();
    let left = leaving.join().unwrap();
    assert!(matches!(left, Err(Error::StillShared { .. })), "{left:?}");
    dropped.recv().unwrap().unwrap();
    sim.no_failures();
    assert!(ksm.spaces().iter().all(|&(known, _)| known != space));
    assert!(
        range(0, PAGES)
            .iter()
            .all(|page| pair.guests[0].read(page).is_zero())
    );
    is_sane(ksm, "dropped");
    let domain = ksm.space_domain(pair.other).unwrap();
    ksm.remove_space(pair.other).unwrap();
    ksm.remove_domain(domain).unwrap();
}

/// Nothing is shared where unmerge says so.
#[test]
fn unmerge_reaches_a_region_that_leaves() {
    for everything in [false, true] {
        let pair = pair();
        let ksm = &pair.world.ksm;
        let merging = pair.is_merged();
        let leaving = pair.leaves();
        let target = match everything {
            true => Target::All,
            false => Target::Space(pair.world.space),
        };
        let unmerger = Arc::clone(ksm);
        let unmerged = apart(move || unmerger.unmerge(target));
        let early = unmerged.recv_timeout(SOON);
        assert!(early.is_err(), "{target:?} was leaving: {early:?}");
        merging.go();
        merging.ends();
        leaving.join().unwrap().unwrap();
        unmerged.recv().unwrap().unwrap();
        is_sane(ksm, "unmerged");
    }
}

/// Nor does the thread wait for itself that keeps it from leaving.
#[test]
fn who_holds_the_engine_still_drops_no_guest_whose_region_leaves() {
    let pair = pair();
    let World { ksm, space, .. } = &pair.world;
    let quiesced = ksm.quiesce().unwrap();
    let leaving = pair.leaves();
    for refused in [
        ksm.drop_space(*space),
        ksm.remove_space(*space),
        ksm.unmerge(Target::Space(*space)).map(drop),
        ksm.unmerge(Target::All).map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Quiesced)), "{refused:?}");
    }
    drop(quiesced);
    leaving.join().unwrap().unwrap();
    ksm.drop_space(*space).unwrap();
}
