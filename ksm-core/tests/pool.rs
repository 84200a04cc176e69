//! Threads of the rayon pool call the engine themselves, while it would have their help.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;
mod world;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ksm_core::fault::Step;
use ksm_core::{Config, RegionId, Target};
use step_hooks::Standing;
use world::{GUARDED, World, range};

const PAGES: u64 = 256;

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
    let world = World::new(Config {
        settle_passes: 0,
        parallel_pages: 1,
        ..Config::default()
    });
    let [region, _] = [(); 2].map(|()| world.register(&world.guest(PAGES, 1)));
    let threads = rayon::current_num_threads() as u64;
    // Somebody is at the region, so that the others line up: the scanner first.
    let (ksm, space, place) = (Arc::clone(&world.ksm), world.space, world.sim.guest(PAGES));
    let busy = Standing::at(Step::Hashed, 1, move || {
        ksm.fork_region(region, space, place, GUARDED).unwrap();
    });
    busy.is_there();
    let ksm = Arc::clone(&world.ksm);
    let scanner = thread::spawn(move || ksm.scan(u64::MAX).unwrap());
    world.waits_for(region, 1);
    let (done, all_done) = mpsc::channel();
    for _ in 0..threads {
        let (ksm, done) = (Arc::clone(&world.ksm), done.clone());
        rayon::spawn(move || {
            let unmerged = ksm.unmerge(Target::Pages(region, range(0, PAGES)));
            done.send(unmerged.map(|_| ())).unwrap();
        });
    }
    world.waits_for(region, 1 + threads);
    busy.go();
    for _ in 0..threads {
        let done = all_done.recv_timeout(Duration::from_secs(60));
        done.expect("they wait for one another").unwrap();
    }
    assert_eq!(scanner.join().unwrap().passes, 1);
    busy.ends();
    world.ksm.check().unwrap();
}
