//! Frames that are emptied and moved on real memory, beside a scanner and guests
//! that write.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod linux_common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::{Config, FrameId, Ksm, PageIndex, RegionId, RegionOptions};
use linux_common::{Guest, KINDS, Kind, pages};

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

/// Merges at first sight.
fn engine(kind: Kind, guests: &[Guest]) -> (Ksm<LinuxBackend>, Vec<RegionId>) {
    let config = Config {
        settle_passes: 0,
        ..Config::default()
    };
    let ksm = Ksm::new(kind.backend(), config).unwrap();
    let domain = ksm.create_domain().unwrap();
    let register = |guest: &Guest| {
        let space = ksm.create_space(domain).unwrap();
        ksm.register(space, guest.source(), GUARDED).unwrap()
    };
    let regions = guests.iter().map(register).collect();
    (ksm, regions)
}

fn passes(ksm: &Ksm<LinuxBackend>, count: u64) {
    let until = ksm.stats().full_scans + count;
    while ksm.stats().full_scans < until {
        ksm.scan(1 << 20).unwrap();
    }
}

#[test]
fn a_frame_is_emptied_beside_a_scanner() {
    const GUESTS: u64 = 12;
    for kind in KINDS {
        let guests: Vec<_> = (0..GUESTS).map(|_| kind.guest(8)).collect();
        for guest in &guests {
            (0..8).for_each(|page| guest.fill(page, 1 + page as u8));
        }
        let (ksm, regions) = engine(kind, &guests);
        passes(&ksm, 2);
        let stop = AtomicBool::new(false);
        let running = || !stop.load(Ordering::Relaxed);
        thread::scope(|scope| {
            scope.spawn(|| {
                while running() {
                    ksm.scan(1 << 20).unwrap();
                }
            });
            // One page is written, with what it holds, all the while.
            scope.spawn(|| {
                while running() {
                    guests[3].fill(3, 4);
                }
            });
            let unshared: Result<Vec<_>, _> = (0..100_usize)
                .map(|round| ksm.unshare_frame(regions[round % regions.len()], PageIndex(3)))
                .collect();
            stop.store(true, Ordering::Relaxed);
            let unshared = unshared.unwrap();
            assert!(unshared.iter().all(|&pages| pages <= GUESTS), "{kind:?}");
            assert!(unshared.iter().any(|&pages| pages > 1), "{kind:?}");
        });
        passes(&ksm, 2);
        ksm.check().unwrap();
        for guest in &guests {
            (0..8).for_each(|page| assert_eq!(guest.ends(page), (1 + page as u8, 1 + page as u8)));
        }
    }
}

#[test]
fn a_store_is_compacted() {
    for kind in KINDS {
        let guests = [kind.guest(64), kind.guest(64)];
        for guest in &guests {
            (0..64).for_each(|page| guest.fill(page, 1 + page as u8));
        }
        let (ksm, regions) = engine(kind, &guests);
        passes(&ksm, 2);
        for page in (0..64).step_by(2) {
            for &region in &regions {
                ksm.discard(region, pages(page, 1)).unwrap();
            }
        }
        let frame = |page| ksm.explain(regions[1], PageIndex(page)).unwrap().frame;
        let half = FrameId(32);
        for page in (1..64).step_by(2) {
            if frame(page) >= Some(half) {
                let moved = ksm.move_frame(regions[0], PageIndex(page)).unwrap();
                let moved = moved.unwrap();
                assert_eq!(
                    (moved.moved, moved.to < half),
                    (2, true),
                    "{kind:?} {moved:?}"
                );
            }
        }
        ksm.check().unwrap();
        assert_eq!(ksm.store_bytes().unwrap(), 32 * 4096);
        for page in (1..64).step_by(2) {
            assert!(frame(page).is_some_and(|frame| frame < half));
            let byte = 1 + page as u8;
            assert!(guests.iter().all(|guest| guest.ends(page) == (byte, byte)));
        }
    }
}
