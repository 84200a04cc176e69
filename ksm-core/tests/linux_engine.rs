//! The engine on real memory, with threads for vCPUs.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod linux_common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::{Config, Ksm, RegionOptions};
use linux_common::{Guest, KINDS, Kind, pages};
use vm_memory::{Bytes, MemoryRegionAddress};

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

fn engine(kind: Kind, config: Config, guests: &[Guest]) -> Ksm<LinuxBackend> {
    let ksm = Ksm::new(kind.backend(), config).unwrap();
    let domain = ksm.create_domain().unwrap();
    for guest in guests {
        let space = ksm.create_space(domain).unwrap();
        ksm.register(space, guest.source(), GUARDED).unwrap();
    }
    ksm
}

fn passes(ksm: &Ksm<LinuxBackend>, count: u64) {
    let until = ksm.stats().full_scans + count;
    while ksm.stats().full_scans < until {
        ksm.scan(1 << 20).unwrap();
    }
}

#[test]
fn equal_guests_share_all_they_have() {
    for kind in KINDS {
        let guests = [kind.guest(256), kind.guest(256)];
        for guest in &guests {
            for page in 0..200 {
                guest.fill(page, 1 + page as u8);
            }
            guest.fill_all(pages(200, 40), 1);
            guest.fill_all(pages(200, 40), 0);
        }
        let ksm = engine(kind, Config::default(), &guests);
        passes(&ksm, 2);
        ksm.check().unwrap();
        let stats = ksm.stats();
        assert_eq!((stats.pages_shared, stats.pages_sharing), (200, 200));
        assert_eq!(stats.ksm_zero_pages, 80);
        assert_eq!(ksm.store_bytes().unwrap(), 200 * 4096);
        for guest in &guests {
            assert_eq!(guest.ends(7), (8, 8));
            assert_eq!(guest.ends(230), (0, 0));
        }
        guests[0].fill(7, 99);
        passes(&ksm, 1);
        assert_eq!(ksm.stats().cow_breaks, 1);
        assert_eq!((guests[0].ends(7), guests[1].ends(7)), ((99, 99), (8, 8)));
        ksm.check().unwrap();
    }
}

/// vCPUs increment a counter in every page, all of them in step, and each
/// checks what it reads; the engine merges at first sight meanwhile. Not one
/// increment may be lost.
#[test]
fn no_increment_is_lost_under_merges() {
    const PAGES: u64 = 64;
    const BREAKS: u64 = 500;
    const MAX_ROUNDS: u64 = 1_000_000;
    for kind in KINDS {
        let guests = [kind.guest(PAGES), kind.guest(PAGES), kind.guest(PAGES)];
        let config = Config {
            settle_passes: 0,
            ..Config::default()
        };
        let ksm = engine(kind, config, &guests);
        let (enough, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let lost = AtomicU64::new(0);
        let in_step = Barrier::new(guests.len());
        let vcpu = |guest: &Guest| {
            for round in 0..MAX_ROUNDS {
                for page in 0..PAGES {
                    let at = MemoryRegionAddress(page * 4096 + 8 * (page % 500));
                    let value: u64 = guest.0.load(at, Ordering::Acquire).unwrap();
                    // Not a panic: the other vCPUs would wait for this one.
                    lost.fetch_add(u64::from(value != round), Ordering::Relaxed);
                    guest.0.store(round + 1, at, Ordering::Release).unwrap();
                }
                // One decides between two waits, so that all stop after the same
                // round.
                if in_step.wait().is_leader() {
                    stop.store(enough.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                in_step.wait();
                if stop.load(Ordering::Relaxed) {
                    return round + 1;
                }
            }
            MAX_ROUNDS
        };
        let rounds: Vec<u64> = thread::scope(|scope| {
            let vcpus = guests.each_ref().map(|guest| scope.spawn(|| vcpu(guest)));
            let running = || vcpus.iter().any(|vcpu| !vcpu.is_finished());
            while ksm.stats().cow_breaks < BREAKS && running() {
                ksm.scan(1 << 20).unwrap();
            }
            enough.store(true, Ordering::Relaxed);
            vcpus.map(|vcpu| vcpu.join().unwrap()).to_vec()
        });
        println!("{kind:?}: {} rounds, {:?}", rounds[0], ksm.stats());
        assert_eq!(lost.into_inner(), 0, "{kind:?}: increments were lost");
        assert!(
            ksm.stats().cow_breaks >= BREAKS,
            "{kind:?}: {:?}",
            ksm.stats()
        );
        passes(&ksm, 2);
        ksm.check().unwrap();
        assert_eq!(ksm.stats().pages_shared, PAGES);
    }
}
