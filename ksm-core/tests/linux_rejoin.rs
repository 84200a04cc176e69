//! Restored pages become one mapping with the guest's own, as /proc/self/maps
//! counts them.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use ksm_core::backend::{Backing, Memory, RegionOptions};
use ksm_core::page::FrameId;
use linux_common::{Bench, KINDS, Kind, pages};

const PAGES: u64 = 256;
const FRAMES: u32 = 256;

fn bench(kind: Kind) -> Bench {
    let options = RegionOptions { dma_guarded: true };
    Bench::with(kind.backend(), kind.guest(PAGES), options)
}

#[test]
fn registering_changes_no_page_and_no_mapping() {
    for kind in KINDS {
        let guest = kind.guest(PAGES);
        let before = guest.mappings();
        let options = RegionOptions { dma_guarded: true };
        let bench = Bench::with(kind.backend(), guest.clone(), options);
        assert!(bench.memory.rejoins());
        assert_eq!(guest.mappings(), before, "{kind:?}");
        assert_eq!(bench.runs(pages(0, PAGES)), [], "{kind:?}");
        guest.fill_all(pages(0, PAGES), 3);
        assert_eq!(guest.mappings(), before, "{kind:?}");
        bench.memory.detach();
        assert_eq!(guest.mappings(), before, "{kind:?}");
        // Once more, with all pages there.
        let bench = Bench::with(kind.backend(), guest.clone(), options);
        assert_eq!(guest.mappings(), before, "{kind:?}");
        assert_eq!(bench.guest.ends(0), (3, 3));
        assert_eq!(bench.runs(pages(0, PAGES))[0].range, pages(0, PAGES));
    }
}

#[test]
fn restored_pages_are_one_mapping_with_their_neighbours() {
    for kind in KINDS {
        let bench = bench(kind);
        let before = bench.guest.mappings();
        bench.guest.fill_all(pages(0, PAGES), 7);
        bench.frames(0, FRAMES, 7);
        // Singles, a run, neighbours over frames that do not go on, both ends.
        let mut merged = vec![
            pages(0, 1),
            pages(100, 30),
            pages(130, 1),
            pages(PAGES - 3, 3),
        ];
        merged.extend((4..60).step_by(3).map(|page| pages(page, 1)));
        for (nth, &range) in (0..).zip(&merged) {
            bench.stop_all(range, Backing::Own);
            let first = FrameId((nth * 7) % 200);
            bench
                .memory
                .share(range, Backing::Own, &bench.store, first)
                .unwrap();
            bench.memory.lift(range, Backing::Own);
        }
        let split = bench.guest.mappings();
        assert!(split >= before + 2 * merged.len() - 3, "{kind:?}: {split}");
        for &range in &merged {
            bench.memory.populate(range).unwrap();
            bench.guest.fill_all(range, 9);
            bench.stop_all(range, Backing::Frame);
            bench.memory.restore(range).unwrap();
            bench.memory.lift(range, Backing::Frame);
        }
        assert_eq!(bench.guest.mappings(), before, "{kind:?}");
        for &range in &merged {
            assert_eq!(bench.guest.ends(range.start.0), (9, 9));
        }
        // As good as new: all of it is stopped at once.
        bench.stop_all(pages(0, PAGES), Backing::Own);
        bench.memory.lift(pages(0, PAGES), Backing::Own);
        assert_eq!(bench.guest.mappings(), before, "{kind:?}");
        assert!(bench.memory.rejoins());
    }
}
