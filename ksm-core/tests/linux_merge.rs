//! Merging, copying, giving back: the ordinary life of a page, by both ways to
//! stop writes.
#![cfg(feature = "linux")]

mod linux_common;

use ksm_core::backend::linux::StopMethod;
use ksm_core::backend::{Backing, FrameStore, Memory, PageState, RegionOptions, Settled};
use ksm_core::page::{FrameId, PageRange};
use linux_common::{Bench, Guest, METHODS, Vcpu, backend, pages};
use rustix::mm::Advice;

#[test]
fn a_stopped_page_waits_and_a_lifted_one_goes_on() {
    for method in METHODS {
        let bench = Bench::new(method, 16);
        let range = pages(4, 4);
        bench.guest.fill_all(range, 7);
        bench.stop_all(range, Backing::Own);
        let vcpu = bench.guest.writes(5, 9);
        assert!(vcpu.waits(), "{method:?}");
        assert_eq!(bench.held(5, Backing::Own).bytes()[0], 7);
        bench.memory.lift(range, Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(5), (9, 7), "{method:?}");
        assert_eq!(bench.guest.ends(4), (7, 7), "{method:?}");
    }
}

#[test]
fn a_merged_page_shows_its_frame_and_a_write_to_it_is_copied() {
    for method in METHODS {
        let bench = Bench::new(method, 16);
        let range = pages(4, 4);
        bench.guest.fill_all(range, 7);
        bench.frames(0, 4, 7);
        bench.stop_all(range, Backing::Own);
        let vcpu = bench.guest.writes(6, 9);
        assert!(vcpu.waits());
        bench
            .memory
            .share(range, Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.memory.lift(range, Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(4), (7, 7));
        assert_eq!(bench.guest.ends(6), (9, 7));
        assert_eq!(bench.state(4), Some(PageState::File), "{method:?}");
        assert_eq!(bench.state(5), None, "{method:?}: merged, untouched");
        assert_eq!(bench.state(6), Some(PageState::Private), "{method:?}");
        // Merged again with the frame below, then with another.
        bench.guest.fill(6, 7);
        bench.stop_all(pages(6, 1), Backing::Frame);
        bench.memory.reuse(pages(6, 1)).unwrap();
        bench.memory.lift(pages(6, 1), Backing::Frame);
        assert_eq!(bench.guest.ends(6), (7, 7));
        assert_eq!(bench.state(6), Some(PageState::File), "{method:?}");
        bench.frames(9, 1, 8);
        bench.guest.fill(6, 8);
        bench.stop_all(pages(6, 1), Backing::Frame);
        bench
            .memory
            .share(pages(6, 1), Backing::Frame, &bench.store, FrameId(9))
            .unwrap();
        bench.memory.lift(pages(6, 1), Backing::Frame);
        assert_eq!(bench.guest.ends(6), (8, 8));
        assert_eq!(bench.state(6), Some(PageState::File), "{method:?}");
    }
}

#[test]
fn zero_pages_read_zero_whatever_lay_below() {
    for method in METHODS {
        let bench = Bench::new(method, 16);
        bench.guest.fill_all(pages(0, 4), 0);
        bench.stop_all(pages(0, 4), Backing::Own);
        let vcpu = bench.guest.writes(2, 1);
        assert!(vcpu.waits());
        bench.memory.zero(pages(0, 4), Backing::Own).unwrap();
        bench.memory.lift(pages(0, 4), Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(0), (0, 0));
        assert_eq!(bench.guest.ends(2), (1, 0));
        assert_eq!(bench.state(0), Some(PageState::Zero), "{method:?}");
        assert_eq!(bench.state(1), None, "{method:?}");
        // Over a frame that is not zero.
        bench.guest.fill(8, 5);
        bench.merge(pages(8, 1), 0, 5);
        bench.guest.fill(8, 0);
        bench.stop_all(pages(8, 1), Backing::Frame);
        bench.memory.zero(pages(8, 1), Backing::Frame).unwrap();
        bench.memory.lift(pages(8, 1), Backing::Frame);
        assert_eq!(bench.guest.ends(8), (0, 0));
        bench.guest.fill(8, 6);
        bench.stop_all(pages(8, 1), Backing::Own);
        bench.memory.lift(pages(8, 1), Backing::Own);
        assert_eq!(bench.guest.ends(8), (6, 6));
    }
}

#[test]
fn restored_and_discarded_pages_are_the_guests_own_again() {
    for method in METHODS {
        let bench = Bench::new(method, 16);
        bench.guest.fill_all(pages(0, 8), 5);
        bench.merge(pages(0, 8), 0, 5);
        bench.memory.populate(pages(0, 8)).unwrap();
        let runs = bench.runs(pages(0, 16));
        assert_eq!(runs.len(), 1);
        assert_eq!(
            (runs[0].range, runs[0].state),
            (pages(0, 8), PageState::Private)
        );
        bench.stop_all(pages(0, 4), Backing::Frame);
        let vcpu = bench.guest.writes(1, 6);
        assert!(vcpu.waits());
        bench.memory.restore(pages(0, 4)).unwrap();
        bench.memory.lift(pages(0, 4), Backing::Frame);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(1), (6, 5), "{method:?}");
        bench.memory.discard(pages(4, 4), Backing::Frame).unwrap();
        bench.memory.discard(pages(0, 1), Backing::Own).unwrap();
        assert_eq!(bench.guest.ends(0), (0, 0));
        assert_eq!(bench.guest.ends(2), (5, 5));
        assert_eq!(bench.guest.ends(5), (0, 0), "{method:?}: no stale frame");
        // All of it can be stopped as what it is now.
        bench.guest.fill_all(pages(0, 8), 3);
        bench.stop_all(pages(0, 8), Backing::Own);
        bench.memory.lift(pages(0, 8), Backing::Own);
        assert_eq!(bench.guest.ends(7), (3, 3));
        assert!(bench.guest.vm_flags(5).contains(&"dc".into()));
    }
}

#[test]
fn a_settled_range_is_kept_before_and_replaced_after() {
    for method in METHODS {
        let bench = Bench::new(method, 16);
        let range = pages(0, 4);
        bench.guest.fill_all(range, 5);
        bench.frames(0, 4, 5);
        bench.stop_all(range, Backing::Own);
        assert_eq!(bench.memory.settle(range, Backing::Own), Settled::Kept);
        assert_eq!(bench.memory.settle(range, Backing::Own), Settled::Kept);
        bench.guest.fill(0, 5);
        bench.stop_all(range, Backing::Own);
        bench
            .memory
            .share(range, Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        assert_eq!(bench.memory.settle(range, Backing::Own), Settled::Replaced);
        assert_eq!(bench.memory.settle(range, Backing::Own), Settled::Replaced);
        bench.memory.populate(range).unwrap();
        bench.stop_all(range, Backing::Frame);
        assert_eq!(bench.memory.settle(range, Backing::Frame), Settled::Kept);
        bench.stop_all(range, Backing::Frame);
        bench.memory.restore(range).unwrap();
        assert_eq!(
            bench.memory.settle(range, Backing::Frame),
            Settled::Replaced
        );
        bench.guest.fill_all(range, 0);
        bench.stop_all(range, Backing::Own);
        bench.memory.zero(range, Backing::Own).unwrap();
        assert_eq!(bench.memory.settle(range, Backing::Own), Settled::Replaced);
        assert_eq!(bench.guest.ends(3), (0, 0));
        bench.guest.fill(3, 1);
        assert!(bench.store.allocated_bytes().unwrap() >= 4 * 4096);
    }
}

#[test]
fn a_run_across_mappings_is_stopped_whole() {
    for method in METHODS {
        let guest = Guest::new(64);
        guest.advise(pages(20, 7), Advice::LinuxDontDump);
        let bench = Bench::with(backend(method), guest, RegionOptions { dma_guarded: true });
        bench.guest.fill_all(pages(0, 64), 7);
        bench.stop_all(pages(3, 60), Backing::Own);
        let vcpus = [3, 19, 20, 26, 27, 62].map(|page| bench.guest.writes(page, 9));
        assert!(vcpus.iter().all(Vcpu::waits), "{method:?}");
        bench.frames(0, 8, 7);
        bench
            .memory
            .share(pages(18, 4), Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.memory.lift(pages(3, 60), Backing::Own);
        vcpus.into_iter().for_each(Vcpu::runs_on);
        for page in 0..64 {
            let first = if [3, 19, 20, 26, 27, 62].contains(&page) {
                9
            } else {
                7
            };
            assert_eq!(bench.guest.ends(page), (first, 7), "{method:?} page {page}");
        }
        let dumped = |page| !bench.guest.vm_flags(page).contains(&"dd".into());
        assert!(dumped(19) && !dumped(20) && !dumped(21) && dumped(40));
    }
}

#[test]
fn the_longest_stop_works_and_a_longer_one_is_refused() {
    for method in METHODS {
        let bench = Bench::new(method, 600);
        let longest = bench.memory.max_stop();
        bench.guest.fill_all(pages(0, 600), 7);
        bench.stop_all(pages(300, longest), Backing::Own);
        assert_eq!(bench.held(300 + longest - 1, Backing::Own).bytes()[1], 7);
        bench.memory.lift(pages(300, longest), Backing::Own);
        assert!(
            bench
                .memory
                .stop(pages(0, longest + 1), Backing::Own)
                .is_err()
        );
        assert!(bench.memory.stop(pages(599, 2), Backing::Own).is_err());
        bench.guest.fill_all(pages(0, 600), 8);
    }
}

#[test]
fn holes_are_not_seen_and_a_limit_is_kept() {
    let bench = Bench::new(StopMethod::Auto, 1 << 20);
    for page in [5, 6, 70_000, 1_000_000] {
        bench.guest.fill(page, 7);
    }
    let mut runs = Vec::new();
    let all = pages(0, 1 << 20);
    let next = bench.memory.populated(all, 3, &mut runs).unwrap();
    let seen: Vec<_> = runs.iter().map(|run| run.range).collect();
    assert_eq!(seen, [pages(5, 2), pages(70_000, 1)]);
    assert!((70_001..=1_000_000).contains(&next.0));
    runs.clear();
    let rest = PageRange {
        start: next,
        end: all.end,
    };
    assert_eq!(bench.memory.populated(rest, 9, &mut runs).unwrap(), all.end);
    assert_eq!(runs.len(), 1);
    assert_eq!(runs[0].range, pages(1_000_000, 1));
    assert!(!runs[0].huge);
}

/// Hundreds of runs in one call of the kernel's, and more.
#[test]
fn every_other_page_is_seen() {
    let bench = Bench::new(StopMethod::Auto, 2000);
    for page in (0..2000).step_by(2) {
        bench.guest.fill(page, 7);
    }
    let runs = bench.runs(pages(0, 2000));
    assert_eq!(runs.len(), 1000);
    assert!(runs.iter().all(|run| run.range.len() == 1));
    let held = bench.stop(pages(0, 256), Backing::Own);
    assert_eq!((held.held.len(), held.refused.len()), (128, 128));
    bench.memory.lift(pages(0, 256), Backing::Own);
    bench.guest.fill_all(pages(0, 256), 1);
}

#[test]
fn pages_that_are_not_held_are_not_replaced() {
    for method in METHODS {
        let bench = Bench::new(method, 8);
        bench.guest.fill_all(pages(0, 8), 7);
        bench.frames(0, 8, 7);
        let share = |range| {
            bench
                .memory
                .share(range, Backing::Own, &bench.store, FrameId(0))
        };
        assert!(share(pages(0, 4)).is_err(), "nothing is stopped");
        bench.stop_all(pages(0, 4), Backing::Own);
        assert!(share(pages(2, 4)).is_err(), "half of it is not");
        assert!(bench.memory.zero(pages(4, 1), Backing::Own).is_err());
        bench.memory.lift(pages(0, 4), Backing::Own);
        assert!(share(pages(0, 4)).is_err(), "it was lifted");
        assert!(bench.memory.reuse(pages(0, 4)).is_err());
        assert!(bench.memory.restore(pages(0, 4)).is_err());
        assert_eq!(bench.guest.ends(0), (7, 7));
        bench.guest.fill_all(pages(0, 8), 8);
    }
}
