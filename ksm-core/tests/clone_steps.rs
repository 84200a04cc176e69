//! A thread panics, or vanishes, at every step of making a clone, of taking memory
//! over, and of changing a region's shape: nothing is left behind, no byte is lost,
//! and the same can be done again with the same memory.
//! On the simulated backend; `linux_clone_steps.rs` does the same to real memory.
#![allow(clippy::unwrap_used)]
#![cfg(feature = "fault-injection")]

mod clone_scenes;
mod step_hooks;
mod world;

use std::sync::Arc;
use std::thread;

use clone_scenes::{GUARDED, PAGES, Scene, content};
use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::error::RegisterError;
use ksm_core::fault::Step;
use ksm_core::page::{PageBuf, PageIndex};
use ksm_core::{Config, Error, Ksm, PinGuard, RegionId, SpaceId};
use step_hooks::{panics_at, vanishes_at};
use world::{fill, is_sane, passes, range, reads};

const SCENES: [Scene; 8] = [
    Scene::FirstClone,
    Scene::SecondClone,
    Scene::CopiedClone,
    Scene::TakeOver,
    Scene::SecondTakeOver,
    Scene::Move,
    Scene::Split,
    Scene::UnregisterPart,
];

struct World {
    scene: Scene,
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    /// The parent, and another guest that has some of its pages.
    guests: [SimGuest; 2],
    parent: RegionId,
    spaces: [SpaceId; 2],
    /// Where the clone comes to be, or what is taken over.
    place: SimGuest,
    pin: Option<PinGuard>,
    scanned: u64,
}

/// What a page of the other guest holds.
fn others(page: u64) -> u64 {
    match page {
        0..6 => content(page),
        page => 1000 + page,
    }
}

fn world(scene: Scene) -> World {
    let sim = SimBackend::new(SimConfig {
        // No mapping is left for a clone, after those of both guests.
        max_vmas: match scene {
            Scene::CopiedClone => 12,
            _ => 1000,
        },
        ..SimConfig::default()
    });
    // Small windows, so that clones are made in several steps.
    let config = Config {
        window_pages: 1,
        ..Config::default()
    };
    let ksm = Arc::new(Ksm::new(sim.clone(), config).unwrap());
    let domain = ksm.create_domain().unwrap();
    let spaces = [(); 2].map(|()| ksm.create_space(domain).unwrap());
    let guests = [sim.guest(PAGES), sim.guest(PAGES)];
    fill(&guests[0], content);
    fill(&guests[1], others);
    let [parent, _] = guests
        .each_ref()
        .map(|guest| ksm.register(spaces[0], guest.clone(), GUARDED).unwrap());
    passes(&ksm, 3);
    // One page was merged and written to since; one is in use by a device.
    guests[0].write(PageIndex(2), &pattern(777));
    let pins = !matches!(scene, Scene::Move | Scene::UnregisterPart);
    let pin = pins.then(|| ksm.pin(parent, range(16, 17)).unwrap());
    let clone = |fill_it: bool| {
        let place = sim.guest(PAGES);
        if fill_it {
            fill(&place, content);
        }
        place
    };
    match scene {
        Scene::SecondClone | Scene::CopiedClone => {
            // A first clone lets the parent map frames, and leaves again.
            let first = ksm.fork_region(parent, spaces[1], clone(false), GUARDED);
            if scene == Scene::CopiedClone {
                ksm.discard(first.unwrap(), range(0, PAGES)).unwrap();
            }
        }
        Scene::SecondTakeOver => {
            ksm.take_over(spaces[1], clone(true), GUARDED).unwrap();
        }
        _ => {}
    }
    let place = clone(scene.takes_over());
    World {
        scene,
        scanned: ksm.stats().pages_scanned,
        sim,
        ksm,
        guests,
        parent,
        spaces,
        place,
        pin,
    }
}

fn expected(page: u64) -> Box<PageBuf> {
    match page {
        2 => pattern(777),
        page => pattern(content(page)),
    }
}

impl World {
    fn action(&self) -> impl FnOnce() -> Result<(), Error> + Send + 'static {
        let (ksm, scene, parent) = (Arc::clone(&self.ksm), self.scene, self.parent);
        let (space, place) = (self.spaces[1], self.place.clone());
        move || scene.act(&ksm, parent, space, place)
    }

    fn check(&self, when: &str) {
        is_sane(&self.ksm, when);
        let scanned = self.ksm.stats().pages_scanned;
        assert!(scanned >= self.scanned, "{when}: {scanned} were scanned");
        let parents = match self.scene {
            // Where it lives now.
            Scene::Move if !self.is_there() => &self.place,
            _ => &self.guests[0],
        };
        reads(parents, expected, when);
        reads(&self.guests[1], |page| pattern(others(page)), when);
        if self.scene.takes_over() {
            reads(&self.place, |page| pattern(content(page)), when);
        }
    }

    /// Whether the parent is registered still.
    fn is_there(&self) -> bool {
        self.ksm.region_stats(self.parent).is_ok()
    }

    fn clones(&self) -> usize {
        self.ksm.regions_of(self.spaces[1]).unwrap().len()
    }

    /// What was interrupted can be done, to the same memory.
    fn do_again(&self, when: &str) {
        let done = match self.scene {
            Scene::Move | Scene::Split | Scene::UnregisterPart => !self.is_there(),
            Scene::SecondClone | Scene::CopiedClone | Scene::SecondTakeOver => self.clones() == 2,
            Scene::FirstClone | Scene::TakeOver => self.clones() == 1,
        };
        match self.action()() {
            Ok(()) if !done => {}
            // It is in use, or no more.
            Err(Error::Register(RegisterError::OtherUserfaultfd { .. }) | Error::NoRegion(_))
                if done => {}
            // It maps frames, some of which are copied.
            Err(Error::Register(RegisterError::PrivateFile { .. })) if self.scene.takes_over() => {
                let again = self.sim.guest(PAGES);
                fill(&again, content);
                let id = self.ksm.take_over(self.spaces[1], again, GUARDED);
                self.ksm.unregister(id.unwrap()).unwrap();
            }
            other => panic!("{when}: done: {done}, and then {other:?}"),
        }
        self.check(when);
    }

    /// Neither sees what is written to the other.
    fn write(&self, when: &str) {
        if self.scene.reshapes() {
            return;
        }
        let page = PageIndex(3);
        let is = pattern(content(3));
        if !self.scene.takes_over() {
            assert_eq!(self.place.read(page), *is, "{when}: not a clone");
        }
        self.guests[0].write(page, &pattern(1));
        assert_eq!(self.place.read(page), *is, "{when}");
        self.place.write(page, &pattern(2));
        assert_eq!(self.guests[0].read(page), *pattern(1), "{when}");
        self.guests[0].write(page, &is);
        self.place.write(page, &is);
    }

    /// Everything can leave, and nothing is left.
    fn leave(mut self, when: &str) {
        self.pin = None;
        passes(&self.ksm, 2);
        self.check(when);
        for space in self.spaces {
            for region in self.ksm.regions_of(space).unwrap() {
                let left = self.ksm.unregister(region);
                left.unwrap_or_else(|error| panic!("{when}: {error}"));
            }
            self.ksm.remove_space(space).unwrap();
        }
        let stats = self.ksm.stats();
        assert_eq!((stats.pages_shared, stats.pages_sharing), (0, 0), "{when}");
        assert_eq!(self.ksm.store_bytes().unwrap(), 0, "{when}");
        let guests = [&self.guests[0], &self.guests[1], &self.place];
        for guest in guests {
            fill(guest, |_| 1);
        }
        is_sane(&self.ksm, when);
    }

    fn goes_on(self, when: &str) {
        self.check(when);
        self.do_again(when);
        self.write(when);
        self.leave(when);
    }
}

/// How often a scene takes a step, where nothing happens.
fn times_taken(scene: Scene, step: Step) -> usize {
    let world = world(scene);
    let action = world.action();
    let times = step_hooks::times_taken(step, || action().unwrap());
    let when = format!("{scene:?}: calm, {step:?} {times}");
    scene.demand(step, times, &when);
    world.goes_on(&when);
    times
}

/// Every step of every scene, with the first times that it is taken and the last.
fn accidents(of: &str) -> impl Iterator<Item = (World, Step, usize, String)> {
    let taken = SCENES.into_iter().flat_map(|scene| {
        let times = move |step| (scene, step, times_taken(scene, step));
        Step::all().map(times)
    });
    let all = step_hooks::accidents(of, taken, 5);
    all.map(|(scene, step, nth, when)| (world(scene), step, nth, when))
}

#[test]
fn a_panic_leaves_nothing_behind() {
    for (world, step, nth, when) in accidents("panic") {
        let action = world.action();
        let panicked = panics_at(step, nth, || action().unwrap());
        assert!(panicked, "{when}");
        world.goes_on(&when);
    }
}

#[test]
fn a_thread_that_vanishes_leaves_nothing_behind() {
    for (world, step, nth, when) in accidents("gone") {
        let action = world.action();
        let dead = vanishes_at(step, nth, || action().unwrap());
        // Whoever waits for what the thread held goes on.
        let ksm = Arc::clone(&world.ksm);
        let scanning = thread::spawn(move || ksm.scan(u64::MAX).unwrap());
        thread::yield_now();
        world.ksm.recover(dead);
        scanning.join().unwrap();
        world.goes_on(&when);
    }
}

/// What was promised to a thread that vanished is there for the next one.
#[test]
fn mappings_promised_to_a_thread_that_vanishes_are_not_lost() {
    for (step, takes_over) in Step::CLONE
        .into_iter()
        .flat_map(|s| [(s, false), (s, true)])
    {
        let when = format!("{step:?}, taken over: {takes_over}");
        let sim = SimBackend::new(SimConfig::default());
        // Enough for one at a time.
        let config = Config {
            max_vmas: Some(2 * PAGES),
            ..Config::default()
        };
        let ksm = Arc::new(Ksm::new(sim.clone(), config).unwrap());
        let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
        let memory = |is_empty: bool| {
            let memory = sim.guest(PAGES);
            if !is_empty {
                fill(&memory, content);
            }
            memory
        };
        let parent = ksm.register(space, memory(false), GUARDED).unwrap();
        let make = move |ksm: &Ksm<SimBackend>, place| match takes_over {
            true => ksm.take_over(space, place, GUARDED).unwrap(),
            false => ksm.fork_region(parent, space, place, GUARDED).unwrap(),
        };
        let end_all_but_parent = || {
            for region in ksm.regions_of(space).unwrap() {
                if region != parent {
                    ksm.discard(region, range(0, PAGES)).unwrap();
                    ksm.unregister(region).unwrap();
                }
            }
        };
        let merged = |region| ksm.region_stats(region).unwrap().ksm_merging_pages;
        let calm = merged(make(&ksm, memory(!takes_over)));
        assert!(calm > PAGES / 2, "{when}: {calm}");
        end_all_but_parent();
        for _ in 0..4 {
            let (dying, place) = (Arc::clone(&ksm), memory(!takes_over));
            let dead = vanishes_at(step, 1, move || {
                make(&dying, place);
            });
            ksm.recover(dead);
            end_all_but_parent();
        }
        let after = merged(make(&ksm, memory(!takes_over)));
        assert_eq!(after, calm, "{when}");
    }
}
