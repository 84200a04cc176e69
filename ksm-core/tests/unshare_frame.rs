//! Taking a frame from all who share it, while others would come to share it.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use ksm_core::backend::sim::{Call, Failure, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Error, Ksm, PageIndex, PageRange, RegionId, RegionOptions, SpaceId};
use step_hooks::at;

const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };
const FIRST: PageIndex = PageIndex(0);

struct World {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    space: SpaceId,
}

/// Pages are merged at first sight.
fn world() -> World {
    let sim = SimBackend::new(SimConfig::default());
    let config = Config {
        settle_passes: 0,
        ..Config::default()
    };
    let ksm = Arc::new(Ksm::new(sim.clone(), config).unwrap());
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    World { sim, ksm, space }
}

impl World {
    fn guest(&self, contents: &[u64]) -> (SimGuest, RegionId) {
        let guest = self.sim.guest(contents.len() as u64);
        for (page, &content) in (0..).map(PageIndex).zip(contents) {
            guest.write(page, &pattern(content));
        }
        let region = self.ksm.register(self.space, guest.clone(), GUARDED);
        (guest, region.unwrap())
    }

    fn passes(&self, passes: u64) {
        for _ in 0..passes {
            self.ksm.scan(u64::MAX).unwrap();
        }
        self.ksm.check().unwrap();
    }

    fn sharers(&self, region: RegionId) -> u64 {
        self.ksm.explain(region, FIRST).unwrap().sharers
    }
}

/// A thread that stands at `step` of `call` until told to go on.
fn stands_at(
    step: Step,
    call: impl FnOnce() + Send + 'static,
) -> (mpsc::Sender<()>, thread::JoinHandle<()>) {
    let (here, is_here) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        set_hook(at(step, 1, move || {
            here.send(()).unwrap();
            let _ = may_go.recv();
        }));
        call();
        set_hook(None);
    });
    is_here.recv().unwrap();
    (go, thread)
}

/// While the call waits for a busy region, a pass must not merge the pages that are
/// unshared already with the very frame that is being emptied.
#[test]
fn nobody_comes_to_a_frame_that_is_being_emptied() {
    let world = world();
    // Of one content, and another one to keep the middle region busy with: its frame
    // moves to where a third one's was.
    let (_, first) = world.guest(&[7]);
    let (_, busy) = world.guest(&[7, 8, 8, 9, 9]);
    world.passes(2);
    let eights = PageRange::new(PageIndex(1), 2);
    world.ksm.discard(busy, eights).unwrap();
    let (_, last) = world.guest(&[7]);
    world.passes(2);
    assert_eq!(world.sharers(last), 3);
    let ksm = Arc::clone(&world.ksm);
    let (go, moving) = stands_at(Step::Stopped, move || {
        drop(ksm.move_frame(busy, PageIndex(3)));
    });
    let ksm = Arc::clone(&world.ksm);
    let unsharing = thread::spawn(move || ksm.unshare_frame(last, FIRST));
    let waits_for_busy = |waiters| {
        while world.ksm.region_stats(busy).unwrap().lease_waits < waiters {
            thread::yield_now();
        }
    };
    waits_for_busy(1);
    let shared = [first, last].map(|region| world.sharers(region));
    assert!(shared.contains(&0), "one of them is before it: {shared:?}");
    // A pass looks at the other regions first.
    let ksm = Arc::clone(&world.ksm);
    let scanning = thread::spawn(move || ksm.scan(u64::MAX).unwrap());
    waits_for_busy(2);
    let shared = [first, last].map(|region| world.sharers(region));
    go.send(()).unwrap();
    moving.join().unwrap();
    scanning.join().unwrap();
    let unshared = unsharing.join().unwrap();
    assert!(shared.contains(&0), "merged again meanwhile: {shared:?}");
    assert_eq!(unshared.unwrap(), 3);
    world.ksm.check().unwrap();
    world.passes(2);
    assert_eq!(world.sharers(last), 3, "with another frame");
}

/// Beside a thread that scans as fast as it can, every page is unshared once.
#[test]
fn a_frame_is_emptied_beside_a_scanner() {
    const GUESTS: usize = 60;
    let world = world();
    let guests: Vec<_> = (0..GUESTS).map(|_| world.guest(&[7])).collect();
    world.passes(2);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                world.ksm.scan(u64::MAX).unwrap();
            }
        });
        let unshared: Result<Vec<_>, _> = (0..200)
            .map(|round| {
                let region = guests[round % GUESTS].1;
                world.ksm.unshare_frame(region, FIRST)
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        let unshared = unshared.unwrap();
        assert!(unshared.iter().all(|&pages| pages <= GUESTS as u64));
        assert!(unshared.iter().any(|&pages| pages > 0));
    });
    world.passes(2);
    for (guest, region) in &guests {
        assert_eq!(guest.read(FIRST), *pattern(7));
        assert_eq!(world.sharers(*region), GUESTS as u64);
    }
}

/// What the host refuses to copy is named, and nobody comes to share it meanwhile.
#[test]
fn pages_that_cannot_be_copied_are_named() {
    let world = world();
    let (_, region) = world.guest(&[7]);
    let (_, other) = world.guest(&[7]);
    world.passes(2);
    let sim = world.ksm.backend();
    // The first page that is tried gets a copy, the second none.
    for nth in 2..100 {
        sim.fail_nth(Call::Populate, Failure::OutOfMemory, nth);
    }
    let Err(Error::FrameStillShared { pages, sharers, .. }) =
        world.ksm.unshare_frame(region, FIRST)
    else {
        panic!("one page got no copy");
    };
    sim.no_failures();
    let left: Vec<_> = sharers.iter().map(|sharer| sharer.region).collect();
    assert_eq!((pages, left.len()), (1, 1));
    let left = left[0];
    assert!([region, other].contains(&left));
    let frame = world.ksm.explain(left, FIRST).unwrap().frame;
    let (_, new) = world.guest(&[7]);
    world.passes(2);
    assert_eq!(world.sharers(left), 1, "nobody came to it");
    assert_eq!(world.sharers(new), 2, "with the page that had got a copy");
    assert_ne!(world.ksm.explain(new, FIRST).unwrap().frame, frame);
    assert_eq!(world.ksm.unshare_frame(left, FIRST).unwrap(), 1);
    world.passes(2);
    assert_eq!(world.sharers(left), 3);
}

/// A clone that is made meanwhile maps the frame no longer than its maker's call.
#[test]
fn no_clone_is_left_with_a_frame_that_was_emptied() {
    for _ in 0..30 {
        let world = world();
        let (_, parent) = world.guest(&(1..3000).collect::<Vec<_>>());
        let (_, _twin) = world.guest(&[1]);
        world.passes(2);
        let frame = world.ksm.explain(parent, FIRST).unwrap().frame;
        assert!(frame.is_some());
        thread::scope(|scope| {
            let forking = scope.spawn(|| {
                let clone = world.sim.guest(2999);
                let (ksm, space) = (&world.ksm, world.space);
                ksm.fork_region(parent, space, clone, GUARDED).unwrap()
            });
            // Sooner or later beside the clone.
            let done = world.ksm.unshare_frame(parent, FIRST);
            if let Err(error) = done {
                let is_hidden = matches!(
                    &error,
                    Error::FrameStillShared { pages: 1, sharers, .. } if sharers.is_empty()
                );
                assert!(is_hidden, "{error:?}");
            }
            let clone = forking.join().unwrap();
            for region in [parent, clone] {
                assert_ne!(world.ksm.explain(region, FIRST).unwrap().frame, frame);
            }
        });
        world.ksm.check().unwrap();
    }
}
