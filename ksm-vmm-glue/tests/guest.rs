//! A guest memory in the engine, on the simulated backend.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::HashMap;
use std::sync::Arc;

use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::page::PageIndex;
use ksm_core::{Config, DomainId, Ksm, Outcome, PageRange, RegionOptions};
use ksm_vmm_glue::{GuestError, GuestKsm};
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap,
};

const PAGE: u64 = 4096;

/// Regions of 4 and 8 pages that touch, and one of 4 after a hole.
const RANGES: [(GuestAddress, usize); 3] = [
    (GuestAddress(0x10_000), 4 * 4096),
    (GuestAddress(0x14_000), 8 * 4096),
    (GuestAddress(0x80_000), 4 * 4096),
];

struct Bench {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    domain: DomainId,
    /// What was handed to the engine, by address.
    guests: HashMap<u64, SimGuest>,
}

impl Bench {
    fn new() -> Self {
        let sim = SimBackend::new(SimConfig::default());
        let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
        let domain = ksm.create_domain().unwrap();
        Self {
            sim,
            ksm,
            domain,
            guests: HashMap::new(),
        }
    }

    fn source(&mut self) -> impl FnMut(Arc<GuestRegionMmap>) -> SimGuest {
        |region| {
            let guest = self.sim.guest(region.len() / PAGE);
            self.guests.insert(region.start_addr().0, guest.clone());
            guest
        }
    }

    fn register(&mut self, memory: &GuestMemoryMmap) -> Result<GuestKsm<SimBackend>, GuestError> {
        let (ksm, domain) = (Arc::clone(&self.ksm), self.domain);
        GuestKsm::register_with(
            &ksm,
            domain,
            memory,
            RegionOptions::default(),
            self.source(),
        )
    }

    fn scan_passes(&self, passes: u64) {
        let mut done = 0;
        while done < passes {
            done += self.ksm.scan(1 << 20).unwrap().passes;
        }
    }
}

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&RANGES).unwrap()
}

#[test]
fn ranges_are_found_across_regions_and_holes_are_named() {
    let mut bench = Bench::new();
    let guest = bench.register(&memory()).unwrap();
    let [first, second, _] = [0, 1, 2].map(|at| guest.mapped()[at].region);

    let pieces = guest.locate(GuestAddress(0x12_000), 4 * PAGE).unwrap();
    assert_eq!(
        pieces,
        [
            (first, PageRange::new(PageIndex(2), 2)),
            (second, PageRange::new(PageIndex(0), 2)),
        ]
    );
    let beyond = guest.locate(GuestAddress(0x1b_000), 2 * PAGE);
    assert!(
        matches!(beyond, Err(GuestError::Unmapped(0x1c_000))),
        "{beyond:?}"
    );
    let before = guest.locate(GuestAddress(0), PAGE);
    assert!(matches!(before, Err(GuestError::Unmapped(0))), "{before:?}");
    let ragged = guest.locate(GuestAddress(0x12_000), 100);
    assert!(matches!(ragged, Err(GuestError::NotWholePages { .. })));
    assert_eq!(guest.locate(GuestAddress(0), 0).unwrap(), []);
}

#[test]
fn addresses_reach_the_pages_they_name() {
    let mut bench = Bench::new();
    let guest = bench.register(&memory()).unwrap();
    // Pages 3 of the first region and 0 of the second are neighbours, and equal.
    let (low, high) = (&bench.guests[&0x10_000], &bench.guests[&0x14_000]);
    low.write(PageIndex(3), &pattern(1));
    high.write(PageIndex(0), &pattern(1));
    high.write(PageIndex(1), &pattern(2));
    bench.scan_passes(3);
    assert_eq!(guest.stats().unwrap().ksm_merging_pages, 2);
    assert_eq!(guest.explain(GuestAddress(0x13_fff)).unwrap().sharers, 2);
    assert_eq!(guest.explain(GuestAddress(0x15_000)).unwrap().sharers, 0);

    assert_eq!(guest.unmerge(GuestAddress(0x13_000), 2 * PAGE).unwrap(), 2);
    assert_eq!(guest.unmerge_all().unwrap(), 0);

    guest.discard(GuestAddress(0x13_000), 2 * PAGE).unwrap();
    assert!(low.read(PageIndex(3)).is_zero());
    assert!(high.read(PageIndex(0)).is_zero());
    assert_eq!(high.read(PageIndex(1)), *pattern(2));
}

/// DMA to parts of pages, across two regions that touch.
#[test]
fn pages_that_a_device_uses_are_left_alone() {
    let mut bench = Bench::new();
    let guest = bench.register(&memory()).unwrap();
    for (start, page) in [(0x10_000, 3), (0x14_000, 0), (0x14_000, 1)] {
        bench.guests[&start].write(PageIndex(page), &pattern(1));
    }
    bench.scan_passes(3);
    assert_eq!(guest.stats().unwrap().ksm_merging_pages, 3);
    let guards = guest.pin(GuestAddress(0x13_ff0), 0x20).unwrap();
    assert_eq!(guards.len(), 2);
    assert_eq!(guest.stats().unwrap().ksm_merging_pages, 1);
    for (address, outcome) in [
        (0x13_000, Outcome::Pinned),
        (0x14_fff, Outcome::Pinned),
        (0x15_000, Outcome::Merged),
    ] {
        let explained = guest.explain(GuestAddress(address)).unwrap();
        assert_eq!(explained.outcome, outcome, "{address:#x}");
    }
    let guest = guest.unregister().unwrap_err().guest;
    drop(guards);
    guest.unregister().unwrap();
    let mut bench = Bench::new();
    let guest = bench.register(&memory()).unwrap();
    let unmapped = guest.pin(GuestAddress(0x1b_ff0), 0x20);
    assert!(matches!(unmapped, Err(GuestError::Unmapped(0x1c_000))));
}

#[test]
fn a_guest_memory_that_changes_is_followed() {
    let mut bench = Bench::new();
    let atomic = GuestMemoryAtomic::new(memory());
    let mut guest = bench.register(&atomic.memory()).unwrap();
    let kept = guest.mapped()[0];

    let (without, _) = atomic
        .memory()
        .remove_region(GuestAddress(0x14_000), 8 * PAGE)
        .unwrap();
    let more = GuestRegionMmap::from_range(GuestAddress(0x1000), 4096, None).unwrap();
    atomic
        .lock()
        .unwrap()
        .replace(without.insert_region(Arc::new(more)).unwrap());
    guest.sync_with(&atomic.memory(), bench.source()).unwrap();

    let starts: Vec<_> = guest.mapped().iter().map(|mapped| mapped.start.0).collect();
    assert_eq!(starts, [0x1000, 0x10_000, 0x80_000]);
    assert_eq!(guest.mapped()[1], kept, "what stays is not registered anew");
    assert_eq!(guest.stats().unwrap().pages, 1 + 4 + 4);
}

#[test]
fn a_guest_that_goes_leaves_nothing_merged() {
    for retire in [false, true] {
        let mut bench = Bench::new();
        let stays = bench.register(&memory()).unwrap();
        let staying = bench.guests[&0x10_000].clone();
        let goes = bench.register(&memory()).unwrap();
        let going = bench.guests[&0x10_000].clone();
        staying.write(PageIndex(0), &pattern(1));
        going.write(PageIndex(0), &pattern(1));
        bench.scan_passes(3);
        assert_eq!(bench.ksm.stats().pages_sharing, 1);

        if retire {
            goes.retire().unwrap();
            assert!(going.read(PageIndex(0)).is_zero());
        } else {
            drop(goes);
            assert_eq!(going.read(PageIndex(0)), *pattern(1));
        }
        assert_eq!(bench.ksm.stats().pages_sharing, 0);
        assert_eq!(staying.read(PageIndex(0)), *pattern(1));
        assert_eq!(stays.stats().unwrap().pages, 16);
    }
}

#[test]
fn a_region_of_half_pages_is_refused_and_none_is_left_behind() {
    let mut bench = Bench::new();
    let memory =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096), (GuestAddress(0x2000), 2048)])
            .unwrap();
    let error = bench.register(&memory).unwrap_err();
    assert!(matches!(
        error,
        GuestError::NotWholePages {
            address: 0x2000,
            bytes: 2048
        }
    ));
    assert_eq!(memory.num_regions(), 2);
    bench.guests[&0].write(PageIndex(0), &pattern(1));
    bench.scan_passes(2);
    assert_eq!(bench.ksm.stats().pages_scanned, 0);
}

/// Other memory at the same guest address is another region: were it taken for the
/// old one, a discard would drop that.
#[test]
fn memory_that_takes_the_place_of_other_memory_is_registered() {
    let mut bench = Bench::new();
    let memory = GuestMemoryMmap::from_ranges(&RANGES).unwrap();
    let mut guest = bench.register(&memory).unwrap();
    let before = guest.mapped().to_vec();
    let fresh = GuestMemoryMmap::from_ranges(&RANGES).unwrap();
    guest.sync_with(&fresh, bench.source()).unwrap();
    let after = guest.mapped();
    assert_eq!(after.len(), before.len());
    assert!(
        after
            .iter()
            .zip(&before)
            .all(|(after, before)| after.region != before.region)
    );
    guest.sync_with(&fresh, bench.source()).unwrap();
    guest.unregister().unwrap();
}

/// What the engine split by itself goes with the guest all the same.
#[test]
fn a_guest_whose_region_was_split_can_be_unregistered() {
    let mut bench = Bench::new();
    let memory = GuestMemoryMmap::from_ranges(&RANGES).unwrap();
    for retire in [false, true] {
        let guest = bench.register(&memory).unwrap();
        let (space, region) = (guest.space(), guest.mapped()[1].region);
        bench.ksm.split(region, PageIndex(3)).unwrap();
        if retire {
            guest.retire().unwrap();
        } else {
            guest.unregister().unwrap();
        }
        assert!(bench.ksm.regions_of(space).is_err());
    }
    bench.ksm.remove_domain(bench.domain).unwrap();
}
