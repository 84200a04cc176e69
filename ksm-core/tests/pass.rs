//! What a pass takes in: regions that come while it runs, whenever their numbers were
//! given out, and those that had been away.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;
mod world;

use std::sync::{Arc, mpsc};

use ksm_core::backend::sim::{Call, Failure, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Outcome, PageIndex, RegionId};
use step_hooks::{Standing, at};
use world::{GUARDED, World};

const PAGES: u64 = 4;

impl World {
    /// Memory of which the first page is equal to that of any other.
    fn memory(&self, number: u64) -> SimGuest {
        self.guest_of(PAGES, |page| match page {
            0 => 1,
            page => 1000 * (1 + number) + page,
        })
    }

    fn region(&self, number: u64) -> RegionId {
        self.register(&self.memory(number))
    }

    /// How often pages of it have been looked at.
    fn looks(&self, region: RegionId) -> u64 {
        let outcomes = self.ksm.region_stats(region).unwrap().outcomes;
        outcomes.iter().map(|(_, pages)| pages).sum()
    }

    fn end_pass(&self) {
        assert_eq!(self.ksm.scan(u64::MAX).unwrap().passes, 1);
    }
}

/// A region has its number before it is made.
#[test]
fn a_region_that_was_begun_before_the_pass_is_looked_at() {
    let world = World::new(Config::default());
    let parent = world.region(0);
    let (ksm, space) = (Arc::clone(&world.ksm), world.space);
    let (restored, place) = (world.memory(1), world.sim.guest(PAGES));
    for takes_over in [false, true] {
        let memory = if takes_over { &restored } else { &place };
        let (ksm, source) = (Arc::clone(&ksm), memory.clone());
        let (is_made, made) = mpsc::channel();
        let maker = Standing::at(Step::Nursed, 1, move || {
            let made = match takes_over {
                true => ksm.take_over(space, source, GUARDED),
                false => ksm.fork_region(parent, space, source, GUARDED),
            };
            is_made.send(made.unwrap()).unwrap();
        });
        maker.is_there();
        assert_eq!(world.ksm.scan(1).unwrap().passes, 0, "it begins");
        maker.go();
        maker.ends();
        let made = made.recv().unwrap();
        // Pages that map frames are not looked at while nobody touches them.
        for page in 0..PAGES {
            memory.write(PageIndex(page), &pattern(9000 + page));
        }
        let before = world.looks(made);
        world.end_pass();
        let looks = world.looks(made) - before;
        assert_eq!(looks, PAGES, "taken over: {takes_over}");
    }
}

/// A region that is being unregistered is not there; it is again when that fails.
#[test]
fn a_region_that_comes_back_is_looked_at() {
    // It leaves before the pass begins, or while it waits to be looked at.
    for leaves_before in [true, false] {
        let world = World::new(Config::default());
        let [_, region, _] = [0, 1, 2].map(|number| world.region(number));
        (0..3).for_each(|_| world.end_pass());
        let before = world.looks(region);
        let scan = |pages| {
            let report = world.ksm.scan(pages).unwrap();
            assert_eq!((report.pages_scanned, report.passes), (pages, 0));
        };
        if !leaves_before {
            scan(1);
        }
        // Its pages have copies, which are not put in the place of mappings then.
        world
            .sim
            .fail_often(Call::Restore, Failure::OutOfMemory, 1000);
        let (ksm, looked) = (Arc::clone(&world.ksm), mpsc::channel());
        let pages = if leaves_before { 1 } else { PAGES - 1 };
        set_hook(at(Step::Stopping, 1, move || {
            let report = ksm.scan(pages).unwrap();
            looked
                .0
                .send((report.pages_scanned, report.passes))
                .unwrap();
        }));
        world.ksm.unregister(region).unwrap_err();
        set_hook(None);
        world.sim.no_failures();
        let (scanned, passes) = looked.1.recv().unwrap();
        assert_eq!((scanned, passes), (pages, 0));
        assert_eq!(world.looks(region), before, "it was not there");
        world.end_pass();
        assert_eq!(world.looks(region) - before, PAGES, "{leaves_before}");
        let outcome = world.ksm.explain(region, PageIndex(0)).unwrap().outcome;
        assert_ne!(outcome, Outcome::Unseen);
    }
}
