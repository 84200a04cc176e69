//! The states of the table, and what the kernel does besides.

use super::*;

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
        run(one(21), PageState::File),
    ];
    assert_eq!(runs, all);
}

#[test]
fn restored_pages_give_their_vmas_back() {
    let lab = Lab::new();
    assert!(lab.memory.rejoins());
    // Two mappings beside one another, and one alone.
    for (page, frame) in [(8, 1), (9, 5), (20, 7)] {
        lab.copy(page, frame);
    }
    assert_eq!(lab.sim.vmas(), 1 + 3 + 2);
    for pages in [range(8, 2), one(20)] {
        let held = lab.memory.stop(pages, Backing::Frame).unwrap().held;
        assert_eq!(held, [pages]);
        assert_eq!(lab.write(pages.start.0, 3), Access::Waits);
        lab.memory.restore(pages).unwrap();
        lab.memory.lift(pages, Backing::Frame);
        lab.reads(pages.start.0, 3);
    }
    assert_eq!(lab.sim.vmas(), 1);
    assert_eq!(lab.state(9), SimPageState::Private);
    lab.reads(9, 5);
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
