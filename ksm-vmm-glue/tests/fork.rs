//! Guests that are cloned, and guests that are taken over, on the simulated backend.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;

use ksm_core::backend::sim::{
    Call, Failure, SimBackend, SimConfig, SimGuest, SimPageState, pattern,
};
use ksm_core::page::PageIndex;
use ksm_core::{Config, DomainId, Ksm, RegionOptions};
use ksm_vmm_glue::{GuestError, GuestKsm};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

const PAGE: u64 = 4096;
const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };
/// Regions of 8 and 4 pages.
const RANGES: [(GuestAddress, usize); 2] = [
    (GuestAddress(0x10_000), 8 * 4096),
    (GuestAddress(0x80_000), 4 * 4096),
];

struct Bench {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    domain: DomainId,
}

impl Bench {
    fn new() -> Self {
        let sim = SimBackend::new(SimConfig::default());
        let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
        let domain = ksm.create_domain().unwrap();
        Self { sim, ksm, domain }
    }

    /// The memory of a guest, region by region, empty or full of patterns.
    fn memory(&self, full: bool) -> Vec<SimGuest> {
        let mut memory = Vec::new();
        for (at, bytes) in RANGES {
            let guest = self.sim.guest(bytes as u64 / PAGE);
            for page in (0..guest.len()).filter(|_| full) {
                guest.write(PageIndex(page), &pattern(at.0 + page));
            }
            memory.push(guest);
        }
        memory
    }

    fn register(&self, memory: &[SimGuest]) -> GuestKsm<SimBackend> {
        GuestKsm::register_with(&self.ksm, self.domain, &map(), GUARDED, each(memory)).unwrap()
    }

    fn check(&self) {
        assert_eq!(self.sim.violation(), None);
        self.ksm.check().unwrap();
    }
}

fn map() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&RANGES).unwrap()
}

/// The memory behind a region.
fn each(memory: &[SimGuest]) -> impl FnMut(Arc<GuestRegionMmap>) -> SimGuest {
    move |region| memory[usize::from(region.start_addr() != RANGES[0].0)].clone()
}

fn holds_patterns(memory: &[SimGuest]) {
    for ((start, _), guest) in RANGES.iter().zip(memory) {
        for page in 0..guest.len() {
            assert_eq!(guest.read(PageIndex(page)), *pattern(start.0 + page));
        }
    }
}

fn is_empty(memory: &[SimGuest]) -> bool {
    let mut memory = memory.iter();
    memory.all(|guest| guest.count(SimPageState::Absent) == guest.len())
}

#[test]
fn a_clone_reads_the_same_and_never_meets_its_parent() {
    let bench = Bench::new();
    let [memory, place] = [true, false].map(|full| bench.memory(full));
    let parent = bench.register(&memory);
    let clone = parent.fork_with(&map(), each(&place)).unwrap();
    bench.check();
    holds_patterns(&place);
    assert_eq!(clone.stats().unwrap().pages, 12);
    assert_eq!(bench.ksm.stats().pages_sharing, 12);
    memory[1].write(PageIndex(0), &pattern(1));
    place[1].write(PageIndex(1), &pattern(2));
    parent.retire().unwrap();
    bench.check();
    assert_eq!(place[1].read(PageIndex(0)), *pattern(0x80_000));
    assert_eq!(place[1].read(PageIndex(1)), *pattern(2));
    clone.unregister().unwrap();
    assert_eq!(bench.ksm.stats().pages_shared, 0);
}

#[test]
fn a_clone_has_all_regions_or_is_not_there() {
    for nth in 1..=2 {
        let bench = Bench::new();
        let [memory, place] = [true, false].map(|full| bench.memory(full));
        let parent = bench.register(&memory);
        bench.sim.fail_nth(Call::Attach, Failure::OutOfMemory, nth);
        let refused = parent.fork_with(&map(), each(&place));
        assert!(matches!(refused, Err(GuestError::Engine(_))), "{refused:?}");
        bench.check();
        assert!(is_empty(&place), "attach {nth}");
        holds_patterns(&memory);
        assert_eq!(bench.ksm.stats().pages_sharing, 0);
        // It is nobody's: it can become a clone after all.
        parent.fork_with(&map(), each(&place)).unwrap();
        bench.check();
    }
}

#[test]
fn a_clone_needs_the_regions_of_its_parent() {
    let bench = Bench::new();
    let parent = bench.register(&bench.memory(true));
    let first = RANGES[0].0;
    for (ranges, address) in [
        (vec![RANGES[0]], 0x80_000),
        (vec![RANGES[0], (RANGES[1].0, 4096)], 0x80_000),
        (vec![(GuestAddress(0x8_000), 4096), RANGES[0]], 0x80_000),
        (
            vec![RANGES[0], RANGES[1], (GuestAddress(0x100_000), 4096)],
            0x100_000,
        ),
        (vec![(first, 4096), RANGES[1]], first.0),
    ] {
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let of = |_| -> SimGuest { unreachable!("refused before") };
        match parent.fork_with(&memory, of) {
            Err(GuestError::NotLikeParent(found)) => assert_eq!(found, address),
            other => panic!("{other:?}"),
        }
    }
    bench.check();
}

#[test]
fn a_clone_can_do_without_some_regions() {
    let bench = Bench::new();
    let [memory, place] = [true, false].map(|full| bench.memory(full));
    let parent = bench.register(&memory);
    let second: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&RANGES[1..]).unwrap();
    let clone = parent.fork_part_with(&second, each(&place)).unwrap();
    bench.check();
    assert_eq!(clone.mapped().len(), 1);
    assert_eq!(place[1].read(PageIndex(3)), *pattern(0x80_003));
    assert!(is_empty(&place[..1]));
}

#[test]
fn restored_guests_share_their_snapshot() {
    let bench = Bench::new();
    let memories = [true, true].map(|full| bench.memory(full));
    let guests = memories.each_ref().map(|memory| {
        let of = each(memory);
        GuestKsm::take_over_with(&bench.ksm, bench.domain, &map(), GUARDED, of).unwrap()
    });
    bench.check();
    assert_eq!(bench.ksm.stats().pages_sharing, 12);
    memories.iter().for_each(|memory| holds_patterns(memory));
    drop(guests);
    memories.iter().for_each(|memory| holds_patterns(memory));

    // All of it or nothing, and no byte is lost.
    for (call, nth) in [(Call::Attach, 2), (Call::Adopt, 2), (Call::Fill, 3)] {
        let memory = bench.memory(true);
        bench.sim.fail_nth(call, Failure::OutOfMemory, nth);
        let of = each(&memory);
        let refused = GuestKsm::take_over_with(&bench.ksm, bench.domain, &map(), GUARDED, of);
        assert!(matches!(refused, Err(GuestError::Engine(_))), "{refused:?}");
        bench.sim.no_failures();
        bench.check();
        holds_patterns(&memory);
        assert_eq!(bench.ksm.stats().pages_shared, 0);
    }
}
