//! Threads of the rayon pool call the engine themselves, while it would have their help.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ksm_core::backend::sim::{SimBackend, SimConfig, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Ksm, PageIndex, PageRange, RegionId, RegionOptions, SpaceId, Target};
use step_hooks::at;

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };
const PAGES: u64 = 256;
const WHOLE: PageRange = PageRange {
    start: PageIndex(0),
    end: PageIndex(PAGES),
};

struct World {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    space: SpaceId,
}

/// Two guests whose pages are equal, merged at first sight and unmerged by many
/// threads.
fn world() -> (World, [RegionId; 2]) {
    let sim = SimBackend::new(SimConfig::default());
    let config = Config {
        settle_passes: 0,
        parallel_pages: 1,
        ..Config::default()
    };
    let ksm = Arc::new(Ksm::new(sim.clone(), config).unwrap());
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    let regions = [(); 2].map(|()| {
        let guest = sim.guest(PAGES);
        for page in WHOLE.iter() {
            guest.write(page, &pattern(1 + page.0));
        }
        ksm.register(space, guest, GUARDED).unwrap()
    });
    (World { sim, ksm, space }, regions)
}

impl World {
    fn waits_for(&self, region: RegionId, waiters: u64) {
        while self.ksm.region_stats(region).unwrap().lease_waits < waiters {
            thread::yield_now();
        }
    }
}

/// All threads of the pool wait for the lease that the scanner holds, which would have
/// them help.
#[test]
fn a_scanner_does_not_wait_for_a_pool_that_waits_for_it() {
    let (world, [region, _]) = world();
    let threads = rayon::current_num_threads() as u64;
    // Somebody is at the region, so that the others line up: the scanner first.
    let (is_here, here) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let (ksm, space, place) = (Arc::clone(&world.ksm), world.space, world.sim.guest(PAGES));
    let busy = thread::spawn(move || {
        set_hook(at(Step::Hashed, 1, move || {
            is_here.send(()).unwrap();
            may_go.recv().unwrap();
        }));
        ksm.fork_region(region, space, place, GUARDED).unwrap();
    });
    here.recv().unwrap();
    let ksm = Arc::clone(&world.ksm);
    let scanner = thread::spawn(move || ksm.scan(u64::MAX).unwrap());
    world.waits_for(region, 1);
    let (done, all_done) = mpsc::channel();
    for _ in 0..threads {
        let (ksm, done) = (Arc::clone(&world.ksm), done.clone());
        rayon::spawn(move || {
            let unmerged = ksm.unmerge(Target::Pages(region, WHOLE));
            done.send(unmerged.map(|_| ())).unwrap();
        });
    }
    world.waits_for(region, 1 + threads);
    go.send(()).unwrap();
    for _ in 0..threads {
        let done = all_done.recv_timeout(Duration::from_secs(60));
        done.expect("they wait for one another").unwrap();
    }
    assert_eq!(scanner.join().unwrap().passes, 1);
    busy.join().unwrap();
    world.ksm.check().unwrap();
}
