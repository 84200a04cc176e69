//! A guest of many short runs is cloned until the budget of mappings is spent and
//! beyond, on real memory: as many mappings are made as the engine counts, no more
//! than the budget leaves, and each clone holds what its parent does.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::{Config, Ksm, Outcome, RegionId, RegionOptions, SpaceId};
use linux_common::{Guest, KINDS, Kind};
use vm_memory::{Bytes, MemoryRegionAddress};

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };
const PAGES: u64 = 512;
/// Every so many pages one that the other guest has as well.
const EVERY: u64 = 4;
/// What those cost in a guest: a mapping each, and one behind each.
const SEAMS: u64 = 2 * PAGES / EVERY;

struct World {
    ksm: Ksm<LinuxBackend>,
    space: SpaceId,
}

impl World {
    fn new(kind: Kind, max_vmas: u64) -> Self {
        let config = Config {
            max_vmas: Some(max_vmas),
            settle_passes: 0,
            window_pages: 16, // Clones are made in several steps.
            ..Config::default()
        };
        let ksm = Ksm::new(kind.backend(), config).unwrap();
        let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
        Self { ksm, space }
    }

    fn mappings(&self, guest: &Guest, region: RegionId) -> u64 {
        let vmas = self.ksm.region_stats(region).unwrap().vmas;
        assert_eq!(guest.mappings() as u64, 1 + vmas, "the kernel counts too");
        vmas
    }
}

fn word(guest: &Guest, page: u64) -> u64 {
    let at = MemoryRegionAddress(page * 4096 + 8);
    guest.0.read_obj(at).unwrap()
}

fn content(guest: u64, page: u64) -> u64 {
    match page % EVERY {
        1 => 1 + page,
        _ => (1 + guest) << 32 | page,
    }
}

fn clones(kind: Kind) {
    // For two guests, one clone and a half.
    let budget = 3 * SEAMS + SEAMS / 2;
    let world = World::new(kind, budget);
    let guests = [0, 1].map(|number| {
        let guest = kind.guest(PAGES);
        for page in 0..PAGES {
            let at = MemoryRegionAddress(page * 4096 + 8);
            guest.0.write_obj(content(number, page), at).unwrap();
        }
        let source = guest.source();
        let region = world.ksm.register(world.space, source, GUARDED).unwrap();
        (guest, region)
    });
    for _ in 0..12 {
        world.ksm.scan(u64::MAX).unwrap();
    }
    let (parent, region) = &guests[0];
    assert_eq!(world.ksm.stats().vmas, 2 * SEAMS, "{kind:?}");
    let mut spent = Vec::new();
    let mut living = Vec::new();
    for _ in 0..3 {
        let clone = kind.guest(PAGES);
        let forked = world
            .ksm
            .fork_region(*region, world.space, clone.source(), GUARDED)
            .unwrap();
        world.ksm.check().unwrap();
        let mappings = world.mappings(&clone, forked);
        let stats = world.ksm.region_stats(forked).unwrap();
        assert!(world.ksm.stats().vmas <= budget, "{kind:?}");
        let copied = stats.outcomes[Outcome::VmaBudget];
        assert_eq!(stats.ksm_merging_pages + copied, PAGES, "{kind:?}");
        assert_eq!(copied == 0, spent.is_empty(), "{kind:?}: {copied}");
        spent.push(mappings);
        living.push(clone);
    }
    println!("{kind:?}: {spent:?} mappings for clones, of {budget}");
    assert_eq!(spent[0], world.mappings(parent, *region), "{kind:?}");
    assert!(spent[1] > 0 && spent[1] < spent[0], "{kind:?}: {spent:?}");
    assert!(spent[2] < spent[1], "{kind:?}: {spent:?}");
    for (n, clone) in (1..).zip(&living) {
        clone.0.write_obj(n, MemoryRegionAddress(8)).unwrap();
        for page in 1..PAGES {
            assert_eq!(word(clone, page), content(0, page), "{kind:?} {page}");
        }
    }
    assert_eq!(word(parent, 0), content(0, 0), "{kind:?}");
}

#[test]
fn clones_take_the_mappings_that_are_left_and_copy_the_rest() {
    for kind in KINDS {
        clones(kind);
    }
}
