//! Taking a frame from all who share it, while others would come to share it.
#![cfg(feature = "fault-injection")]
#![allow(clippy::unwrap_used)]

mod step_hooks;
mod world;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use ksm_core::backend::sim::{Call, Failure, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Error, PageIndex, PageRange, RegionId};
use step_hooks::{Standing, times_taken};
use world::{GUARDED, World};

const FIRST: PageIndex = PageIndex(0);

/// Pages are merged at first sight.
fn world() -> World {
    World::new(Config {
        settle_passes: 0,
        ..Config::default()
    })
}

impl World {
    /// A guest that has pages of these contents.
    fn holding(&self, contents: &[u64]) -> (SimGuest, RegionId) {
        let content = |page| contents[usize::try_from(page).unwrap()];
        let guest = self.guest_of(contents.len() as u64, content);
        let region = self.register(&guest);
        (guest, region)
    }

    fn sharers(&self, region: RegionId) -> u64 {
        self.ksm.explain(region, FIRST).unwrap().sharers
    }
}

/// While the call waits for a busy region, a pass must not merge the pages that are
/// unshared already with the very frame that is being emptied.
#[test]
fn nobody_comes_to_a_frame_that_is_being_emptied() {
    let world = world();
    // Of one content, and another one to keep the middle region busy with: its frame
    // moves to where a third one's was.
    let (_, first) = world.holding(&[7]);
    let (_, busy) = world.holding(&[7, 8, 8, 9, 9]);
    world.passes(2);
    let eights = PageRange::new(PageIndex(1), 2);
    world.ksm.discard(busy, eights).unwrap();
    let (_, last) = world.holding(&[7]);
    world.passes(2);
    assert_eq!(world.sharers(last), 3);
    let ksm = Arc::clone(&world.ksm);
    let moving = Standing::at(Step::Stopped, 1, move || {
        drop(ksm.move_frame(busy, PageIndex(3)));
    });
    moving.is_there();
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
    moving.go();
    moving.ends();
    scanning.join().unwrap();
    let unshared = unsharing.join().unwrap();
    assert!(shared.contains(&0), "merged again meanwhile: {shared:?}");
    // The end of the pass may have helped.
    let unshared = unshared.unwrap();
    assert!((1..=3).contains(&unshared), "{unshared}");
    world.ksm.check().unwrap();
    world.passes(2);
    assert_eq!(world.sharers(last), 3, "with another frame");
}

/// Beside a thread that scans as fast as it can, every page is unshared once.
#[test]
fn a_frame_is_emptied_beside_a_scanner() {
    const GUESTS: usize = 60;
    let world = world();
    let guests: Vec<_> = (0..GUESTS).map(|_| world.holding(&[7])).collect();
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
    let (_, region) = world.holding(&[7]);
    let (_, other) = world.holding(&[7]);
    world.passes(2);
    let sim = &world.sim;
    // The first page that is tried gets a copy, the second none.
    for nth in 2..100 {
        sim.fail_nth(Call::Populate, Failure::OutOfMemory, nth);
    }
    let Err(Error::FrameStillShared { pages, sharers, .. }) =
        world.ksm.unshare_frame(region, FIRST)
    else {
        panic!("one page got no copy");
    };
    let left: Vec<_> = sharers.iter().map(|sharer| sharer.region).collect();
    assert_eq!((pages, left.len()), (1, 1));
    let left = left[0];
    assert!([region, other].contains(&left));
    let frame = world.ksm.explain(left, FIRST).unwrap().frame;
    let (_, new) = world.holding(&[7]);
    world.passes(2);
    assert_eq!(world.sharers(left), 1, "nobody came to it");
    assert_eq!(world.sharers(new), 2, "with the page that had got a copy");
    assert_ne!(world.ksm.explain(new, FIRST).unwrap().frame, frame);
    sim.no_failures();
    assert_eq!(world.ksm.unshare_frame(left, FIRST).unwrap(), 1);
    world.passes(2);
    assert_eq!(world.sharers(left), 3);
}

/// A clone that is made meanwhile maps the frame no longer than its maker's call, and
/// what it maps is not overlooked.
#[test]
fn no_clone_is_left_with_a_frame_that_was_emptied() {
    const PAGES: u64 = 96;
    // A clone is made eight pages at a time.
    let world = World::new(Config {
        settle_passes: 0,
        window_pages: 1,
        ..Config::default()
    });
    let contents: Vec<_> = (1..=PAGES).collect();
    let (_, parent) = world.holding(&contents);
    let (_, twin) = world.holding(&[1]);
    world.passes(3);
    let fork = || {
        let (ksm, space) = (Arc::clone(&world.ksm), world.space);
        let source = world.sim.guest(PAGES);
        move || ksm.fork_region(parent, space, source, GUARDED).unwrap()
    };
    // All its pages map frames now; and there are places for frames to move to.
    let clone = fork()();
    for region in [parent, clone] {
        let pages = PageRange::new(PageIndex(1), 2);
        world.ksm.discard(region, pages).unwrap();
    }
    let again = fork();
    let windows = times_taken(Step::Planned, || {
        again();
    });
    let waits = |count: u64| {
        while world.ksm.region_stats(parent).unwrap().lease_waits < count {
            thread::yield_now();
        }
    };
    let before = world.ksm.region_stats(parent).unwrap().lease_waits;
    let frame = world.ksm.explain(twin, FIRST).unwrap().frame;
    assert!(frame.is_some());
    let moves = |page| {
        let ksm = Arc::clone(&world.ksm);
        Standing::at(Step::Stopped, 1, move || {
            drop(ksm.move_frame(parent, PageIndex(page)));
        })
    };

    // The parent's pages are all merged: its maker looks at them once more, and then
    // takes eight pages, and then the next.
    let last = fork();
    let forking = Standing::at(Step::Planned, windows, move || {
        last();
    });
    forking.is_there();
    let first = moves(90);
    waits(before + 1);
    forking.go();
    first.is_there();
    waits(before + 2);
    let second = moves(91);
    waits(before + 3);
    first.go();
    second.is_there();
    // The clone has its first pages, and waits for its turn to take more.
    waits(before + 4);
    let ksm = Arc::clone(&world.ksm);
    let unsharing = thread::spawn(move || ksm.unshare_frame(twin, FIRST));
    waits(before + 5);
    second.go();
    // Where the clone is complete before it has looked for sharers once more, it is
    // found like the others, and both unshare what is left; where it is not, its
    // page has no place yet.
    match unsharing.join().unwrap() {
        Ok(pages) => assert!(pages <= 5, "{pages}"),
        Err(Error::FrameStillShared { pages, sharers, .. }) => {
            assert_eq!((pages, sharers), (1, vec![]));
        }
        Err(error) => panic!("{error}"),
    }
    for standing in [forking, first, second] {
        standing.ends();
    }
    for region in world.ksm.regions_of(world.space).unwrap() {
        let explained = world.ksm.explain(region, FIRST).unwrap();
        assert_ne!(explained.frame, frame);
    }
    world.ksm.check().unwrap();
    assert_eq!(world.ksm.regions_of(world.space).unwrap().len(), 5);
}

/// Whoever was to empty a frame may be killed before he does: then a pass does it.
#[test]
fn a_frame_is_emptied_where_the_maker_of_a_region_was_killed() {
    let world = world();
    let (_, one) = world.holding(&[7]);
    let (_, twin) = world.holding(&[7]);
    world.passes(2);
    let frame = world.ksm.explain(one, FIRST).unwrap().frame;
    assert!(frame.is_some());
    let restored = world.sim.guest(1);
    restored.write(FIRST, &pattern(7));
    let (is_here, here) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let (ksm, space, source) = (Arc::clone(&world.ksm), world.space, restored.clone());
    let maker = thread::spawn(move || {
        set_hook(Some(Box::new(move |step| match step {
            // It maps the frame, and nobody knows of it.
            Step::Reared => {
                is_here.send(()).unwrap();
                may_go.recv().unwrap();
            }
            Step::Known => {
                is_here.send(()).unwrap();
                loop {
                    thread::park();
                }
            }
            _ => {}
        })));
        let _ = ksm.take_over(space, source, GUARDED);
    });
    here.recv().unwrap();
    let unshared = world.ksm.unshare_frame(one, FIRST);
    let Err(Error::FrameStillShared { pages, sharers, .. }) = unshared else {
        panic!("the new region maps it: {unshared:?}");
    };
    assert_eq!((pages, sharers), (1, vec![]));
    go.send(()).unwrap();
    here.recv().unwrap();
    world.ksm.recover(maker.thread().id());
    let known = world.ksm.regions_of(world.space).unwrap();
    let taken = *known.iter().find(|id| ![one, twin].contains(id)).unwrap();
    assert_eq!(world.ksm.explain(taken, FIRST).unwrap().frame, frame);
    world.passes(1);
    assert_ne!(world.ksm.explain(taken, FIRST).unwrap().frame, frame);
    world.passes(2);
    assert_eq!(world.sharers(taken), 3, "with another frame");
    assert_eq!(restored.read(FIRST), *pattern(7));
}
