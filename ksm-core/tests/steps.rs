//! The scanning thread panics, or vanishes, at every step of a merge: nothing
//! stays stopped or out, no byte is lost, and the next pass finishes the job.
//! On the simulated backend; `linux_steps.rs` does the same to real memory.
#![allow(clippy::unwrap_used)]
#![cfg(feature = "fault-injection")]

mod step_hooks;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ksm_core::backend::sim::{Call, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::page::{PageBuf, PageIndex, PageRange};
use ksm_core::{Config, Ksm, Outcome, RegionId, RegionOptions};
use step_hooks::{at, panics_at, vanishes_at};

const PAGES: u64 = 24;

struct World {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    guests: [SimGuest; 2],
    regions: [RegionId; 2],
}

/// Two guests one pass before they merge: new pages, zero pages, and pages that
/// were merged and copied, some of them back at what their frame holds.
fn world() -> World {
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Ksm::new(sim.clone(), Config::default()).unwrap();
    let domain = ksm.create_domain().unwrap();
    let guests = [sim.guest(PAGES), sim.guest(PAGES)];
    let regions = guests.each_ref().map(|guest| {
        let space = ksm.create_space(domain).unwrap();
        let options = RegionOptions { dma_guarded: true };
        for page in 0..PAGES / 2 {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
        ksm.register(space, guest.clone(), options).unwrap()
    });
    while ksm.stats().full_scans < 2 {
        ksm.scan(1 << 20).unwrap();
    }
    assert_eq!(ksm.stats().pages_shared, PAGES / 2);
    for guest in &guests {
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
    ksm.scan(1 << 20).unwrap();
    World {
        sim,
        ksm: Arc::new(ksm),
        guests,
        regions,
    }
}

fn expected(page: u64) -> Box<PageBuf> {
    match page {
        0 => pattern(100),
        2 => PageBuf::zeroed(),
        page if page >= PAGES - 4 => PageBuf::zeroed(),
        page => pattern(page + 1),
    }
}

impl World {
    fn scan(&self) {
        self.ksm.scan(1 << 20).unwrap();
    }

    fn check(&self, when: &str) {
        assert_eq!(self.sim.violation(), None, "{when}");
        assert!(self.sim.busy().is_idle(), "{when}: {:?}", self.sim.busy());
        self.ksm
            .check()
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        for (number, guest) in self.guests.iter().enumerate() {
            for page in PageRange::new(PageIndex(0), PAGES).iter() {
                let is = guest.try_read(page);
                let is = is.unwrap_or_else(|| panic!("{when}: guest {number} waits for {page}"));
                assert_eq!(is, *expected(page.0), "{when}: guest {number} page {page}");
            }
        }
    }

    /// After the accident the engine does what is left.
    fn finish(&self, when: &str) {
        for _ in 0..4 {
            self.ksm.scan(1 << 20).unwrap();
        }
        self.check(when);
        let stats = self.ksm.stats();
        let sharing = (
            stats.pages_shared,
            stats.pages_sharing,
            stats.ksm_zero_pages,
        );
        assert_eq!(sharing, (PAGES - 5, PAGES - 5, 10), "{when}");
        for guest in &self.guests {
            guest.write(PageIndex(4), &pattern(5));
        }
    }
}

/// How often a whole pass takes each step.
fn times_taken(step: Step) -> usize {
    let world = world();
    let times = step_hooks::times_taken(step, || world.scan());
    world.check("calm");
    for call in [Call::Share, Call::Reuse, Call::Zero] {
        assert!(world.sim.calls(call) > 0, "no {call:?} in the pass");
    }
    times
}

#[test]
fn a_panic_at_any_step_leaves_nothing_stopped() {
    for step in Step::ALL {
        let times = times_taken(step);
        assert!(times > 0, "no {step:?} in the pass");
        for nth in 1..=times {
            let world = world();
            let panicked = panics_at(step, nth, || world.scan());
            let when = format!("panic at {step:?} {nth}");
            assert!(panicked, "{when}");
            world.check(&when);
            world.finish(&when);
        }
    }
}

#[test]
fn a_thread_that_vanishes_at_any_step_can_be_recovered_from() {
    for step in Step::ALL {
        for nth in 1..=times_taken(step) {
            let world = world();
            let ksm = Arc::clone(&world.ksm);
            let dead = vanishes_at(step, nth, move || {
                ksm.scan(1 << 20).unwrap();
            });
            let leases = world.ksm.recover(dead);
            assert!(leases >= 1);
            let when = format!("gone at {step:?} {nth}");
            world.check(&when);
            world.finish(&when);
        }
    }
}

/// A guard that is asked for in the middle waits for what is under way; when it
/// is there none of its pages is merged, and none is touched any more.
#[test]
fn a_guard_waits_for_what_is_under_way() {
    for step in Step::ALL {
        let world = world();
        let (ksm, region) = (Arc::clone(&world.ksm), world.regions[0]);
        let all = PageRange::new(PageIndex(0), PAGES);
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
