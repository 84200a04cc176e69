//! Frames that no page maps any more are given back while the host takes its time:
//! whoever has pages stopped does not wait for that, and nobody comes by the frames or
//! their numbers before it is done.
#![allow(clippy::unwrap_used)]

mod world;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ksm_core::backend::sim::{Call, SimBackend, SimGuest, pattern};
use ksm_core::{Config, Ksm, PageIndex, PageRange, RegionId, Stats, Target};
use world::{GUARDED, World, is_sane};

/// In each guest.
const PAGES: u64 = 8;

/// What does not get through in that time hangs.
const LONG: Duration = Duration::from_secs(60);

/// Pages are merged at first sight.
fn world() -> World {
    World::new(Config {
        settle_passes: 0,
        ..Config::default()
    })
}

impl World {
    /// A guest whose pages hold `content`, each with another.
    fn holding(&self, content: u64) -> (SimGuest, RegionId) {
        let guest = self.sim.guest(PAGES);
        write(&guest, content);
        let region = self.register(&guest);
        (guest, region)
    }

    fn pass(&self) {
        self.passes(1);
    }

    fn check(&self) {
        is_sane(&self.ksm, "between passes");
    }

    fn stats(&self) -> Stats {
        self.ksm.stats()
    }

    /// Lets a thread unmerge `region`, and gives it back when it has asked the host for
    /// the frames' memory, which sleeps.
    fn unmerging(&self, region: RegionId) -> thread::JoinHandle<u64> {
        let before = self.sim.calls(Call::Punch);
        self.sim.sleep(Call::Punch, true);
        let ksm = Arc::clone(&self.ksm);
        let unmerging = thread::spawn(move || ksm.unmerge(of(region)).unwrap());
        while self.sim.calls(Call::Punch) == before {
            assert!(!unmerging.is_finished(), "it gives nothing back");
            thread::yield_now();
        }
        unmerging
    }

    /// What `call` returns, on a thread of its own. It must get through though the
    /// host punches nothing.
    fn beside<R: Send + 'static>(
        &self,
        what: &str,
        call: impl FnOnce(&Ksm<SimBackend>) -> R + Send + 'static,
    ) -> R {
        let (done, when_done) = mpsc::channel();
        let ksm = Arc::clone(&self.ksm);
        let thread = thread::spawn(move || done.send(call(&ksm)));
        let returned = when_done.recv_timeout(LONG);
        if returned.is_err() {
            // The others are to end, not to hang.
            self.sim.sleep(Call::Punch, false);
        }
        let _ = thread.join();
        returned.unwrap_or_else(|_| panic!("{what} waits for frames to be punched"))
    }
}

fn all() -> PageRange {
    PageRange::new(PageIndex(0), PAGES)
}

fn of(region: RegionId) -> Target {
    Target::Pages(region, all())
}

fn write(guest: &SimGuest, content: u64) {
    for page in 0..PAGES {
        guest.write(PageIndex(page), &pattern(content + page));
    }
}

fn holds(guest: &SimGuest, content: u64) {
    for page in 0..PAGES {
        assert_eq!(guest.read(PageIndex(page)), *pattern(content + page));
    }
}

#[test]
fn runs_are_merged_and_unmerged_while_the_host_is_slow_to_punch() {
    let world = world();
    let [(one, one_id), (other, other_id)] = [100, 100].map(|content| world.holding(content));
    let [(parent, parent_id), (_, twin)] = [200, 200].map(|content| world.holding(content));
    world.pass();
    world.pass();
    assert_eq!(world.stats().pages_shared, 2 * PAGES);
    // The parent's pages are copies, and the frames below them are gone but for their
    // numbers: to merge them again is to give the numbers back.
    write(&parent, 300);
    world.ksm.unmerge(of(parent_id)).unwrap();
    world.ksm.unmerge(of(twin)).unwrap();
    world.ksm.unmerge(of(one_id)).unwrap();
    let unmerging = world.unmerging(other_id);

    let space = world.space;
    let clone = world.sim.guest(PAGES);
    let forked = world.beside("a fork", {
        let clone = clone.clone();
        move |ksm| ksm.fork_region(parent_id, space, clone, GUARDED).unwrap()
    });
    assert_eq!(world.stats().pages_shared, PAGES);
    let unmerged = world.beside("an unmerge", move |ksm| ksm.unmerge(of(parent_id)).unwrap());
    assert_eq!(unmerged, PAGES);
    let sharers = world.beside("a look", move |ksm| {
        ksm.explain(forked, PageIndex(0)).unwrap().sharers
    });
    assert_eq!(sharers, 1);
    assert!(!unmerging.is_finished(), "it was to sleep all the while");

    world.sim.sleep(Call::Punch, false);
    assert_eq!(unmerging.join().unwrap(), PAGES);
    world.check();
    for (guest, content) in [(&one, 100), (&other, 100), (&parent, 300), (&clone, 300)] {
        holds(guest, content);
    }
}

/// A page of a content whose frame is being given back gets another frame, with another
/// number; afterwards the old number is free.
#[test]
fn nobody_comes_by_a_frame_that_is_being_punched() {
    let world = world();
    let [one_id, other_id] = [100, 100].map(|content| world.holding(content).1);
    world.pass();
    world.pass();
    let old = world.ksm.explain(other_id, PageIndex(0)).unwrap().frame;
    world.ksm.unmerge(of(one_id)).unwrap();
    world.sim.sleep(Call::Punch, true);
    let before = world.sim.calls(Call::Punch);
    let ksm = Arc::clone(&world.ksm);
    let discarding = thread::spawn(move || ksm.discard(other_id, all()).unwrap());
    while world.sim.calls(Call::Punch) == before {
        thread::yield_now();
    }
    // Nothing names the frames any more then: all that keeps their numbers is that they
    // are being punched.
    world.beside("a discard", move |ksm| ksm.discard(one_id, all()).unwrap());
    // Frames of the same contents, for a clone.
    let (parent, parent_id) = world.holding(100);
    let (space, clone) = (world.space, world.sim.guest(PAGES));
    let forked = world.beside("a fork", {
        let clone = clone.clone();
        move |ksm| ksm.fork_region(parent_id, space, clone, GUARDED).unwrap()
    });
    let new = world.ksm.explain(forked, PageIndex(0)).unwrap().frame;
    assert!(
        old.is_some() && new.is_some() && old != new,
        "{old:?} {new:?}"
    );
    assert_eq!(world.stats().frames_lingering, PAGES);

    world.sim.sleep(Call::Punch, false);
    discarding.join().unwrap();
    world.check();
    assert_eq!(world.stats().frames_lingering, 0);
    for guest in [&parent, &clone] {
        holds(guest, 100);
    }
}

/// What the host would not take back is taken back by the next pass.
#[test]
fn frames_that_the_host_refuses_are_for_the_next_sweep() {
    use ksm_core::backend::sim::Failure;

    let world = world();
    let regions = [100, 100].map(|content| world.holding(content).1);
    world.pass();
    world.pass();
    world.sim.fail_often(Call::Punch, Failure::Again, 1000);
    for region in regions {
        world.ksm.unregister(region).unwrap();
    }
    world.pass();
    assert_eq!(world.stats().frames_lingering, PAGES);
    assert_eq!(world.ksm.store_bytes().unwrap(), PAGES * 4096);
    world.sim.no_failures();
    world.pass();
    assert_eq!(world.stats().frames_lingering, 0);
    assert_eq!(world.ksm.store_bytes().unwrap(), 0);
}

/// A thread that is gone for good while the host punches has lost nothing once it is
/// recovered from: neither memory nor numbers.
#[cfg(feature = "fault-injection")]
#[test]
fn what_a_thread_was_giving_back_is_given_back_after_it() {
    use ksm_core::fault::Step;

    for step in [Step::Buried, Step::Punched] {
        let world = world();
        let regions = [100, 100].map(|content| world.holding(content).1);
        world.pass();
        world.pass();
        world.ksm.unregister(regions[0]).unwrap();
        let ksm = Arc::clone(&world.ksm);
        let dead = step_hooks::vanishes_at(step, 1, move || {
            ksm.unmerge(of(regions[1])).unwrap();
        });
        assert_eq!(world.ksm.recover(dead), 1, "{step:?}: the region's lease");
        world.check();
        assert_eq!(world.ksm.store_bytes().unwrap(), 0, "{step:?}");
        world.ksm.unregister(regions[1]).unwrap();
        assert_eq!(world.stats().frames_lingering, 0, "{step:?}");
        world.check();
    }
}

#[cfg(feature = "fault-injection")]
mod step_hooks;
