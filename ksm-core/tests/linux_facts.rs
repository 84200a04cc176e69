//! The kernel facts that lose data or hang a vCPU if they are ignored, by their
//! numbers in the design notes: each test fails on a backend that does.
#![cfg(feature = "linux")]

mod linux_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ksm_core::backend::linux::{Fds, LinuxBackend, OpenError, StopMethod};
use ksm_core::backend::{Backend, Backing, FrameStore, Memory, PageState, Refusal, RegionOptions};
use ksm_core::page::{FrameId, FrameRange, PageBuf, PageIndex};
use linux_common::{
    Bench, Child, FixedBuffers, Guest, METHODS, backend, eventually, full_of, pages, swap_is_on,
    user_mode_only_userfaultfd,
};
use rustix::fs::FallocateFlags;
use rustix::mm::Advice;

const FRAMES: FrameRange = FrameRange {
    start: FrameId(0),
    len: 4,
};

/// Fact 1: the store can be punched; who gets it to read can do neither that
/// nor write.
#[test]
fn fact_1_the_store_is_punched_by_its_owner_alone() {
    let store = backend(StopMethod::Auto).open_store().unwrap();
    for frame in FRAMES.iter() {
        store.fill(frame, &full_of(3)).unwrap();
    }
    let before = store.allocated_bytes().unwrap();
    store.punch(FrameRange::one(FrameId(1))).unwrap();
    assert_eq!(store.allocated_bytes().unwrap(), before - 4096);
    let mut buf = full_of(1);
    store.read(FrameId(1), &mut buf).unwrap();
    assert!(buf.is_zero());
    let reader = store.open_read_only().unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(&reader, punch, 0, 4096).is_err());
    assert!(rustix::io::pwrite(&reader, &[1], 0).is_err());
    assert!(rustix::fs::ftruncate(&reader, 0).is_err());
    let mut byte = [0];
    rustix::io::pread(&reader, &mut byte, 0).unwrap();
    assert_eq!(byte, [3]);
}

/// Fact 2: a punched frame leaves the copies; an untouched merged page is not a
/// copy, and is not made to look like one.
#[test]
fn fact_2_copies_outlive_their_frame_and_untouched_pages_are_none() {
    for method in METHODS {
        let bench = Bench::new(method, 8);
        let range = pages(0, 8);
        bench.guest.fill_all(range, 7);
        bench.merge(range, 0, 7);
        bench.guest.fill(2, 9);
        assert_eq!(bench.guest.ends(3), (7, 7));
        let held = bench.stop(range, Backing::Frame);
        assert_eq!(held.held, [pages(2, 1)], "{method:?}");
        assert_eq!(held.refused.len(), 7);
        assert!(held.refused.iter().all(|(_, why)| *why == Refusal::Raced));
        bench.memory.lift(range, Backing::Frame);
        let states: Vec<_> = (0..8).map(|page| bench.state(page)).collect();
        let mut expected = [None; 8];
        expected[2] = Some(PageState::Private);
        expected[3] = Some(PageState::File);
        assert_eq!(states, expected, "{method:?}: no marker lingers");
        bench.memory.populate(range).unwrap();
        let all = FrameRange {
            start: FrameId(0),
            len: 8,
        };
        bench.store.punch(all).unwrap();
        assert_eq!(bench.guest.ends(2), (9, 9));
        assert_eq!(bench.guest.ends(0), (7, 7));
    }
}

/// Fact 3: a hole in a stopped run is not held; what is written to it survives.
#[test]
fn fact_3_a_hole_is_not_held() {
    for method in METHODS {
        let bench = Bench::new(method, 8);
        bench.guest.fill_all(pages(0, 3), 7);
        bench.guest.fill_all(pages(4, 4), 7);
        bench.frames(0, 8, 7);
        let held = bench.stop(pages(0, 8), Backing::Own);
        assert_eq!(held.held, [pages(0, 3), pages(4, 4)], "{method:?}");
        assert_eq!(held.refused, [(PageIndex(3), Refusal::Raced)]);
        let vcpu = bench.guest.writes(3, 5);
        std::thread::sleep(linux_common::MOMENT);
        for (range, first) in [(pages(0, 3), 0), (pages(4, 4), 4)] {
            bench
                .memory
                .share(range, Backing::Own, &bench.store, FrameId(first))
                .unwrap();
        }
        bench.memory.lift(pages(0, 8), Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(3), (5, 0), "{method:?}");
        assert_eq!(bench.guest.ends(7), (7, 7));
    }
}

/// Fact 3, again and again: pages that are written while they are stopped,
/// merged, zeroed and restored lose no write.
#[test]
fn fact_3_writes_beside_merges_are_not_lost() {
    const PAGES: u64 = 32;
    for method in METHODS {
        let bench = Bench::new(method, PAGES);
        bench.frames(0, u32::try_from(PAGES).unwrap(), 0);
        let stop = Arc::new(AtomicBool::new(false));
        let writer = {
            let (guest, stop) = (bench.guest.clone(), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut rounds = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let byte = u8::try_from(rounds % 255).unwrap() + 1;
                    for page in 0..PAGES {
                        // Half of the pages are zero at any time.
                        guest.fill((page + PAGES / 2) % PAGES, 0);
                        guest.store(page, byte);
                    }
                    for page in PAGES / 2..PAGES {
                        assert_eq!(guest.ends(page).0, byte, "page {page} lost a write");
                    }
                    rounds += 1;
                }
                rounds
            })
        };
        let (mut merged, mut zeroed) = (0, 0);
        eventually(|| {
            for _ in 0..20 {
                zeroed += bench.replace_zeros(pages(0, PAGES), None);
                merged += bench.replace_zeros(pages(0, PAGES), Some(FrameId(0)));
            }
            (merged > 200 && zeroed > 200) || writer.is_finished()
        });
        stop.store(true, Ordering::Relaxed);
        let rounds = writer.join().expect("no write is lost");
        eprintln!("{method:?}: {rounds} rounds, {merged} merged, {zeroed} zeroed");
    }
}

/// Fact 4: the marker survives the copy that is dropped; who waits there must be
/// let go.
#[test]
fn fact_4_a_writer_that_waits_on_a_reused_page_runs_on() {
    for method in METHODS {
        let bench = Bench::new(method, 4);
        bench.guest.fill_all(pages(0, 4), 7);
        bench.merge(pages(0, 4), 0, 7);
        bench.memory.populate(pages(0, 4)).unwrap();
        bench.stop_all(pages(0, 4), Backing::Frame);
        let vcpu = bench.guest.writes(1, 9);
        assert!(vcpu.waits());
        bench.memory.reuse(pages(0, 4)).unwrap();
        bench.memory.lift(pages(0, 4), Backing::Frame);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(1), (9, 7));
        assert_eq!(bench.state(0), None, "{method:?}: no marker lingers");
    }
}

/// Fact 5: a lift over mappings of which one is not registered frees them all.
#[test]
fn fact_5_a_lift_passes_over_mappings_that_are_not_registered() {
    for method in METHODS {
        let options = RegionOptions { dma_guarded: false };
        let bench = Bench::with(backend(method), Guest::new(12), options);
        bench.guest.fill_all(pages(0, 12), 7);
        bench.frames(0, 4, 7);
        bench.stop_all(pages(0, 12), Backing::Own);
        let early = bench.guest.writes(1, 8);
        let late = bench.guest.writes(10, 9);
        bench
            .memory
            .share(pages(2, 2), Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        // Replaced by nobody we know of.
        bench.guest.map_anonymous_over(pages(6, 2));
        assert!(early.waits() && late.waits());
        bench.memory.lift(pages(0, 12), Backing::Own);
        early.runs_on();
        late.runs_on();
        assert_eq!(bench.guest.ends(10), (9, 7), "{method:?}");
        assert_eq!(bench.guest.ends(2), (7, 7), "{method:?}");
        // Such a range can still be stopped, and let go.
        bench.guest.fill_all(pages(4, 8), 6);
        bench.stop_all(pages(4, 8), Backing::Own);
        let vcpu = bench.guest.writes(11, 5);
        assert!(vcpu.waits(), "{method:?}");
        bench.memory.lift(pages(4, 8), Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(6), (6, 6));
    }
}

/// Fact 6: a page that a device may write to is refused, by itself; the pages
/// around it are held.
#[test]
fn fact_6_a_pinned_page_is_refused_alone() {
    let bench = Bench::new(StopMethod::Move, 16);
    bench.guest.fill_all(pages(0, 16), 7);
    let pin = FixedBuffers::new(&bench.guest, pages(5, 2));
    let held = bench.stop(pages(0, 16), Backing::Own);
    assert_eq!(held.held, [pages(0, 5), pages(7, 9)]);
    let pinned = [5, 6].map(|page| (PageIndex(page), Refusal::Pinned));
    assert_eq!(held.refused, pinned);
    bench.guest.writes(5, 1).runs_on();
    bench.memory.lift(pages(0, 16), Backing::Own);
    assert_eq!(bench.guest.ends(15), (7, 7));
    drop(pin);
    // io_uring lets go of its buffers in its own time.
    eventually(|| {
        let held = bench.stop(pages(0, 16), Backing::Own);
        bench.memory.lift(pages(0, 16), Backing::Own);
        held.refused.is_empty()
    });
    assert_eq!(bench.guest.ends(5), (1, 7));
}

/// Fact 6: pages that a child shares are refused and told apart; once it is
/// gone they are held.
#[test]
fn fact_6_pages_shared_by_a_fork_are_not_exclusive() {
    let guest = Guest::new(8);
    guest.fill_all(pages(0, 8), 7);
    let child = Child::fork();
    let bench = Bench::with(backend(StopMethod::Move), guest, RegionOptions::default());
    let held = bench.stop(pages(0, 8), Backing::Own);
    assert!(held.held.is_empty());
    assert_eq!(held.refused.len(), 8);
    assert!(
        held.refused
            .iter()
            .all(|(_, why)| *why == Refusal::NotExclusive)
    );
    bench.memory.lift(pages(0, 8), Backing::Own);
    child.end();
    bench.stop_all(pages(0, 8), Backing::Own);
    bench.memory.lift(pages(0, 8), Backing::Own);
    assert_eq!(bench.guest.ends(7), (7, 7));
    // Attached memory is not shared by later forks.
    let child = Child::fork();
    bench.stop_all(pages(0, 8), Backing::Own);
    bench.memory.lift(pages(0, 8), Backing::Own);
    child.end();
}

/// Fact 7: pages that are out come back when the memory is dropped, or the
/// thread that took them out is gone.
#[test]
fn fact_7_pages_that_are_out_come_back() {
    for method in METHODS {
        let bench = Bench::new(method, 8);
        bench.guest.fill_all(pages(0, 8), 7);
        std::thread::scope(|scope| {
            scope.spawn(|| bench.stop_all(pages(0, 8), Backing::Own));
        });
        let vcpu = bench.guest.writes(3, 9);
        assert!(vcpu.waits());
        std::thread::scope(|scope| {
            scope.spawn(|| bench.memory.lift(pages(0, 8), Backing::Own));
        });
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(3), (9, 7));
        bench.stop_all(pages(0, 8), Backing::Own);
        let vcpu = bench.guest.writes(4, 9);
        assert!(vcpu.waits());
        let guest = bench.guest.clone();
        drop(bench);
        vcpu.runs_on();
        for page in [0, 1, 7] {
            assert_eq!(guest.ends(page), (7, 7), "{method:?}");
        }
        assert_eq!(guest.ends(4), (9, 7));
        let flags = guest.vm_flags(0);
        assert!(
            !flags
                .iter()
                .any(|flag| ["um", "uw", "dc"].contains(&&**flag))
        );
    }
}

/// Fact 7: a stop that finds pages of a forgotten run puts them back first.
#[test]
fn fact_7_a_forgotten_run_is_put_back_by_the_next_stop() {
    for method in METHODS {
        let bench = Bench::new(method, 16);
        bench.guest.fill_all(pages(0, 8), 7);
        bench.guest.fill_all(pages(8, 8), 8);
        bench.stop_all(pages(0, 8), Backing::Own);
        bench.stop_all(pages(8, 8), Backing::Own);
        bench.memory.lift(pages(8, 8), Backing::Own);
        bench.memory.lift(pages(0, 8), Backing::Own);
        assert_eq!(bench.guest.ends(0), (7, 7), "{method:?}");
        assert_eq!(bench.guest.ends(15), (8, 8), "{method:?}");
        bench.guest.writes(0, 1).runs_on();
    }
}

/// Fact 8: populating does not wait for itself once the stop is lifted.
#[test]
fn fact_8_a_lifted_range_can_be_populated() {
    for method in METHODS {
        let bench = Arc::new(Bench::new(method, 8));
        bench.guest.fill_all(pages(0, 8), 7);
        bench.merge(pages(0, 8), 0, 7);
        bench.guest.fill_all(pages(0, 4), 7);
        bench.stop(pages(0, 8), Backing::Frame);
        bench.memory.lift(pages(0, 8), Backing::Frame);
        let populated = {
            let bench = Arc::clone(&bench);
            linux_common::Vcpu::run(move || bench.memory.populate(pages(0, 8)).unwrap())
        };
        populated.runs_on();
        assert_eq!(bench.state(7), Some(PageState::Private));
    }
}

/// Fact 10: memory that was locked after it was registered is still discarded.
#[test]
fn fact_10_locked_memory_is_discarded_all_the_same() {
    for method in METHODS {
        let bench = Bench::new(method, 4);
        bench.guest.fill_all(pages(0, 4), 7);
        bench.guest.lock(pages(0, 4));
        bench.memory.discard(pages(0, 2), Backing::Own).unwrap();
        assert_eq!(bench.guest.ends(1), (0, 0));
        assert_eq!(bench.guest.ends(2), (7, 7));
    }
}

/// Fact 11: what a mapping carried, the mapping in its place carries too.
#[test]
fn fact_11_new_mappings_carry_what_the_old_ones_did() {
    for method in METHODS {
        let guest = Guest::new(16);
        guest.advise(pages(0, 16), Advice::LinuxDontDump);
        let bench = Bench::with(backend(method), guest, RegionOptions { dma_guarded: true });
        let carries = |page: u64, wanted: &[&str], what: &str| {
            let flags = bench.guest.vm_flags(page);
            for flag in wanted {
                assert!(
                    flags.iter().any(|has| has == flag),
                    "{method:?}: {what} lacks {flag}: {flags:?}"
                );
            }
        };
        let own: &[&str] = match method {
            StopMethod::WriteProtect => &["dd", "dc", "nh", "uw"],
            _ => &["dd", "dc", "nh"],
        };
        bench.guest.fill_all(pages(0, 16), 7);
        carries(3, own, "attached memory");
        bench.merge(pages(0, 12), 0, 7);
        carries(3, &["dd", "dc", "uw"], "a merged page");
        bench.memory.populate(pages(0, 12)).unwrap();
        bench.stop_all(pages(0, 4), Backing::Frame);
        bench.memory.restore(pages(0, 4)).unwrap();
        bench.memory.lift(pages(0, 4), Backing::Frame);
        carries(1, own, "a restored page");
        bench.memory.discard(pages(4, 4), Backing::Frame).unwrap();
        carries(5, own, "a discarded page");
        bench.stop_all(pages(8, 4), Backing::Frame);
        bench.memory.zero(pages(8, 4), Backing::Frame).unwrap();
        bench.memory.lift(pages(8, 4), Backing::Frame);
        carries(9, own, "a zero page");
        carries(13, own, "a page that never was merged");
    }
}

/// Fact 11: what is no secret is told to new mappings once for many stops.
#[test]
fn fact_11_new_mappings_are_kept_from_forks_at_last() {
    let guest = Guest::new(16);
    let backend = backend(StopMethod::Move);
    let bench = Bench::with(backend, guest, RegionOptions::default());
    bench.guest.fill_all(pages(0, 16), 7);
    bench.merge(pages(0, 4), 0, 7);
    bench.merge(pages(8, 4), 4, 7);
    bench.memory.rest();
    for page in [1, 5, 9, 15] {
        let flags = bench.guest.vm_flags(page);
        assert!(flags.contains(&"dc".into()), "page {page}: {flags:?}");
    }
}

/// Fact 13: a userfaultfd that does not stop the kernel is refused; ours does.
#[test]
fn fact_13_the_kernels_own_writes_are_stopped() {
    let fds = Fds {
        userfaultfd: user_mode_only_userfaultfd(),
        ..Fds::open().unwrap()
    };
    let refused = LinuxBackend::from_fds(fds).expect_err("it must be refused");
    assert!(matches!(refused, OpenError::UserModeOnly), "{refused:?}");
    for method in METHODS {
        let bench = Bench::new(method, 4);
        bench.guest.fill_all(pages(0, 4), 7);
        bench.stop_all(pages(0, 4), Backing::Own);
        let kernel = bench.guest.kernel_reads_into(2);
        assert!(kernel.waits(), "{method:?}");
        bench.memory.lift(pages(0, 4), Backing::Own);
        kernel.runs_on();
        assert_eq!(bench.guest.ends(2), (0, 7));
    }
}

/// Fact 14: a frame that is filled has memory before a page maps it, and one without
/// any is read without getting some.
#[test]
fn fact_14_filled_frames_hold_memory() {
    let store = backend(StopMethod::Auto).open_store().unwrap();
    let start = store.allocated_bytes().unwrap();
    let frames = FrameRange {
        start: FrameId(1000),
        len: 300,
    };
    for frame in frames.iter() {
        store.fill(frame, &full_of(1)).unwrap();
    }
    let filled = store.allocated_bytes().unwrap();
    assert_eq!(filled - start, 300 * 4096);
    let mut buf = PageBuf::zeroed();
    store.read(FrameId(0), &mut buf).unwrap();
    assert!(buf.is_zero());
    assert_eq!(store.allocated_bytes().unwrap(), filled);
}

/// Fact 15: swapped pages are stopped and merged like others.
#[test]
fn fact_15_swapped_pages_are_stopped() {
    if !swap_is_on() {
        eprintln!("this machine has no swap: only pages in memory were seen");
    }
    for method in METHODS {
        let bench = Bench::new(method, 8);
        bench.guest.fill_all(pages(0, 8), 7);
        bench.guest.advise(pages(0, 8), Advice::LinuxPageOut);
        if swap_is_on() {
            let swapped = bench.runs(pages(0, 8));
            assert!(swapped.iter().any(|run| run.state == PageState::Swapped));
        }
        bench.stop_all(pages(0, 8), Backing::Own);
        let vcpu = bench.guest.writes(2, 9);
        assert!(vcpu.waits());
        assert_eq!(bench.held(2, Backing::Own).bytes()[9], 7);
        bench.guest.advise(pages(0, 8), Advice::LinuxPageOut);
        bench.frames(0, 8, 7);
        bench
            .memory
            .share(pages(0, 4), Backing::Own, &bench.store, FrameId(0))
            .unwrap();
        bench.memory.lift(pages(0, 8), Backing::Own);
        vcpu.runs_on();
        assert_eq!(bench.guest.ends(2), (9, 7));
        assert_eq!(bench.guest.ends(7), (7, 7));
    }
}
