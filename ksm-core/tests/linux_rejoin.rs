//! Mappings given back, as /proc/self/maps counts them: restored pages become one
//! mapping with the guest's own, and the engine spends what that saves on others.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::backend::{Backend, Backing, Memory, RegionOptions};
use ksm_core::page::{FrameId, PageIndex};
use ksm_core::{Config, Ksm, Outcome, RegionId};
use linux_common::{Bench, DirectFile, Guest, KINDS, Kind, Ring, Vcpu, pages};
use vm_memory::{Bytes, MemoryRegionAddress};

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

/// While a region is registered its first page is away for a moment.
#[test]
fn registering_loses_no_write_and_no_pin() {
    const TIMES: u64 = 100;
    let options = RegionOptions { dma_guarded: true };
    let file = DirectFile::new([21, 22]);
    for kind in KINDS {
        let guest = kind.guest(PAGES);
        // A device uses the first page of this one all the while.
        let used = kind.guest(PAGES);
        let mut ring = Ring::new(&used, pages(0, 1));
        let before = guest.mappings() + used.mappings();
        let stop = Arc::new(AtomicBool::new(false));
        let vcpus = [0, 1].map(|page| counts(&guest, &stop, vec![page]));
        let backend = kind.backend();
        for nth in 0..TIMES {
            let memory = [&guest, &used].map(|guest| backend.attach(guest.source(), options));
            assert!(memory.iter().flatten().all(Memory::rejoins), "{kind:?}");
            ring.read(&file, nth % 2);
            assert_eq!(used.ends(0).0, 21 + u8::from(nth % 2 == 1), "{kind:?}");
        }
        assert_eq!(guest.mappings() + used.mappings(), before, "{kind:?}");
        stop.store(true, Ordering::Release);
        vcpus.into_iter().for_each(Vcpu::runs_on);
        assert!(guest.0.read_obj::<u64>(at(0, 0)).unwrap() > TIMES);
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

/// Guests that share a domain. Pages that stand alone have all mappings there are,
/// and runs wait for some.
struct World {
    ksm: Ksm<LinuxBackend>,
    guests: [(Guest, RegionId); 2],
}

const SINGLES: u64 = 64;
const RUNS: u64 = 60;
const RUN: u64 = 16;

impl World {
    const BUDGET: u64 = 2 * 2 * SINGLES;

    fn new(kind: Kind) -> Self {
        let config = Config {
            max_vmas: Some(Self::BUDGET),
            settle_passes: 0,
            ..Config::default()
        };
        let ksm = Ksm::new(kind.backend(), config).unwrap();
        let domain = ksm.create_domain().unwrap();
        let guests = [(); 2].map(|()| {
            let guest = kind.guest(4 * SINGLES + RUNS * (RUN + 4));
            let space = ksm.create_space(domain).unwrap();
            let options = RegionOptions { dma_guarded: true };
            let region = ksm.register(space, guest.source(), options).unwrap();
            (guest, region)
        });
        Self { ksm, guests }
    }

    /// The pages that stand alone.
    fn singles() -> impl Iterator<Item = u64> {
        (0..SINGLES).map(|n| 4 * n + 2)
    }

    /// The pages of the runs.
    fn runs() -> impl Iterator<Item = u64> {
        (0..RUNS).flat_map(|run| (0..RUN).map(move |page| 4 * SINGLES + run * (RUN + 4) + page))
    }

    /// In both guests, each of these pages gets a content of its own.
    fn fill(&self, pages: impl Iterator<Item = u64>) {
        for page in pages {
            for (guest, _) in &self.guests {
                guest.0.write_obj(page + 1, at(page, 2048)).unwrap();
            }
        }
    }

    /// A pass, after which the engine's count is the kernel's.
    fn pass(&self, when: &str) {
        let passes = self.ksm.stats().full_scans;
        while self.ksm.stats().full_scans == passes {
            self.ksm.scan(1 << 20).unwrap();
        }
        self.ksm.check().unwrap();
        for (guest, region) in &self.guests {
            let vmas = self.ksm.region_stats(*region).unwrap().vmas;
            assert_eq!(guest.mappings() as u64, 1 + vmas, "{when}");
        }
        assert!(self.ksm.stats().vmas <= Self::BUDGET, "{when}");
    }

    fn count(&self, pages: impl Iterator<Item = u64>, outcome: Outcome) -> u64 {
        let explain = |page| self.ksm.explain(self.guests[0].1, PageIndex(page)).unwrap();
        let pages = pages.filter(|&page| explain(page).outcome == outcome);
        pages.count() as u64
    }
}

const fn at(page: u64, offset: u64) -> MemoryRegionAddress {
    MemoryRegionAddress(page * 4096 + offset)
}

/// A vCPU that counts in each of these pages until it is told to stop, and would
/// notice a write that is lost.
fn counts(guest: &Guest, stop: &Arc<AtomicBool>, pages: Vec<u64>) -> Vcpu {
    let (guest, stop) = (guest.clone(), Arc::clone(stop));
    Vcpu::run(move || {
        let mut count = 0_u64;
        while !stop.load(Ordering::Acquire) {
            for &page in &pages {
                let is: u64 = guest.0.read_obj(at(page, 0)).unwrap();
                assert_eq!(is, count, "page {page}");
                guest.0.write_obj(count + 1, at(page, 0)).unwrap();
            }
            count += 1;
        }
    })
}

#[test]
fn what_was_rewritten_gives_its_mappings_to_runs_that_wait() {
    for kind in KINDS {
        let world = World::new(kind);
        world.fill(World::singles());
        world.pass("new");
        world.pass("merged");
        assert_eq!(world.ksm.stats().vmas, World::BUDGET, "{kind:?}");
        world.fill(World::runs());
        for _ in 0..3 {
            world.pass("held back");
        }
        let runs = RUNS * RUN;
        assert_eq!(world.count(World::runs(), Outcome::VmaBudget), runs);
        assert_eq!(world.ksm.stats().vmas_given_back, 0, "nothing was written");

        let stop = Arc::new(AtomicBool::new(false));
        let vcpus = world
            .guests
            .each_ref()
            .map(|(guest, _)| counts(guest, &stop, World::singles().collect()));
        for (guest, _) in &world.guests {
            // Or a pass could come before the first writes.
            linux_common::eventually(|| {
                let last = World::singles().last().unwrap();
                guest.0.read_obj::<u64>(at(last, 0)).unwrap() > 0
            });
        }
        let mut given_back = 0;
        for _ in 0..8 {
            world.pass("beside vCPUs");
            given_back = world.ksm.stats().vmas_given_back;
        }
        stop.store(true, Ordering::Release);
        vcpus.into_iter().for_each(Vcpu::runs_on);
        println!("{kind:?}: {given_back} mappings given back");
        assert!(given_back >= 2 * RUNS, "{kind:?}: {given_back}");
        // What was merged is still: they were unchanged, not merged, at last.
        assert_eq!(
            world.count(World::runs(), Outcome::VmaBudget),
            0,
            "{kind:?}"
        );
        let sharing = world.ksm.stats().pages_sharing;
        assert!(sharing >= runs, "{kind:?}: {sharing}");

        for (guest, region) in &world.guests {
            for page in World::singles().chain(World::runs()) {
                assert_eq!(guest.0.read_obj::<u64>(at(page, 2048)).unwrap(), page + 1);
            }
            world.ksm.unregister(*region).unwrap();
            assert_eq!(guest.mappings(), 1, "{kind:?}");
        }
    }
}
