//! What clones, moves and restored memory cost in virtual memory areas, and that it
//! is no more than the budget leaves, on the simulated backend.
#![allow(clippy::unwrap_used)]

mod world;

use std::sync::Barrier;
use std::thread;

use ksm_core::backend::sim::{SimGuest, pattern};
use ksm_core::{Config, Error, Outcome, PageIndex, RegionId};
use world::{GUARDED, World};

fn world(max_vmas: Option<u64>) -> World {
    World::new(Config {
        max_vmas,
        // Small windows, so that clones are made in several steps.
        window_pages: 64,
        ..Config::default()
    })
}

impl World {
    /// A guest whose page `n` holds `content(n)`, registered.
    fn registered(&self, pages: u64, content: impl Fn(u64) -> u64) -> (RegionId, SimGuest) {
        let guest = self.guest_of(pages, content);
        (self.register(&guest), guest)
    }

    fn fork(&self, parent: RegionId, pages: u64) -> (RegionId, SimGuest) {
        let memory = self.sim.guest(pages);
        let fork = self
            .ksm
            .fork_region(parent, self.space, memory.clone(), GUARDED);
        (fork.unwrap(), memory)
    }

    /// Two guests whose every fourth page is equal, merged with one another, and of
    /// the first of which the last 256 pages are its own.
    fn two_of_many_runs(&self) -> [(RegionId, SimGuest); 2] {
        let guests = [0, 1].map(|n| {
            self.registered(PAGES, move |page| match page % 4 {
                2 if page < PAGES - LONG => 1 + page,
                _ => (1 + n) * 10_000 + page,
            })
        });
        self.passes(10);
        guests
    }

    fn vmas(&self, region: RegionId) -> u64 {
        self.ksm.region_stats(region).unwrap().vmas
    }

    /// How many pages map frames.
    fn merged(&self, region: RegionId) -> u64 {
        self.ksm.region_stats(region).unwrap().ksm_merging_pages
    }

    fn copied_for_want_of_mappings(&self, region: RegionId) -> u64 {
        let stats = self.ksm.region_stats(region).unwrap();
        stats.outcomes[Outcome::VmaBudget]
    }
}

const PAGES: u64 = 1024;
/// Pages in a long run at the end of memory.
const LONG: u64 = 256;
/// What 192 single pages in each of two guests cost.
const SPENT: u64 = 2 * 2 * (PAGES - LONG) / 4;

fn same(one: &SimGuest, other: &SimGuest) {
    for page in (0..PAGES).map(PageIndex) {
        assert_eq!(one.read(page), other.read(page), "{page}");
    }
}

#[test]
fn a_clone_takes_no_more_mappings_than_there_are() {
    let mut cloned = Vec::new();
    for left in [0, 1, 7, 50, 200, 1000] {
        let budget = SPENT + left;
        let world = world(Some(budget));
        let [(parent, memory), _] = world.two_of_many_runs();
        assert_eq!(world.ksm.stats().vmas, SPENT);
        let (clone, copy) = world.fork(parent, PAGES);
        world.ksm.check().unwrap();
        same(&memory, &copy);
        assert!(world.ksm.stats().vmas <= budget, "{left}");
        // A mapping for each guest beside what merging costs.
        assert_eq!(world.sim.vmas(), 3 + world.ksm.stats().vmas);
        let (merged, copied) = (
            world.merged(clone),
            world.copied_for_want_of_mappings(clone),
        );
        assert_eq!(merged + copied, world.merged(parent), "{left}");
        cloned.push((world.merged(parent), merged));
        // They part as ever.
        copy.write(PageIndex(2), &pattern(9));
        memory.write(PageIndex(PAGES - 1), &pattern(8));
        assert_eq!(
            copy.read(PageIndex(PAGES - 1)),
            *pattern(10_000 + PAGES - 1)
        );
        assert_eq!(memory.read(PageIndex(2)), *pattern(3));
    }
    let singles = (PAGES - LONG) / 4;
    assert_eq!(cloned[0], (PAGES, 0), "no mapping: all is copied");
    assert!(cloned.is_sorted(), "{cloned:?}");
    assert!(
        cloned[3].1 >= LONG,
        "50 are enough for what is long: {cloned:?}"
    );
    assert!(cloned[4].1 > LONG + singles / 2, "{cloned:?}");
    assert_eq!(cloned[5], (PAGES, PAGES), "there are enough");
}

/// Nothing of the parent comes to map frames for a clone for which there is no
/// mapping, and each page that does leaves one for the clone.
#[test]
fn freezing_is_held_to_the_budget_too() {
    const BUDGET: u64 = 40;
    let world = world(Some(BUDGET));
    // Frames for every fourth page, in the order of another guest: no two of the
    // parent's are in a row.
    let scattered = |page: u64| page * 397 % PAGES;
    world.fork(world.registered(PAGES, |page| 1 + page).0, PAGES);
    assert_eq!(world.ksm.stats().vmas, 0, "all of it is one run");
    let (parent, memory) = world.registered(PAGES, |page| 1 + scattered(page));
    let (clone, copy) = world.fork(parent, PAGES);
    world.ksm.check().unwrap();
    same(&memory, &copy);
    assert!(world.ksm.stats().vmas <= BUDGET);
    let merged = [parent, clone].map(|region| world.merged(region));
    assert!(merged[0] < PAGES / 16, "{merged:?}");
    assert_eq!(merged[0], merged[1], "each has its mapping in the clone");
}

#[test]
fn clones_that_are_made_at_a_time_share_what_there_is() {
    for _ in 0..10 {
        let world = world(Some(SPENT + 500));
        let parents = world.two_of_many_runs();
        let start = Barrier::new(4);
        thread::scope(|scope| {
            for (parent, memory) in parents.iter().chain(&parents) {
                let (world, start) = (&world, &start);
                scope.spawn(move || {
                    start.wait();
                    let (_, copy) = world.fork(*parent, PAGES);
                    same(memory, &copy);
                });
            }
        });
        world.ksm.check().unwrap();
        // What freezes that run at a time admit is not counted by one another, so
        // the parents may have some more.
        let regions = world.ksm.regions_of(world.space).unwrap();
        let is_clone = |region: &RegionId| parents.iter().all(|(parent, _)| parent != region);
        let clones = regions.into_iter().filter(is_clone);
        let spent: u64 = clones.map(|region| world.vmas(region)).sum();
        assert!((100..=500).contains(&spent), "{spent}");
    }
}

#[test]
fn a_move_takes_no_more_mappings_than_there_are() {
    for left in [0, 50, 1000] {
        let world = world(Some(SPENT + left));
        let [(region, memory), (other, _)] = world.two_of_many_runs();
        let (before, merged) = (world.vmas(region), world.merged(region));
        let place = world.sim.guest(PAGES);
        let expected: Vec<_> = (0..PAGES).map(|n| memory.read(PageIndex(n))).collect();
        let moved = world.ksm.move_region(region, place.clone()).unwrap();
        world.ksm.check().unwrap();
        for (page, expected) in (0..).map(PageIndex).zip(&expected) {
            assert_eq!(place.read(page), *expected);
        }
        if left == 1000 {
            assert_eq!((world.vmas(moved), world.merged(moved)), (before, merged));
        } else {
            assert!(world.vmas(moved) <= left, "while both were there");
        }
        // What was copied for that is merged again.
        world.passes(10);
        assert_eq!((world.vmas(moved), world.merged(moved)), (before, merged));
        assert_eq!(world.merged(other), merged);
    }
}

#[test]
fn restored_memory_is_refused_where_mappings_do_not_suffice() {
    // Every fourth page of zeros: 512 seams.
    let content = |page| if page % 4 == 3 { 0 } else { 1 + page };
    let needed = 2 * PAGES / 4 - 1;
    for max in [0, 100, needed - 1] {
        let world = world(Some(max));
        let guest = world.guest_of(PAGES, content);
        let taken = world.ksm.take_over(world.space, guest.clone(), GUARDED);
        let error = taken.unwrap_err();
        let Error::VmaBudget { needed, left } = error else {
            panic!("{error}")
        };
        assert!(needed > left && left <= max, "{error}");
        assert!(error.to_string().contains("max_vmas"), "{error}");
        world.ksm.check().unwrap();
        for page in 0..PAGES {
            assert_eq!(guest.read(PageIndex(page)), *pattern(content(page)));
        }
        assert!(world.ksm.regions_of(world.space).unwrap().is_empty());
    }
    let world = world(Some(needed));
    let guest = world.guest_of(PAGES, content);
    let taken = world.ksm.take_over(world.space, guest, GUARDED).unwrap();
    assert_eq!(world.vmas(taken), needed);
}

/// Two that come by the same contents at a time make frames for them together, so
/// that there is one run of frames and not many pieces of two.
#[test]
fn guests_that_hold_the_same_are_cloned_at_a_time() {
    const ROUNDS: u64 = 4;
    const PAGES: u64 = 4096;
    let mut seams = 0;
    for _ in 0..ROUNDS {
        let world = world(None);
        let parents = [(); 2].map(|()| world.registered(PAGES, |page| 1 + page).0);
        fork_at_a_time(&world, parents, PAGES);
        seams += world.ksm.stats().vmas;
        assert_eq!(world.ksm.stats().pages_shared, PAGES);
    }
    // None, but where one has waited for another in vain.
    assert!(seams < 8 * ROUNDS, "{seams} seams in {ROUNDS} rounds");
}

/// Two that come by different contents at a time get numbers in different places.
#[test]
fn guests_that_hold_something_else_are_cloned_at_a_time() {
    const PAGES: u64 = 4096;
    for _ in 0..4 {
        let world = world(None);
        let parents = [0, PAGES].map(|first| world.registered(PAGES, |page| 1 + first + page).0);
        fork_at_a_time(&world, parents, PAGES);
        // Each run goes on until it meets the next: a few times in all.
        let seams = world.ksm.stats().vmas;
        assert!(seams <= 4 * PAGES / 1024 + 4, "{seams}");
    }
}

fn fork_at_a_time(world: &World, parents: [RegionId; 2], pages: u64) {
    let start = Barrier::new(2);
    thread::scope(|scope| {
        for parent in parents {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                world.fork(parent, pages);
            });
        }
    });
    world.ksm.check().unwrap();
}
