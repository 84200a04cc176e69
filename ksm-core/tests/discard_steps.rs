//! A thread panics, or vanishes, at every step of a discard of merged pages: what was
//! to go is gone, and what the guest writes there afterwards is kept, also where it is
//! what was merged before.
#![allow(clippy::unwrap_used)]
#![cfg(feature = "fault-injection")]

#[cfg(feature = "linux")]
mod linux_common;
mod step_hooks;
mod world;

use std::sync::Arc;

use ksm_core::backend::sim::{SimGuest, pattern};
use ksm_core::fault::Step;
use ksm_core::page::{PageBuf, PageRange};
use ksm_core::{Config, RegionId};
use step_hooks::{panics_at, times_taken, vanishes_at};
use world::{World, is_sane, range, reads};

const PAGES: u64 = 16;
/// Its first and its last pages are the guest's own.
const GONE: PageRange = range(1, 15);

/// Two guests that are equal but for the first and last three pages, and merged.
fn merged() -> (World, [SimGuest; 2], RegionId) {
    let world = World::new(Config::default());
    let guests = [0, 1].map(|guest| world.guest_of(PAGES, move |page| content(guest, page)));
    let [region, _] = guests.each_ref().map(|guest| world.register(guest));
    world.passes(3);
    assert_eq!(world.ksm.stats().pages_sharing, 10);
    (world, guests, region)
}

const fn content(guest: u64, page: u64) -> u64 {
    match page {
        3..13 => 100 + page,
        _ => 1000 * (guest + 1) + page,
    }
}

fn after(page: u64) -> Box<PageBuf> {
    match page {
        1..15 => PageBuf::zeroed(),
        page => pattern(content(0, page)),
    }
}

/// What was begun has ended, and the guest uses the memory again.
fn goes_on(world: &World, guests: &[SimGuest; 2], when: &str) {
    let whole = |page| pattern(content(0, page));
    is_sane(&world.ksm, when);
    reads(&guests[1], |page| pattern(content(1, page)), when);
    world::fill(&guests[0], |page| content(0, page));
    world.passes(3);
    reads(&guests[0], whole, when);
    reads(&guests[1], |page| pattern(content(1, page)), when);
    assert_eq!(world.ksm.stats().pages_sharing, 10, "{when}");
}

/// Each step of a discard, and each time that it is taken.
fn accidents() -> Vec<(Step, usize)> {
    let times = |step| {
        let (world, _, region) = merged();
        let times = times_taken(step, || world.ksm.discard(region, GONE).unwrap());
        assert_eq!(times, 3, "{step:?}: own pages, frames, own pages");
        (1..=times).map(move |nth| (step, nth))
    };
    Step::DISCARD.into_iter().flat_map(times).collect()
}

#[test]
fn a_panic_in_a_discard_loses_nothing() {
    for (step, nth) in accidents() {
        let when = format!("a panic at {step:?} {nth}");
        let (world, guests, region) = merged();
        let discard = || world.ksm.discard(region, GONE).unwrap();
        assert!(panics_at(step, nth, discard), "{when}");
        world.ksm.discard(region, GONE).unwrap();
        reads(&guests[0], after, &when);
        goes_on(&world, &guests, &when);
    }
}

#[test]
fn a_thread_that_vanishes_in_a_discard_loses_nothing() {
    for (step, nth) in accidents() {
        let when = format!("gone at {step:?} {nth}");
        let (world, guests, region) = merged();
        let ksm = Arc::clone(&world.ksm);
        let dead = vanishes_at(step, nth, move || ksm.discard(region, GONE).unwrap());
        world.ksm.recover(dead);
        goes_on(&world, &guests, &when);
    }
}

#[cfg(feature = "linux")]
mod on_real_memory {
    use ksm_core::Ksm;
    use linux_common::{Guest, KINDS, Kind, pages};

    use super::*;

    const BYTE: u8 = 7;

    fn merged(
        kind: Kind,
    ) -> (
        Arc<Ksm<ksm_core::backend::linux::LinuxBackend>>,
        [Guest; 2],
        RegionId,
    ) {
        let ksm = Arc::new(Ksm::new(kind.backend(), Config::default()).unwrap());
        let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
        let guests = [(); 2].map(|()| kind.guest(PAGES));
        let [region, _] = guests.each_ref().map(|guest| {
            guest.fill_all(pages(0, PAGES), BYTE);
            ksm.register(space, guest.source(), world::GUARDED).unwrap()
        });
        for _ in 0..3 {
            ksm.scan(u64::MAX).unwrap();
        }
        (ksm, guests, region)
    }

    #[test]
    fn what_is_written_after_an_interrupted_discard_is_kept() {
        for kind in KINDS {
            for step in Step::DISCARD {
                let when = format!("{kind:?}: gone at {step:?}");
                let (ksm, guests, region) = merged(kind);
                let engine = Arc::clone(&ksm);
                let dead = vanishes_at(step, 1, move || engine.discard(region, GONE).unwrap());
                ksm.recover(dead);
                assert_eq!(guests[0].ends(5), (0, 0), "{when}");
                guests[0].fill_all(GONE, BYTE);
                for _ in 0..3 {
                    ksm.scan(u64::MAX).unwrap();
                    ksm.check().unwrap();
                }
                for guest in &guests {
                    for page in 0..PAGES {
                        assert_eq!(guest.ends(page), (BYTE, BYTE), "{when}: page {page}");
                    }
                }
            }
        }
    }
}
