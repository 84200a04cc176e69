//! Each demand of the contract, broken once.

use super::*;

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
    other.fill(FrameId(0), &pattern(0)).unwrap();
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
    broken(&lab, "1 copied pages still name it", |lab| {
        lab.store.fill(FrameId(1), &pattern(9)).unwrap();
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
#[should_panic(expected = "to which a device may write all the same")]
fn a_copied_page_that_a_device_uses_is_not_stopped() {
    let lab = Lab::new();
    lab.merge(one(3), 1);
    assert!(lab.guest.pin(P));
    let _ = lab.memory.stop(one(3), Backing::Frame);
}
