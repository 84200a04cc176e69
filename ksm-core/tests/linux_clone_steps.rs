//! A thread panics, or vanishes, at every step of making a clone of real memory, of
//! taking some over, of moving it and of changing its shape, while a vCPU writes to
//! it: no byte is lost, and the same can be done again with the same memory.
#![cfg(all(feature = "linux", feature = "fault-injection"))]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod clone_scenes;
mod linux_common;
mod step_hooks;

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clone_scenes::{GUARDED, PAGES, Scene};
use ksm_core::backend::linux::LinuxBackend;
use ksm_core::fault::Step;
use ksm_core::page::PAGE_SIZE;
use ksm_core::{Config, Error, Ksm, PinGuard, RegionId, RegisterError, SpaceId};
use linux_common::{Guest, KINDS, Kind, full_of, memfd, pages};
use step_hooks::{panics_at, vanishes_at};
use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegionBuilder;

/// What the vCPU writes to all along, but for moves. A guard holds it, so that the
/// steps are the same each time.
const BUSY: u64 = 13;

const SCENES: [Scene; 5] = [
    Scene::FirstClone,
    Scene::TakeOver,
    Scene::Move,
    Scene::Split,
    Scene::UnregisterPart,
];

struct World {
    scene: Scene,
    ksm: Arc<Ksm<LinuxBackend>>,
    spaces: [SpaceId; 2],
    parent: Guest,
    region: RegionId,
    /// Where the clone comes to be, or what is taken over.
    place: Guest,
    pin: Option<PinGuard>,
}

/// Ends the vCPU, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a page of the parent, and of memory that is taken over, is full of.
fn content(page: u64) -> u8 {
    u8::try_from(clone_scenes::content(page)).unwrap()
}

fn fill(guest: &Guest) {
    (0..PAGES).for_each(|page| guest.fill(page, content(page)));
}

/// A private mapping of a file.
fn restored() -> Guest {
    let mut file = File::from(memfd(PAGES));
    for page in 0..PAGES {
        file.write_all(full_of(content(page)).bytes()).unwrap();
    }
    let region = MmapRegionBuilder::new(PAGES as usize * PAGE_SIZE)
        .with_file_offset(FileOffset::new(file, 0))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
        .build()
        .unwrap();
    Guest::of(region)
}

fn world(scene: Scene, kind: Kind) -> World {
    // Small windows, so that clones are made in several steps.
    let config = Config {
        window_pages: 1,
        ..Config::default()
    };
    let ksm = Arc::new(Ksm::new(kind.backend(), config).unwrap());
    let domain = ksm.create_domain().unwrap();
    let spaces = [(); 2].map(|()| ksm.create_space(domain).unwrap());
    let parent = kind.guest(PAGES);
    fill(&parent);
    let region = ksm.register(spaces[0], parent.source(), GUARDED).unwrap();
    for _ in 0..3 {
        ksm.scan(u64::MAX).unwrap();
    }
    let place = match (scene, kind) {
        (Scene::TakeOver, Kind::Anonymous(_)) => restored(),
        _ => kind.guest(PAGES),
    };
    if (scene, kind) == (Scene::TakeOver, Kind::Memfd) {
        fill(&place);
    }
    let pins = scene != Scene::Move;
    let pin = pins.then(|| ksm.pin(region, pages(BUSY, 1)).unwrap());
    World {
        scene,
        pin,
        ksm,
        spaces,
        parent,
        region,
        place,
    }
}

fn ends_are(guest: &Guest, but: Option<u64>, when: &str) {
    for page in (0..PAGES).filter(|&page| Some(page) != but) {
        let byte = content(page);
        assert_eq!(guest.ends(page), (byte, byte), "{when}: page {page}");
    }
}

impl World {
    fn action(&self) -> impl FnOnce() -> Result<(), Error> + Send + 'static {
        let (ksm, scene, region) = (Arc::clone(&self.ksm), self.scene, self.region);
        let (space, place) = (self.spaces[1], self.place.source());
        move || scene.act(&ksm, region, space, place)
    }

    /// Lets a vCPU of the parent write while `accident` happens, and demands that
    /// none of its writes is lost.
    fn beside_a_vcpu(&self, accident: impl FnOnce(), when: &str) {
        if self.scene == Scene::Move {
            return accident();
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let vcpu = scope.spawn(|| {
                let mut written = content(BUSY);
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(self.parent.ends(BUSY).0, written, "{when}: a write is lost");
                    written = written.wrapping_add(1);
                    self.parent.store(BUSY, written);
                    std::thread::yield_now();
                }
            });
            let end = Stop(&stop);
            accident();
            drop(end);
            vcpu.join().unwrap();
        });
    }

    fn check(&self, when: &str) {
        self.ksm
            .check()
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        let moved = self.scene == Scene::Move && !self.is_there();
        let parent = if moved { &self.place } else { &self.parent };
        ends_are(parent, Some(BUSY), when);
        if self.scene == Scene::TakeOver {
            ends_are(&self.place, None, when);
        }
    }

    fn is_there(&self) -> bool {
        self.ksm.region_stats(self.region).is_ok()
    }

    fn goes_on(mut self, when: &str) {
        self.check(when);
        let done = match self.scene {
            Scene::FirstClone | Scene::TakeOver => {
                !self.ksm.regions_of(self.spaces[1]).unwrap().is_empty()
            }
            _ => !self.is_there(),
        };
        match self.action()() {
            Ok(()) if !done => {}
            Err(Error::Register(RegisterError::Overlaps { .. }) | Error::NoRegion(_)) if done => {}
            // Some of it maps frames, copied ones, in place of its file.
            Err(Error::Register(RegisterError::Memfd { .. })) if self.scene == Scene::TakeOver => {}
            other => panic!("{when}: done: {done}, and then {other:?}"),
        }
        self.check(when);
        if self.scene == Scene::FirstClone {
            ends_are(&self.place, Some(BUSY), when);
            self.parent.fill(3, 1);
            assert_eq!(self.place.ends(3), (content(3), content(3)), "{when}");
            self.place.fill(4, 2);
            self.parent.fill(3, content(3));
            ends_are(&self.parent, Some(BUSY), when);
            self.place.fill(4, content(4));
        }
        self.pin = None;
        for _ in 0..2 {
            self.ksm.scan(u64::MAX).unwrap();
        }
        self.leaves(when);
    }

    /// Everything can leave and be registered again, and nothing is left.
    fn leaves(&self, when: &str) {
        let leave = || {
            for region in self.spaces.map(|space| self.ksm.regions_of(space).unwrap()) {
                for region in region {
                    let left = self.ksm.unregister(region);
                    left.unwrap_or_else(|error| panic!("{when}: {error}"));
                }
            }
            self.check(when);
            assert_eq!(self.ksm.stats().pages_shared, 0, "{when}");
            assert_eq!(self.ksm.store_bytes().unwrap(), 0, "{when}");
        };
        leave();
        for guest in [&self.parent, &self.place] {
            if self.scene == Scene::UnregisterPart || guest.0.file_offset().is_none() {
                let again = self.ksm.register(self.spaces[0], guest.source(), GUARDED);
                again.unwrap_or_else(|error| panic!("{when}: {error}"));
            }
        }
        leave();
    }
}

/// How often a scene takes a step, where nothing happens.
fn times_taken(scene: Scene, kind: Kind, step: Step) -> usize {
    let world = world(scene, kind);
    let action = world.action();
    let times = step_hooks::times_taken(step, || action().unwrap());
    scene.demand(
        step,
        times,
        &format!("{scene:?}, {kind:?}: {step:?} is not taken"),
    );
    times
}

/// Every step of every scene, with the first times that it is taken and the last.
fn accidents(of: &str) -> impl Iterator<Item = (World, Step, usize, String)> {
    let scenes = SCENES
        .into_iter()
        .flat_map(|scene| KINDS.map(|kind| (scene, kind)));
    let taken = scenes.flat_map(|(scene, kind)| {
        let times = move |step| ((scene, kind), step, times_taken(scene, kind, step));
        Step::all().map(times)
    });
    let all = step_hooks::accidents(of, taken, 2);
    all.map(|((scene, kind), step, nth, when)| (world(scene, kind), step, nth, when))
}

#[test]
fn a_panic_leaves_nothing_behind() {
    for (world, step, nth, when) in accidents("panic") {
        world.beside_a_vcpu(
            || {
                let action = world.action();
                assert!(panics_at(step, nth, || action().unwrap()), "{when}");
            },
            &when,
        );
        world.goes_on(&when);
    }
}

#[test]
fn a_thread_that_vanishes_leaves_nothing_behind() {
    for (world, step, nth, when) in accidents("gone") {
        world.beside_a_vcpu(
            || {
                let action = world.action();
                let dead = vanishes_at(step, nth, || action().unwrap());
                world.ksm.recover(dead);
            },
            &when,
        );
        world.goes_on(&when);
    }
}
