//! That the model behaves as the contract's table says, and that each of its
//! demands is heard.

use super::*;
use crate::backend::{Backing, FrameStore, Held, Memory, PageRun, PageState, Refusal, Settled};
use crate::page::{FrameId, FrameRange, PageBuf, PageIndex, PageRange};

const P: PageIndex = PageIndex(3);

fn one(page: u64) -> PageRange {
    PageRange::one(PageIndex(page))
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIndex(start), len)
}

/// A guest of 32 pages, registered, and a store with frames 0 to 7, of which
/// frame n holds pattern n.
struct Lab {
    sim: SimBackend,
    guest: SimGuest,
    memory: SimMemory,
    store: SimStore,
}

impl Lab {
    fn new() -> Self {
        Self::with(SimConfig::default(), true)
    }

    fn with(config: SimConfig, dma_guarded: bool) -> Self {
        let sim = SimBackend::new(config);
        let guest = sim.guest(32);
        let options = RegionOptions { dma_guarded };
        let memory = sim.attach(guest.clone(), options).unwrap();
        let store = sim.open_store().unwrap();
        let (start, len) = (FrameId(0), 8);
        store.reserve(FrameRange { start, len }).unwrap();
        for number in 0..len {
            let content = pattern(number.into());
            store.fill(FrameId(number), &content).unwrap();
        }
        Self {
            sim,
            guest,
            memory,
            store,
        }
    }

    fn write(&self, page: u64, number: u64) -> Access {
        self.guest.write(PageIndex(page), &pattern(number))
    }

    fn reads(&self, page: u64, number: u64) {
        assert_eq!(self.guest.read(PageIndex(page)), *pattern(number));
    }

    fn state(&self, page: u64) -> SimPageState {
        self.guest.state(PageIndex(page))
    }

    fn stop(&self, pages: PageRange) -> Held {
        self.memory.stop(pages, Backing::Own).unwrap()
    }

    fn share(&self, pages: PageRange, frame: u32) -> Result<(), BackendError> {
        let frame = FrameId(frame);
        self.memory.share(pages, Backing::Own, &self.store, frame)
    }

    /// Merges pages, which get patterns from `frame` on.
    fn merge(&self, pages: PageRange, frame: u32) {
        for (number, page) in (u64::from(frame)..).zip(pages.iter()) {
            self.guest.write(page, &pattern(number));
        }
        self.stop(pages);
        self.share(pages, frame).unwrap();
        self.memory.lift(pages, Backing::Own);
    }

    /// Merges a page with the frame of its pattern, and lets it be copied.
    fn copy(&self, page: u64, frame: u32) {
        self.merge(one(page), frame);
        self.write(page, frame.into());
        assert_eq!(self.state(page), SimPageState::Copied);
    }
}

/// What a call panics with.
fn panic_of(call: impl FnOnce()) -> String {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    let payload = caught.expect_err("this must be refused");
    *payload.downcast::<String>().expect("a text")
}

/// Demands that a call is refused as breaking the contract, for this reason.
fn broken(lab: &Lab, reason: &str, call: impl FnOnce(&Lab)) {
    let text = panic_of(|| call(lab));
    assert!(text.starts_with("contract broken: "), "{text}");
    assert!(text.contains(reason), "{text}");
    assert_eq!(lab.sim.violation().unwrap(), text);
}

#[test]
fn patterns_differ() {
    assert!(pattern(0).is_zero());
    assert_ne!(pattern(1), pattern(2));
    assert_eq!(pattern(7), pattern(7));
}

#[test]
fn a_page_goes_through_the_states_of_the_table() {
    let lab = Lab::new();
    assert_eq!(lab.state(3), SimPageState::Absent);
    lab.reads(3, 0);
    assert_eq!(lab.state(3), SimPageState::Zero);
    lab.write(3, 5);
    assert_eq!(lab.state(3), SimPageState::Private);
    assert!(lab.guest.swap_out(P));
    assert_eq!(lab.state(3), SimPageState::Swapped);
    lab.stop(one(3));
    assert_eq!(lab.state(3), SimPageState::Out);
    lab.share(one(3), 5).unwrap();
    lab.memory.lift(one(3), Backing::Own);
    assert_eq!(lab.state(3), SimPageState::Merged);
    lab.reads(3, 5);
    lab.write(3, 6);
    assert_eq!(lab.state(3), SimPageState::Copied);
    lab.memory.stop(one(3), Backing::Frame).unwrap();
    assert_eq!(lab.state(3), SimPageState::Stopped);
    lab.reads(3, 6);
    lab.memory.restore(one(3)).unwrap();
    lab.memory.lift(one(3), Backing::Frame);
    assert_eq!(lab.state(3), SimPageState::Private);
    lab.reads(3, 6);
    lab.memory.discard(one(3), Backing::Own).unwrap();
    assert_eq!(lab.state(3), SimPageState::Absent);
}

#[test]
fn a_write_waits_and_goes_on_when_the_page_is_lifted() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    assert_eq!(lab.write(3, 2), Access::Waits);
    assert_eq!(lab.guest.try_read(P), None);
    let busy = lab.sim.busy();
    assert_eq!((busy.stopped, busy.out, busy.waiting), (0, 1, 1));
    lab.memory.lift(one(3), Backing::Own);
    assert!(lab.sim.busy().is_idle());
    lab.reads(3, 2);
}

#[test]
fn a_waiter_on_another_thread_is_woken() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    let guest = lab.guest.clone();
    let vcpu = std::thread::spawn(move || guest.read(P));
    lab.memory.lift(one(3), Backing::Own);
    assert_eq!(vcpu.join().unwrap(), *pattern(1));
}

#[test]
fn a_hole_left_by_a_zeroed_page_waits_until_it_is_lifted() {
    let lab = Lab::new();
    lab.write(3, 0);
    lab.stop(one(3));
    lab.memory.zero(one(3), Backing::Own).unwrap();
    assert_eq!(lab.write(3, 4), Access::Waits);
    assert_eq!(
        lab.memory.settle(one(3), Backing::Own),
        Settled::Replaced,
        "a zeroed page is not held any more"
    );
    lab.reads(3, 4);
}

#[test]
fn reuse_keeps_writers_waiting_behind_the_marker() {
    let lab = Lab::new();
    lab.copy(3, 1);
    lab.memory.stop(one(3), Backing::Frame).unwrap();
    lab.memory.reuse(one(3)).unwrap();
    assert_eq!(lab.write(3, 2), Access::Waits);
    lab.reads(3, 1);
    lab.memory.lift(one(3), Backing::Frame);
    lab.reads(3, 2);
    assert_eq!(lab.state(3), SimPageState::Copied);
}

#[test]
fn settle_tells_before_from_after() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    assert_eq!(lab.memory.settle(one(3), Backing::Own), Settled::Kept);
    lab.reads(3, 1);
    lab.stop(one(3));
    lab.share(one(3), 1).unwrap();
    assert_eq!(lab.memory.settle(one(3), Backing::Own), Settled::Replaced);
}

#[test]
fn stop_refuses_what_the_kernel_refuses() {
    let lab = Lab::with(SimConfig::default(), false);
    for page in 0..4 {
        lab.write(page, 1);
    }
    assert!(lab.guest.pin(PageIndex(1)));
    lab.guest.fork(one(2));
    lab.guest.discard_raw(P);
    let held = lab.stop(range(0, 4));
    assert_eq!(held.held, [one(0)]);
    let refused = [
        (PageIndex(1), Refusal::Pinned),
        (PageIndex(2), Refusal::NotExclusive),
        (P, Refusal::Raced),
    ];
    assert_eq!(held.refused, refused);
    lab.memory.lift(range(0, 4), Backing::Own);
}

#[test]
fn huge_pages_split_when_moved_and_are_refused_when_protected() {
    for (stop, huge) in [(Stop::Move, false), (Stop::Protect, true)] {
        let config = SimConfig {
            stop,
            ..SimConfig::default()
        };
        let lab = Lab::with(config, true);
        assert!(lab.guest.collapse(P));
        assert!(lab.guest.is_huge(PageIndex(15)));
        let held = lab.stop(one(3));
        assert_eq!(
            held.refused,
            Vec::from_iter(huge.then_some((P, Refusal::Huge)))
        );
        assert_eq!(lab.guest.is_huge(PageIndex(15)), huge);
        lab.memory.lift(one(3), Backing::Own);
    }
}

#[test]
fn the_page_map_steps_over_holes_and_untouched_merged_pages() {
    let lab = Lab::new();
    for page in [1, 2, 9] {
        lab.write(page, 5);
    }
    lab.guest.swap_out(PageIndex(9));
    lab.merge(range(20, 2), 1);
    lab.reads(21, 2);
    let mut runs = Vec::new();
    let on = lab.memory.populated(range(0, 32), 3, &mut runs).unwrap();
    assert_eq!(on, PageIndex(21));
    let end = lab.memory.populated(range(21, 11), 3, &mut runs).unwrap();
    assert_eq!(end, PageIndex(32));
    let run = |range, state| PageRun {
        range,
        state,
        huge: false,
    };
    let all = [
        run(range(1, 2), PageState::Private),
        run(one(9), PageState::Swapped),
        run(one(21), PageState::Frame),
    ];
    assert_eq!(runs, all);
}

#[test]
fn vmas_are_counted_as_the_kernel_counts_them() {
    let lab = Lab::new();
    assert_eq!(lab.sim.vmas(), 1);
    lab.merge(one(8), 1);
    assert_eq!(lab.sim.vmas(), 3, "an isolated page costs two");
    lab.merge(range(9, 2), 2);
    assert_eq!(lab.sim.vmas(), 3, "consecutive frames share one");
    lab.merge(one(11), 3);
    assert_eq!(lab.sim.vmas(), 4, "the same frame again does not");
    lab.write(9, 7);
    assert_eq!(lab.sim.vmas(), 4, "a COW does not split a run");
    lab.memory.discard(range(8, 4), Backing::Frame).unwrap();
    assert_eq!(lab.sim.vmas(), 1);
}

#[test]
fn without_vmas_a_page_stays_held() {
    let lab = Lab::new();
    lab.sim.set_max_vmas(2);
    lab.write(3, 1);
    lab.stop(one(3));
    assert!(matches!(lab.share(one(3), 1), Err(BackendError::NoVmas)));
    assert_eq!(lab.state(3), SimPageState::Out);
    lab.memory.lift(one(3), Backing::Own);
    lab.reads(3, 1);
}

#[test]
fn a_call_fails_when_it_is_told_to() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.sim.fail_nth(Call::Stop, Failure::Again, 2);
    lab.stop(one(3));
    lab.memory.lift(one(3), Backing::Own);
    let refused = lab.memory.stop(one(3), Backing::Own);
    assert!(matches!(refused, Err(BackendError::Again)));
    assert_eq!(lab.state(3), SimPageState::Private);
    lab.stop(one(3));
    lab.memory.lift(one(3), Backing::Own);
    assert_eq!(lab.sim.calls(Call::Stop), 3);
    lab.sim
        .fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    lab.merge(range(0, 4), 1);
    assert!(lab.memory.populate(range(0, 4)).is_err());
    assert!(lab.guest.count(SimPageState::Merged) > 0, "a part at most");
    lab.sim.no_failures();
    lab.memory.populate(range(0, 4)).unwrap();
    assert_eq!(lab.guest.count(SimPageState::Copied), 4);
}

#[test]
fn a_storm_follows_from_its_seed() {
    let run = |seed| {
        let config = SimConfig {
            seed,
            ..SimConfig::default()
        };
        let lab = Lab::with(config, true);
        lab.sim.set_storm(Storm::rough());
        let mut buf = PageBuf::zeroed();
        for page in (0..32).map(PageIndex).cycle().take(200) {
            // Absent pages may be refused.
            let _ = lab.memory.read(page, &mut buf);
        }
        lab.guest.take_storm_log()
    };
    let first = run(1);
    assert!(first.len() > 100);
    assert_eq!(first, run(1));
    assert_ne!(first, run(2));
}

#[test]
fn a_storm_races_with_a_stop_and_its_writes_survive() {
    let lab = Lab::new();
    lab.sim.set_storm(Storm::rough());
    let mut waited = 0;
    for _ in 0..500 {
        let held = lab.stop(range(0, 8)).held;
        waited += lab.sim.busy().waiting;
        for &pages in &held {
            let mut buf = PageBuf::zeroed();
            let read = |buf: &mut PageBuf| {
                lab.memory
                    .read_held(pages.start, Backing::Own, buf)
                    .unwrap();
            };
            read(&mut buf);
            let before = buf.clone();
            read(&mut buf);
            assert_eq!(before, buf, "a held page changed");
        }
        lab.memory.lift(range(0, 8), Backing::Own);
    }
    assert!(waited > 100, "only {waited} writes ran into a stop");
    lab.sim.set_storm(Storm::default());
    assert!(lab.sim.busy().is_idle());
    let mut last = vec![None; 32];
    for (page, bytes) in lab.guest.take_storm_log() {
        last[region::at(page)] = bytes;
    }
    for (page, bytes) in (0..).map(PageIndex).zip(last) {
        let bytes = bytes.map_or_else(|| *PageBuf::zeroed(), |bytes| PageBuf::clone(&bytes));
        assert_eq!(lab.guest.read(page), bytes);
    }
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let lab = Lab::new();
    let again = |lab: &Lab| lab.sim.attach(lab.guest.clone(), RegionOptions::default());
    let refused = again(&lab).unwrap_err();
    assert!(matches!(refused, RegisterError::OtherUserfaultfd { .. }));
    lab.merge(one(3), 1);
    let Lab {
        sim, guest, memory, ..
    } = lab;
    drop(memory);
    let refused = sim.attach(guest, RegionOptions::default()).unwrap_err();
    assert!(matches!(refused, RegisterError::PrivateFile { .. }));
}

#[test]
fn a_changed_page_is_not_shared() {
    let lab = Lab::new();
    lab.write(3, 2);
    lab.stop(one(3));
    broken(&lab, "differs from it", |lab| lab.share(one(3), 1).unwrap());
}

#[test]
fn a_page_that_is_not_held_is_not_shared() {
    let lab = Lab::new();
    lab.write(3, 1);
    broken(&lab, "is Private", |lab| lab.share(one(3), 1).unwrap());
}

#[test]
fn a_punched_frame_is_not_shared() {
    let lab = Lab::new();
    lab.write(3, 0);
    lab.store.punch(FrameRange::one(FrameId(0))).unwrap();
    lab.stop(one(3));
    broken(&lab, "no memory", |lab| lab.share(one(3), 0).unwrap());
}

#[test]
fn frames_of_two_domains_are_not_mixed() {
    let lab = Lab::new();
    lab.merge(one(0), 1);
    let other = lab.sim.open_store().unwrap();
    other.reserve(FrameRange::one(FrameId(0))).unwrap();
    lab.write(3, 0);
    lab.stop(one(3));
    broken(&lab, "another domain", |lab| {
        let share = |memory: &SimMemory| memory.share(one(3), Backing::Own, &other, FrameId(0));
        share(&lab.memory).unwrap();
    });
}

#[test]
fn a_page_with_bytes_is_not_zeroed() {
    let lab = Lab::new();
    lab.write(3, 2);
    lab.stop(one(3));
    broken(&lab, "other bytes", |lab| {
        lab.memory.zero(one(3), Backing::Own).unwrap();
    });
}

#[test]
fn a_copy_is_not_dropped_where_it_differs() {
    let lab = Lab::new();
    lab.merge(one(3), 1);
    lab.write(3, 2);
    lab.memory.stop(one(3), Backing::Frame).unwrap();
    broken(
        &lab,
        "reuse of page 0x3 with frame #1, which differs",
        |lab| {
            lab.memory.reuse(one(3)).unwrap();
        },
    );
}

#[test]
fn a_frame_in_use_is_neither_filled_nor_punched() {
    let lab = Lab::new();
    lab.merge(one(3), 1);
    broken(&lab, "filled while 1 pages show it", |lab| {
        lab.store.fill(FrameId(1), &pattern(9)).unwrap();
    });
    let lab = Lab::new();
    lab.merge(one(3), 1);
    broken(&lab, "punched while 1 pages show it", |lab| {
        lab.store.punch(FrameRange::one(FrameId(1))).unwrap();
    });
}

#[test]
fn a_frame_that_a_copy_names_is_not_given_out_again() {
    let lab = Lab::new();
    lab.copy(3, 1);
    lab.store.punch(FrameRange::one(FrameId(1))).unwrap();
    lab.reads(3, 1);
    lab.store.reserve(FrameRange::one(FrameId(1))).unwrap();
    broken(&lab, "1 copied pages still name it", |lab| {
        lab.store.fill(FrameId(1), &pattern(9)).unwrap();
    });
}

#[test]
fn a_frame_without_memory_is_not_filled() {
    let lab = Lab::new();
    broken(&lab, "not reserved", |lab| {
        lab.store.fill(FrameId(100), &pattern(9)).unwrap();
    });
}

#[test]
fn copied_pages_are_stopped_only_where_dma_is_guarded() {
    let lab = Lab::with(SimConfig::default(), false);
    lab.copy(3, 1);
    broken(&lab, "DMA is not guarded", |lab| {
        lab.memory.stop(one(3), Backing::Frame).unwrap();
    });
}

#[test]
fn merged_pages_are_not_stopped() {
    let lab = Lab::new();
    lab.merge(one(3), 1);
    broken(&lab, "stop of merged page", |lab| {
        lab.memory.stop(one(3), Backing::Frame).unwrap();
    });
}

#[test]
fn a_stopped_page_is_neither_populated_nor_discarded_nor_stopped_again() {
    let lab = Lab::new();
    lab.copy(3, 1);
    lab.memory.stop(one(3), Backing::Frame).unwrap();
    broken(
        &lab,
        "populate of 0x3..0x4, in which page 0x3 is Stopped",
        |lab| {
            lab.memory.populate(one(3)).unwrap();
        },
    );
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    broken(&lab, "page 0x3 is Out", |lab| {
        lab.memory.discard(one(3), Backing::Own).unwrap();
    });
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    broken(&lab, "page 0x3 is Out", |lab| drop(lab.stop(one(3))));
}

#[test]
fn a_read_of_a_page_that_is_out_would_wait_for_itself() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    broken(&lab, "waits for itself", |lab| {
        lab.memory.read(P, &mut PageBuf::zeroed()).unwrap();
    });
}

#[test]
fn ranges_are_of_one_backing_inside_the_memory_and_short_enough() {
    let lab = Lab::new();
    lab.merge(one(3), 1);
    broken(&lab, "as Own, which page 0x3 is not", |lab| {
        drop(lab.stop(range(2, 2)));
    });
    let lab = Lab::new();
    broken(&lab, "in 32 pages", |lab| drop(lab.stop(range(31, 2))));
    let lab = Lab::new();
    broken(&lab, "of no page", |lab| drop(lab.stop(range(31, 0))));
    let config = SimConfig {
        max_stop: 4,
        ..SimConfig::default()
    };
    let lab = Lab::with(config, true);
    broken(&lab, "longer than 4 pages", |lab| {
        drop(lab.stop(range(0, 5)))
    });
}

#[test]
fn a_lift_names_the_backing_of_the_stop() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    broken(&lab, "lift of page 0x3 as Frame", |lab| {
        lab.memory.lift(one(3), Backing::Frame);
    });
}

#[test]
fn a_half_replaced_range_cannot_be_settled() {
    let lab = Lab::new();
    lab.write(2, 2);
    lab.write(3, 1);
    lab.stop(range(2, 2));
    lab.share(one(3), 1).unwrap();
    broken(&lab, "of which 1 pages are held", |lab| {
        lab.memory.settle(range(2, 2), Backing::Own);
    });
}

#[test]
fn memory_is_not_dropped_while_pages_are_held() {
    let lab = Lab::new();
    lab.write(3, 1);
    lab.stop(one(3));
    let Lab { sim, memory, .. } = lab;
    let text = panic_of(|| drop(memory));
    assert!(text.contains("1 pages stopped or out"), "{text}");
    assert_eq!(sim.violation().unwrap(), text);
}

#[test]
#[should_panic(expected = "declared free of DMA")]
fn memory_that_is_declared_free_of_dma_is_not_pinned() {
    let lab = Lab::new();
    lab.guest.pin(P);
}
