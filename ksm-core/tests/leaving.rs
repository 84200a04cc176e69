//! Calls that meet a region while another thread takes it away: it is in no list of
//! regions then, and its pages may be stopped and shared all the same.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;

use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::Step;
use ksm_core::{Config, Error, Ksm, PageIndex, RegionId, RegionOptions, SpaceId};
use step_hooks::vanishes_at;

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

/// What becomes of `call` in another thread, if that does not wait for long.
fn said_soon<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (said, says) = mpsc::channel();
    thread::spawn(move || said.send(call()));
    says.recv_timeout(50 * SOON).ok()
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
        let left = said_soon(|| leaving.join().unwrap());
        left.expect("it waits for who is gone").unwrap();
        world.ksm.check().unwrap();
        for page in (0..PAGES).map(PageIndex) {
            assert_eq!(world.guests[0].try_read(page), Some(*pattern(1 + page.0)));
        }
    }
}
