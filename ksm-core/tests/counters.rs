//! Counters stay right whatever becomes of the regions meanwhile.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;
mod world;

use std::sync::{Arc, mpsc};
use std::thread;

use ksm_core::backend::sim::{SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Outcome, OutcomeCounts, PageIndex, RegionId, ScanReport};
use step_hooks::{Standing, at};
use world::World;

const PAGES: u64 = 24;

fn world(max_vmas: Option<u64>) -> World {
    World::new(Config {
        max_vmas,
        pages_per_stop: 4,
        ..Config::default()
    })
}

impl World {
    /// A guest whose page `n` holds `content(n)`, registered.
    fn with(&self, content: impl Fn(u64) -> u64) -> (SimGuest, RegionId) {
        let guest = self.guest_of(PAGES, content);
        let region = self.register(&guest);
        (guest, region)
    }

    fn pass(&self) -> ScanReport {
        self.ksm.scan(u64::MAX).unwrap()
    }

    /// A pass in which, when it has merged the first run, another thread comes to
    /// split `region` and waits for its lease.
    fn pass_while_it_is_split(&self, region: RegionId) -> ScanReport {
        let (is_splitting, splitting) = mpsc::channel();
        let ksm = Arc::clone(&self.ksm);
        set_hook(at(Step::Lifted, 1, move || {
            let waits = || ksm.region_stats(region).unwrap().lease_waits;
            let (before, splitter) = (waits(), Arc::clone(&ksm));
            let split = thread::spawn(move || splitter.split(region, PageIndex(20)).unwrap());
            while waits() == before {
                thread::yield_now();
            }
            is_splitting.send(split).unwrap();
        }));
        let report = self.pass();
        set_hook(None);
        splitting.recv().expect("the step is taken").join().unwrap();
        report
    }
}

/// Pages that are equal in all guests, in two runs.
fn two_runs(guest: u64) -> impl Fn(u64) -> u64 {
    move |page| match page {
        2..5 | 10..13 => 1 + page,
        _ => 1000 * (1 + guest) + page,
    }
}

#[test]
fn passes_are_counted_where_there_is_no_domain() {
    let world = world(None);
    world.pass();
    assert_eq!(world.ksm.stats().full_scans, 1);
    let (space, domain) = (world.space, world.ksm.domains()[0]);
    world.ksm.remove_space(space).unwrap();
    world.ksm.remove_domain(domain).unwrap();
    assert_eq!(world.ksm.stats().full_scans, 1);
    world.pass();
    assert_eq!(world.ksm.stats().full_scans, 2);
    world.ksm.create_domain().unwrap();
    world.ksm.create_domain().unwrap();
    assert_eq!(world.ksm.stats().full_scans, 2);
}

/// What a pass says that became of pages is what the counters say, though a region
/// is replaced between two runs.
#[test]
fn outcomes_of_a_region_that_is_split_are_counted() {
    let world = world(None);
    let (_, first) = world.with(two_runs(0));
    world.with(two_runs(1));
    let mut said = OutcomeCounts::default();
    said.add(&world.pass().outcomes);
    let report = world.pass_while_it_is_split(first);
    assert!(report.outcomes[Outcome::Merged] > 0);
    said.add(&report.outcomes);
    assert_eq!(world.ksm.stats().outcomes, said);
    for _ in 0..3 {
        said.add(&world.pass().outcomes);
    }
    assert_eq!(world.ksm.stats().outcomes, said);
    assert_eq!(said[Outcome::Merged], 12);
}

/// Mappings that are given back are counted before the lease is given up in between,
/// when others may come to replace the region.
#[test]
fn mappings_given_back_are_counted_piece_by_piece() {
    let world = world(Some(13));
    // The frames of one are those of the other in reverse.
    let (one, other) = (
        world.with(|page| if page < 12 { 1 + page } else { 1000 + page }),
        world.with(|page| if page < 12 { 12 - page } else { 2000 + page }),
    );
    world.passes(6);
    let vmas = |region| world.ksm.region_stats(region).unwrap().vmas;
    assert_eq!(vmas(one.1) + vmas(other.1), 13);
    let ((broken, region), (whole, _)) = match vmas(one.1) {
        12 => (one, other),
        _ => (other, one),
    };
    // All of its mappings hold copies now; and others would save more.
    for page in 0..12 {
        broken.write(PageIndex(page), &pattern(3000 + page));
    }
    for page in 12..22 {
        broken.write(PageIndex(page), &pattern(4000 + page));
        whole.write(PageIndex(page), &pattern(4000 + page));
    }
    world.pass();
    let before = world.ksm.stats();
    let (count, counted) = mpsc::channel();
    let ksm = Arc::clone(&world.ksm);
    // Four pages under each lease: they are three, and this is the second one.
    set_hook(at(Step::Unshared, 2, move || {
        let stats = ksm.region_stats(region).unwrap();
        count.send(stats.vmas_given_back).unwrap();
    }));
    world.pass();
    set_hook(None);
    assert_eq!(counted.recv().unwrap(), 3);
    let after = world.ksm.stats();
    assert!(after.vmas < before.vmas);
    assert_eq!(after.vmas_given_back, before.vmas - after.vmas);
}

/// Mappings of a region that is leaving are there until it has gone: nobody may spend
/// them before.
#[test]
fn mappings_of_a_region_that_is_leaving_are_not_spent() {
    let world = world(Some(8));
    let (_, leaving) = world.with(two_runs(0));
    let (_, other) = world.with(two_runs(1));
    world.passes(2);
    assert_eq!(world.ksm.stats().vmas, 8);
    // It would cost two runs, of two mappings each.
    world.with(two_runs(2));
    let most = 3 + 8;
    world.passes(2);
    assert_eq!(world.sim.vmas(), most);

    let ksm = Arc::clone(&world.ksm);
    // Its pages have copies, over mappings of frames.
    let unregistering = Standing::at(Step::Stopping, 1, move || {
        ksm.unregister(leaving).unwrap();
    });
    unregistering.is_there();
    (0..2).for_each(|_| {
        world.pass();
    });
    let meanwhile = world.sim.vmas();
    unregistering.go();
    unregistering.ends();
    assert_eq!(meanwhile, most);
    world.passes(2);
    assert_eq!(world.ksm.stats().vmas, 8, "there is room for it now");
    assert_eq!(world.sim.vmas(), most);
    assert_eq!(world.ksm.region_stats(other).unwrap().vmas, 4);
}
