//! The scanner thread: it scans, stops, panics, and is killed.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod vanish;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::page::{PageBuf, PageIndex};
use ksm_core::{Config, Ksm, RegionOptions};
use ksm_vmm_glue::{Pacing, ScannerOptions, ScannerThread, Status, Watch};

const PAGES: u64 = 32;
/// How long anything may take: no test relies on its being short.
const PATIENCE: Duration = Duration::from_secs(60);
const QUICK: Pacing = Pacing {
    pages_to_scan: 1000,
    sleep_millisecs: 1,
};

/// An engine with two guests that are equal.
fn twins() -> (SimBackend, Arc<Ksm<SimBackend>>, [SimGuest; 2]) {
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
    let domain = ksm.create_domain().unwrap();
    let guests = [sim.guest(PAGES), sim.guest(PAGES)];
    for guest in &guests {
        let space = ksm.create_space(domain).unwrap();
        let options = RegionOptions { dma_guarded: true };
        ksm.register(space, guest.clone(), options).unwrap();
        for page in 0..PAGES {
            guest.write(PageIndex(page), &pattern(page + 1));
        }
    }
    (sim, ksm, guests)
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn options(restarts: u32) -> ScannerOptions {
    ScannerOptions {
        pacing: QUICK,
        restarts,
    }
}

/// What is done to the scanning thread, once, when it has stopped pages.
fn once_at_stopped(act: fn()) -> impl Fn() + Send + Sync {
    let left = Arc::new(AtomicU32::new(1));
    move || {
        let left = Arc::clone(&left);
        set_hook(Some(Box::new(move |step| {
            let due = step == Step::Stopped && left.swap(0, Ordering::Relaxed) == 1;
            if due {
                act();
            }
        })));
    }
}

#[test]
fn it_merges_and_stops() {
    let (_, ksm, _) = twins();
    let scanner = ScannerThread::start(Arc::clone(&ksm), options(0)).unwrap();
    wait_until("all pages are merged", || {
        ksm.stats().pages_sharing == PAGES
    });
    assert_eq!(scanner.status(), Status::Running);
    wait_until("the call that merged them is counted", || {
        scanner.tally().pages_scanned >= 2 * PAGES
    });
    assert_eq!(scanner.stop(), Status::Stopped);

    let scanned = ksm.stats().pages_scanned;
    thread::sleep(Duration::from_millis(20));
    assert_eq!(ksm.stats().pages_scanned, scanned);
}

#[test]
fn a_sleeping_scanner_stops_at_once_and_its_pace_can_be_changed() {
    let (_, ksm, _) = twins();
    let a_day = 86_400_000;
    let pacing = Pacing {
        pages_to_scan: 5,
        sleep_millisecs: a_day,
    };
    let options = ScannerOptions {
        pacing,
        restarts: 0,
    };
    let scanner = ScannerThread::start(Arc::clone(&ksm), options).unwrap();
    wait_until("the first pages are scanned", || {
        ksm.stats().pages_scanned > 0
    });
    assert_eq!(ksm.stats().pages_scanned, 5);
    scanner.set_pacing(QUICK);
    assert_eq!(scanner.pacing(), QUICK);
    let (done, stopped) = mpsc::channel();
    thread::spawn(move || done.send(scanner.stop()));
    assert_eq!(stopped.recv_timeout(PATIENCE), Ok(Status::Stopped));
}

#[test]
fn a_panic_is_reported_and_nothing_stays_stopped() {
    let (sim, ksm, guests) = twins();
    let prepare = once_at_stopped(|| panic!("injected"));
    let scanner = ScannerThread::start_with(Arc::clone(&ksm), options(0), prepare).unwrap();
    wait_until("the scanner ends", || scanner.status() != Status::Running);
    let message = "injected".to_owned();
    assert_eq!(scanner.status(), Status::Panicked { message });
    assert!(sim.busy().is_idle());
    check_contents(&guests);
}

#[test]
fn a_panic_before_the_first_pass_is_no_death() {
    let (_, ksm, _) = twins();
    let prepare = || panic!("not prepared");
    let scanner = ScannerThread::start_with(ksm, options(0), prepare).unwrap();
    wait_until("the scanner ends", || scanner.status() != Status::Running);
    let message = "not prepared".to_owned();
    assert_eq!(scanner.status(), Status::Panicked { message });
}

#[test]
fn a_scanner_that_panicked_is_replaced() {
    let (_, ksm, guests) = twins();
    let prepare = once_at_stopped(|| panic!("injected"));
    let scanner = ScannerThread::start_with(Arc::clone(&ksm), options(1), prepare).unwrap();
    wait_until("all pages are merged", || {
        ksm.stats().pages_sharing == PAGES
    });
    assert_eq!(scanner.tally().restarts, 1);
    assert_eq!(scanner.stop(), Status::Stopped);
    check_contents(&guests);
}

#[test]
fn a_killed_scanner_is_noticed_and_cleaned_up_behind() {
    for restarts in [0, 1] {
        let (sim, ksm, guests) = twins();
        let prepare = once_at_stopped(vanish::this_thread);
        let scanner =
            ScannerThread::start_with(Arc::clone(&ksm), options(restarts), prepare).unwrap();
        assert_eq!(
            scanner.watch(),
            Watch::Watched,
            "this test needs Linux 6.9 (PIDFD_THREAD)"
        );
        if restarts == 0 {
            wait_until("the scanner ends", || scanner.status() != Status::Running);
            let Status::Died { leases } = scanner.status() else {
                panic!("{:?}", scanner.status());
            };
            assert!(leases > 0, "it died with pages stopped");
            assert!(sim.busy().is_idle());
        } else {
            wait_until("all pages are merged", || {
                ksm.stats().pages_sharing == PAGES
            });
            assert_eq!(scanner.tally().restarts, 1);
            assert_eq!(scanner.stop(), Status::Stopped);
        }
        check_contents(&guests);
        ksm.check().unwrap();
    }
}

fn check_contents(guests: &[SimGuest; 2]) {
    for guest in guests {
        for page in 0..PAGES {
            let found: PageBuf = guest.read(PageIndex(page));
            assert_eq!(found, *pattern(page + 1), "page {page}");
        }
    }
}
