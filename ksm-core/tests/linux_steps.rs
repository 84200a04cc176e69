//! The scanning thread panics, or vanishes, at every step of a merge of real
//! memory, and where mappings of it are given back, while vCPUs write to it: they
//! run on, and no byte is lost.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
#![cfg(feature = "fault-injection")]

mod linux_common;
mod pass_scenes;
mod step_hooks;

use std::sync::Arc;
use std::thread;

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::fault::Step;
use ksm_core::page::{PageBuf, PageIndex};
use ksm_core::{Config, Ksm, RegionOptions};
use linux_common::{Guest, KINDS, Kind, full_of, pages};
use pass_scenes::{PAGES, SCENES, Scene};
use step_hooks::{panics_at, vanishes_at};
use vm_memory::{Bytes, MemoryRegionAddress};

/// Where the vCPUs write, in every page.
const OFFSET: u64 = 8;
const WRITTEN: u8 = 0xee;

struct World {
    scene: Scene,
    ksm: Arc<Ksm<LinuxBackend>>,
    guests: [Guest; 2],
}

/// What a page holds where pages are merged, as one byte all over.
fn equal(page: u64) -> u8 {
    match page {
        0 => 100,
        2 => 0,
        page if page >= PAGES - 4 => 0,
        page => 1 + page as u8,
    }
}

/// Two guests whose first pages are equal and merged.
fn merged(scene: Scene, kind: Kind, max_vmas: Option<u64>) -> World {
    let config = Config {
        max_vmas,
        ..Config::default()
    };
    let ksm = Ksm::new(kind.backend(), config).unwrap();
    let domain = ksm.create_domain().unwrap();
    let guests = [kind.guest(PAGES), kind.guest(PAGES)];
    for guest in &guests {
        let space = ksm.create_space(domain).unwrap();
        let options = RegionOptions { dma_guarded: true };
        ksm.register(space, guest.source(), options).unwrap();
        (0..PAGES / 2).for_each(|page| guest.fill(page, 1 + page as u8));
    }
    while ksm.stats().full_scans < 2 {
        ksm.scan(1 << 20).unwrap();
    }
    assert_eq!(ksm.stats().pages_shared, PAGES / 2);
    World {
        scene,
        ksm: Arc::new(ksm),
        guests,
    }
}

/// One pass before the merge of new pages, zero pages and copied pages, one of
/// which is again what the frame below it holds.
fn merging(kind: Kind) -> World {
    let world = merged(Scene::Merging, kind, None);
    for guest in &world.guests {
        for page in (PAGES / 2..PAGES).chain([0, 2]) {
            guest.fill(page, 7);
            guest.fill(page, equal(page));
        }
    }
    world.guests[0].fill(1, 100);
    world.guests[0].fill(1, equal(1));
    world.scan();
    world
}

/// One pass before mappings are given back: what was merged is rewritten but for a
/// page, and a run that starts behind it finds no mapping left.
fn giving_back(kind: Kind) -> World {
    let world = merged(Scene::GivingBack, kind, Some(2));
    for (number, guest) in world.guests.iter().enumerate() {
        for page in (0..PAGES).filter(|&page| page != 1) {
            guest.fill(page, world.content(number, page));
        }
    }
    world.scan();
    world
}

fn world(scene: Scene, kind: Kind) -> World {
    match scene {
        Scene::Merging => merging(kind),
        Scene::GivingBack => giving_back(kind),
    }
}

impl World {
    /// What a page of a guest holds, as one byte all over.
    fn content(&self, guest: usize, page: u64) -> u8 {
        let own = 100 * (1 + guest as u8) + page as u8;
        match self.scene {
            Scene::Merging => equal(page),
            Scene::GivingBack if page == 1 || page >= PAGES / 2 + 2 => 1 + page as u8,
            Scene::GivingBack => own,
        }
    }

    fn scan(&self) {
        self.ksm.scan(1 << 20).unwrap();
    }

    /// Each vCPU writes to every page of its guest; none may be left waiting,
    /// and no write and no other byte may be lost. `meanwhile` runs while they
    /// try.
    fn vcpus_run_on(&self, when: &str, meanwhile: impl FnOnce()) {
        let vcpus = [0, 1].map(|number: usize| {
            let region = Arc::clone(&self.guests[number].0);
            linux_common::Vcpu::new(move || {
                for page in pages(0, PAGES).iter() {
                    let at = MemoryRegionAddress(page.byte_offset() + OFFSET);
                    region.write_obj(WRITTEN, at).unwrap();
                }
            })
        });
        meanwhile();
        for vcpu in vcpus {
            vcpu.runs_on();
        }
        self.ksm
            .check()
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        for (number, guest) in self.guests.iter().enumerate() {
            for page in 0..PAGES {
                let content = self.content(number, page);
                let mut expected = full_of(content);
                expected.bytes_mut()[OFFSET as usize] = WRITTEN;
                let mut is = PageBuf::zeroed();
                let at = MemoryRegionAddress(PageIndex(page).byte_offset());
                guest.0.read_slice(is.bytes_mut(), at).unwrap();
                assert_eq!(is, expected, "{when}: guest {number} page {page}");
                guest.fill(page, content);
            }
        }
    }

    /// After the accident the engine does what is left.
    fn finish(&self, when: &str) {
        pass_scenes::finish(&self.ksm, self.scene, when);
        // Of its mappings each guest has one beside its own memory.
        if self.scene == Scene::GivingBack {
            let mappings = self.guests.each_ref().map(Guest::mappings);
            assert_eq!((self.ksm.stats().vmas, mappings), (2, [2, 2]), "{when}");
        }
    }
}

/// How often a whole pass takes each step.
fn times_taken(scene: Scene, kind: Kind, step: Step) -> usize {
    let world = world(scene, kind);
    let times = step_hooks::times_taken(step, || world.scan());
    let given_back = world.ksm.stats().vmas_given_back;
    let expected = if scene == Scene::GivingBack { 2 } else { 0 };
    assert_eq!(given_back, expected, "{kind:?} {scene:?}");
    times
}

/// Everything that can be tried, and what it is called.
fn accidents(of: &str) -> impl Iterator<Item = (World, Step, usize, String)> {
    let scenes = KINDS
        .into_iter()
        .flat_map(|kind| SCENES.map(|scene| (scene, kind)));
    let taken = scenes.flat_map(|(scene, kind)| {
        let times = move |step| ((scene, kind), step, times_taken(scene, kind, step));
        Step::PASS.into_iter().map(times)
    });
    let all = step_hooks::accidents(of, taken, usize::MAX);
    all.map(|((scene, kind), step, nth, when)| (world(scene, kind), step, nth, when))
}

#[test]
fn vcpus_run_on_after_a_panic_at_any_step() {
    for (world, step, nth, when) in accidents("panic") {
        let panicked = panics_at(step, nth, || world.scan());
        assert!(panicked, "{when}");
        world.vcpus_run_on(&when, || ());
        world.finish(&when);
    }
}

#[test]
fn vcpus_run_on_after_the_thread_has_vanished_at_any_step() {
    for (world, step, nth, when) in accidents("gone") {
        let ksm = Arc::clone(&world.ksm);
        let dead = vanishes_at(step, nth, move || {
            ksm.scan(1 << 20).unwrap();
        });
        world.vcpus_run_on(&when, || {
            // Some of the vCPUs' writes come before, some wait.
            thread::yield_now();
            assert!(world.ksm.recover(dead) >= 1, "{when}");
        });
        world.finish(&when);
    }
}
