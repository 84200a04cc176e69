//! Huge pages: moving splits and frees them, write-protection refuses them. One
//! test at a time, since it reads the process's resident memory.
#![cfg(feature = "linux")]

mod linux_common;

use ksm_core::backend::linux::StopMethod;
use ksm_core::backend::{Backing, Memory, Refusal, RegionOptions};
use ksm_core::page::{FrameId, PageIndex};
use linux_common::{Bench, Guest, backend, pages, status_kib};
use rustix::mm::Advice;

const HUGE: u64 = 512;
const COUNT: u64 = 16;

#[test]
fn parts_of_huge_pages_are_freed_by_moving_and_refused_otherwise() {
    let guest = Guest::with_flags((COUNT + 1) * HUGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let all = pages(0, (COUNT + 1) * HUGE);
    guest.advise(all, Advice::LinuxHugepage);
    guest.fill_all(all, 7);
    let first = guest.first_huge_page();
    let huge: u64 = guest
        .smaps(first, "AnonHugePages")
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        huge >= (COUNT - 1) * 2048,
        "this test needs huge pages (transparent_hugepage/enabled = madvise or always): {huge} kB"
    );
    let options = RegionOptions { dma_guarded: true };
    let bench = Bench::with(backend(StopMethod::WriteProtect), guest.clone(), options);
    let held = bench.stop(pages(first, 4), Backing::Own);
    assert!(held.held.is_empty());
    let expected: Vec<_> = (0..4)
        .map(|page| (PageIndex(first + page), Refusal::Huge))
        .collect();
    assert_eq!(held.refused, expected);
    bench.guest.writes(first, 7).runs_on();
    assert!(bench.runs(pages(first, HUGE)).iter().all(|run| run.huge));
    drop(bench);

    let bench = Bench::with(backend(StopMethod::Move), guest.clone(), options);
    bench.frames(0, 256, 7);
    let before = status_kib("RssAnon");
    for huge_page in 0..COUNT - 1 {
        // All but the first page of each.
        let at = first + huge_page * HUGE;
        for (start, n) in [(at + 1, 255), (at + 256, 256)] {
            bench.stop_all(pages(start, n), Backing::Own);
            bench
                .memory
                .share(pages(start, n), Backing::Own, &bench.store, FrameId(0))
                .unwrap();
            bench.memory.lift(pages(start, n), Backing::Own);
        }
    }
    bench.memory.rest();
    let fell = before - status_kib("RssAnon");
    let expected = (COUNT - 1) * 511 * 4;
    assert!(fell > expected * 9 / 10, "{fell} of {expected} kB");
    assert_eq!(guest.smaps(first, "AnonHugePages"), "0 kB");
    assert_eq!(guest.ends(first), (7, 7));
    assert_eq!(guest.ends(first + 300), (7, 7));
}
