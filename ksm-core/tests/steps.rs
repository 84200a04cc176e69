//! The scanning thread panics, or vanishes, at every step of a merge, and where
//! mappings are given back: nothing stays stopped or out, no byte is lost, and the
//! next pass finishes the job.
//! On the simulated backend; `linux_steps.rs` does the same to real memory.
#![allow(clippy::unwrap_used)]
#![cfg(feature = "fault-injection")]

mod pass_scenes;
mod step_hooks;
mod world;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ksm_core::backend::sim::{Call, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::page::{PageBuf, PageIndex};
use ksm_core::{Config, Ksm, Outcome, RegionId};
use pass_scenes::{PAGES, SCENES, Scene};
use step_hooks::{at, panics_at, vanishes_at};
use world::{GUARDED, is_sane, passes, range, reads};

struct World {
    scene: Scene,
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    guests: [SimGuest; 2],
    regions: [RegionId; 2],
}

/// Two guests whose first pages are equal and merged.
fn merged(scene: Scene, max_vmas: Option<u64>) -> World {
    let sim = SimBackend::new(SimConfig::default());
    let config = Config {
        max_vmas,
        ..Config::default()
    };
    let ksm = Ksm::new(sim.clone(), config).unwrap();
    let domain = ksm.create_domain().unwrap();
    let guests = [sim.guest(PAGES), sim.guest(PAGES)];
    let regions = guests.each_ref().map(|guest| {
        let space = ksm.create_space(domain).unwrap();
        for page in 0..PAGES / 2 {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
        ksm.register(space, guest.clone(), GUARDED).unwrap()
    });
    passes(&ksm, 2);
    assert_eq!(ksm.stats().pages_shared, PAGES / 2);
    World {
        scene,
        sim,
        ksm: Arc::new(ksm),
        guests,
        regions,
    }
}

/// One pass before a merge: new pages, zero pages, and pages that were merged and
/// copied, some of them back at what their frame holds.
fn merging() -> World {
    let world = merged(Scene::Merging, None);
    let guests = &world.guests;
    for guest in guests {
        guest.write(PageIndex(0), &pattern(100));
        guest.write(PageIndex(2), &PageBuf::zeroed());
        for page in PAGES / 2..PAGES - 4 {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
        for page in PAGES - 4..PAGES {
            guest.write(PageIndex(page), &pattern(7));
            guest.write(PageIndex(page), &PageBuf::zeroed());
        }
    }
    // A copy that is again what the frame below it holds.
    guests[0].write(PageIndex(1), &pattern(100));
    guests[0].write(PageIndex(1), &pattern(2));
    world.scan();
    world
}

/// One pass before mappings are given back: what was merged is rewritten but for a
/// page, and a run that starts behind it finds no mapping left.
fn giving_back() -> World {
    let world = merged(Scene::GivingBack, Some(2));
    for (number, guest) in world.guests.iter().enumerate() {
        for page in (0..PAGES).filter(|&page| page != 1) {
            guest.write(PageIndex(page), &world.expected(number, page));
        }
    }
    world.scan();
    assert_eq!(world.ksm.stats().vmas_given_back, 0);
    world
}

fn world(scene: Scene) -> World {
    match scene {
        Scene::Merging => merging(),
        Scene::GivingBack => giving_back(),
    }
}

/// What the guests hold whose pages are merged.
fn equal(page: u64) -> Box<PageBuf> {
    match page {
        0 => pattern(100),
        2 => PageBuf::zeroed(),
        page if page >= PAGES - 4 => PageBuf::zeroed(),
        page => pattern(page + 1),
    }
}

impl World {
    fn expected(&self, guest: usize, page: u64) -> Box<PageBuf> {
        let own = 1000 * (1 + guest as u64) + page;
        match self.scene {
            Scene::Merging => equal(page),
            Scene::GivingBack if page == 1 => pattern(2),
            Scene::GivingBack if page < PAGES / 2 + 2 => pattern(own),
            Scene::GivingBack => pattern(page + 1),
        }
    }

    fn scan(&self) {
        self.ksm.scan(1 << 20).unwrap();
    }

    fn check(&self, when: &str) {
        is_sane(&self.ksm, when);
        for (number, guest) in self.guests.iter().enumerate() {
            let expected = |page| self.expected(number, page);
            reads(guest, expected, &format!("{when}: guest {number}"));
        }
    }

    /// After the accident the engine does what is left.
    fn finish(&self, when: &str) {
        pass_scenes::finish(&self.ksm, self.scene, when);
        self.check(when);
        for (number, guest) in self.guests.iter().enumerate() {
            guest.write(PageIndex(4), &self.expected(number, 4));
        }
    }
}

/// How often a whole pass takes each step.
fn times_taken(scene: Scene, step: Step) -> usize {
    let world = world(scene);
    let times = step_hooks::times_taken(step, || world.scan());
    world.check("calm");
    let calls = match scene {
        Scene::Merging => &[Call::Share, Call::Reuse, Call::Zero][..],
        Scene::GivingBack => &[Call::Populate, Call::Restore][..],
    };
    for &call in calls {
        assert!(world.sim.calls(call) > 0, "no {call:?} in the pass");
    }
    assert_eq!(
        world.ksm.stats().vmas_given_back > 0,
        scene == Scene::GivingBack
    );
    times
}

/// Every step that a pass takes, with how often.
fn steps(scene: Scene) -> impl Iterator<Item = (Scene, Step, usize)> {
    let never = match scene {
        Scene::Merging => Step::Unshared,
        Scene::GivingBack => Step::Compared,
    };
    Step::PASS.into_iter().map(move |step| {
        let times = times_taken(scene, step);
        assert_eq!(times == 0, step == never, "{step:?} in {scene:?}");
        (scene, step, times)
    })
}

/// Every step of both scenes, each time that it is taken.
fn accidents(of: &str) -> impl Iterator<Item = (World, Step, usize, String)> {
    let taken = SCENES.into_iter().flat_map(steps);
    let all = step_hooks::accidents(of, taken, usize::MAX);
    all.map(|(scene, step, nth, when)| (world(scene), step, nth, when))
}

#[test]
fn a_panic_at_any_step_leaves_nothing_stopped() {
    for (world, step, nth, when) in accidents("panic") {
        let panicked = panics_at(step, nth, || world.scan());
        assert!(panicked, "{when}");
        world.check(&when);
        world.finish(&when);
    }
}

#[test]
fn a_thread_that_vanishes_at_any_step_can_be_recovered_from() {
    for (world, step, nth, when) in accidents("gone") {
        let ksm = Arc::clone(&world.ksm);
        let dead = vanishes_at(step, nth, move || {
            ksm.scan(1 << 20).unwrap();
        });
        assert!(world.ksm.recover(dead) >= 1, "{when}");
        world.check(&when);
        world.finish(&when);
    }
}

/// A guard that is asked for in the middle waits for what is under way; when it
/// is there none of its pages is merged, and none is touched any more.
#[test]
fn a_guard_waits_for_what_is_under_way() {
    let taken = steps(Scene::Merging).filter(|&(_, _, times)| times > 0);
    // Frames are made where the second page of a content is found: in the other one.
    let here = taken.filter(|(_, step, _)| !matches!(step, Step::Allotted | Step::Filled));
    for (_, step, _) in here {
        let world = merging();
        let (ksm, region) = (Arc::clone(&world.ksm), world.regions[0]);
        let all = range(0, PAGES);
        let (asked, guards) = mpsc::channel();
        set_hook(at(step, 1, move || {
            let ksm = Arc::clone(&ksm);
            let asking = thread::spawn(move || ksm.pin(region, all).unwrap());
            thread::sleep(Duration::from_millis(20));
            assert!(!asking.is_finished(), "{step:?}: it does not wait");
            asked.send(asking).unwrap();
        }));
        world.ksm.scan(1 << 20).unwrap();
        set_hook(None);
        let guard = guards.recv().unwrap().join().unwrap();
        let when = format!("a guard at {step:?}");
        world.check(&when);
        for page in all.iter() {
            let found = world.ksm.explain(region, page).unwrap();
            assert_eq!((found.outcome, found.sharers), (Outcome::Pinned, 0));
            assert!(world.guests[0].pin(page));
        }
        for _ in 0..4 {
            world.ksm.scan(1 << 20).unwrap();
            world.check(&when);
        }
        assert_eq!(world.ksm.region_stats(region).unwrap().ksm_merging_pages, 0);
        all.iter().for_each(|page| world.guests[0].unpin(page));
        drop(guard);
        world.finish(&when);
    }
}
