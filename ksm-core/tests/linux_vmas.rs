//! No mappings left. One test: it spends all that the process has.
#![cfg(feature = "linux")]

mod linux_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ksm_core::backend::{Backing, Memory};
use ksm_core::error::BackendError;
use ksm_core::page::FrameId;
use linux_common::{Bench, METHODS, SpentVmas, pages};

#[test]
fn without_mappings_to_spend_the_guest_keeps_its_pages() {
    for method in METHODS {
        let bench = Bench::new(method, 64);
        bench.guest.fill_all(pages(0, 64), 7);
        bench.frames(0, 64, 7);
        bench.merge(pages(32, 8), 0, 7);
        bench.memory.populate(pages(32, 8)).unwrap();
        // A share that finds none: the pages are still held.
        bench.stop_all(pages(8, 8), Backing::Own);
        let vcpu = bench.guest.writes(9, 9);
        // No thread can be made without mappings either.
        let go = Arc::new(AtomicBool::new(false));
        let late_vcpu = bench.guest.writes_after(&go, 34, 9);
        assert!(vcpu.waits() && late_vcpu.waits());
        let spent = SpentVmas::all();
        let error = bench
            .memory
            .share(pages(10, 2), Backing::Own, &bench.store, FrameId(0))
            .expect_err("a mapping in the middle of another costs two");
        assert!(
            matches!(error, BackendError::NoVmas),
            "{method:?}: {error:?}"
        );
        assert!(vcpu.waits());
        assert_eq!(bench.held(10, Backing::Own).bytes()[5], 7);
        bench.memory.lift(pages(8, 8), Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(9), (9, 7));
        assert_eq!(bench.guest.ends(10), (7, 7));
        // A stop that needs some finds none; one that does not, works.
        let rest = SpentVmas::all();
        let stopped = bench.memory.stop(pages(48, 4), Backing::Own);
        if bench.moves(method) {
            let error = stopped.expect_err("to register a part splits a mapping");
            assert!(matches!(error, BackendError::NoVmas), "{error:?}");
        } else {
            assert_eq!(stopped.unwrap().held, [pages(48, 4)]);
            bench.memory.lift(pages(48, 4), Backing::Own);
        }
        // Nor can copies be moved over a part of the frames.
        bench.stop_all(pages(34, 2), Backing::Frame);
        go.store(true, Ordering::Release);
        let error = bench
            .memory
            .restore(pages(34, 2))
            .expect_err("no mapping is left");
        assert!(
            matches!(error, BackendError::NoVmas),
            "{method:?}: {error:?}"
        );
        let error = bench
            .memory
            .discard(pages(37, 1), Backing::Frame)
            .expect_err("no mapping is left");
        assert!(matches!(error, BackendError::NoVmas), "{error:?}");
        assert!(!bench.memory.rejoins(), "nothing would be gained");
        assert!(late_vcpu.waits());
        bench.memory.lift(pages(34, 2), Backing::Frame);
        late_vcpu.runs_on();
        assert_eq!(bench.guest.ends(37), (7, 7));
        assert_eq!(bench.guest.ends(34), (9, 7));
        bench.guest.fill_all(pages(0, 64), 5);
        drop((spent, rest));
        assert!(bench.memory.rejoins(), "there is room again");
        bench.merge(pages(0, 32), 0, 5);
        assert_eq!(bench.guest.ends(31), (5, 5));
    }
}
