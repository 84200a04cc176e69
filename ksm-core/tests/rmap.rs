//! From a frame to the pages that map it, on the simulated backend.
#![allow(clippy::unwrap_used)]

mod world;

use ksm_core::backend::sim::{Call, Failure, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::{
    Config, Error, FrameId, FrameMove, Ksm, Outcome, PageIndex, PageRange, RegionId, RegionOptions,
    Sharer, SpaceId,
};
use world::{GUARDED, fill};

struct World {
    ksm: Ksm<SimBackend>,
    spaces: Vec<SpaceId>,
    regions: Vec<RegionId>,
    guests: Vec<SimGuest>,
}

fn one(page: u64) -> PageRange {
    PageRange::one(PageIndex(page))
}

/// Guests of which each has the pages that `contents` gives, by page.
fn world(config: Config, guests: usize, pages: u64, content: impl Fn(usize, u64) -> u64) -> World {
    world_of(GUARDED, config, guests, pages, content)
}

fn world_of(
    options: RegionOptions,
    config: Config,
    guests: usize,
    pages: u64,
    content: impl Fn(usize, u64) -> u64,
) -> World {
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Ksm::new(sim.clone(), config).unwrap();
    let domain = ksm.create_domain().unwrap();
    let mut world = World {
        ksm,
        spaces: Vec::new(),
        regions: Vec::new(),
        guests: Vec::new(),
    };
    for number in 0..guests {
        let guest = sim.guest(pages);
        fill(&guest, |page| content(number, page));
        let space = world.ksm.create_space(domain).unwrap();
        let region = world.ksm.register(space, guest.clone(), options).unwrap();
        world.spaces.push(space);
        world.regions.push(region);
        world.guests.push(guest);
    }
    world
}

impl World {
    fn passes(&self, passes: u64) {
        world::passes(&self.ksm, passes);
    }

    fn frame(&self, guest: usize, page: u64) -> Option<FrameId> {
        let explained = self.ksm.explain(self.regions[guest], PageIndex(page));
        explained.unwrap().frame
    }

    /// Lets no page name the frame any more that all guests have at `page`.
    fn free_frame_of(&self, page: u64) {
        for &region in &self.regions {
            self.ksm.discard(region, one(page)).unwrap();
        }
    }

    fn move_frame(&self, guest: usize, page: u64) -> Option<FrameMove> {
        let page = PageIndex(page);
        self.ksm.move_frame(self.regions[guest], page).unwrap()
    }

    fn sharers(&self, guest: usize, page: u64) -> Vec<Sharer> {
        let page = PageIndex(page);
        self.ksm.sharers(self.regions[guest], page).unwrap()
    }
}

#[test]
fn the_sharers_of_a_page_are_those_that_map_its_frame() {
    // Page 0 is everybody's, page 1 that of guests 0 and 1, page 2 nobody else's.
    let content = |guest: usize, page| match page {
        0 => 7,
        1 => 100 + guest as u64 / 2,
        _ => 200 + guest as u64,
    };
    let world = world(Config::default(), 3, 3, content);
    world.passes(2);
    let sharer = |guest: usize, page| Sharer {
        space: world.spaces[guest],
        region: world.regions[guest],
        page: PageIndex(page),
    };
    assert_eq!(
        world.sharers(0, 0),
        [sharer(0, 0), sharer(1, 0), sharer(2, 0)]
    );
    assert_eq!(world.sharers(1, 1), [sharer(0, 1), sharer(1, 1)]);
    assert_eq!(world.sharers(2, 1), []);
    world.guests[1].write(PageIndex(0), &pattern(8));
    world.passes(1);
    assert_eq!(world.sharers(0, 0), [sharer(0, 0), sharer(2, 0)]);
    let outside = world.ksm.sharers(world.regions[0], PageIndex(3));
    assert!(matches!(outside, Err(Error::OutOfRange { .. })));
}

#[test]
fn the_matrix_says_who_shares_how_much_with_whom() {
    // All share four pages; 0 and 1 share two more; 2 has one page twice.
    let content = |guest: usize, page| match (guest, page) {
        (_, 0..4) => 1 + page,
        (0 | 1, 4..6) => 10 + page,
        (2, 4..6) => 20,
        (_, page) => 100 * (guest as u64 + 1) + page,
    };
    let world = world(Config::default(), 3, 8, content);
    world.passes(3);
    let domain = world.ksm.sharing(ksm_domain(&world)).unwrap();
    let [a, b, c] = [0, 1, 2].map(|guest| world.spaces[guest]);
    let expected = [((a, b), 6), ((a, c), 4), ((b, c), 4), ((c, c), 1)];
    assert_eq!(domain.into_iter().collect::<Vec<_>>(), expected);
}

/// The domain of a world: the only one there is.
fn ksm_domain(world: &World) -> ksm_core::DomainId {
    world.ksm.space_domain(world.spaces[0]).unwrap()
}

#[test]
fn a_frame_can_be_taken_from_all_who_share_it() {
    let world = world(Config::default(), 5, 4, |_, page| page + 1);
    world.passes(2);
    assert_eq!(world.ksm.stats().pages_shared, 4);
    let before = world.ksm.store_bytes().unwrap();
    let unshared = world.ksm.unshare_frame(world.regions[3], PageIndex(2));
    assert_eq!(unshared.unwrap(), 5);
    world.ksm.check().unwrap();
    assert_eq!(world.ksm.stats().pages_shared, 3);
    assert_eq!(world.ksm.store_bytes().unwrap(), before - 4096);
    for guest in &world.guests {
        assert_eq!(guest.read(PageIndex(2)), *pattern(3));
    }
    let again = world.ksm.unshare_frame(world.regions[3], PageIndex(2));
    assert_eq!(again.unwrap(), 0);
}

/// What compaction is made of: all who share a frame go with it, and the place that
/// it leaves is free.
#[test]
fn a_frame_moves_with_all_who_share_it() {
    let world = world(Config::default(), 5, 8, |_, page| page + 1);
    world.passes(2);
    // Somewhere to go to.
    world.free_frame_of(0);
    let bytes = world.ksm.store_bytes().unwrap();
    let sharers = world.sharers(3, 2);
    let moved = world.move_frame(3, 2).unwrap();
    assert_eq!((moved.from, moved.to), (FrameId(2), FrameId(0)));
    assert_eq!((moved.moved, moved.stayed.len()), (5, 0));
    world.ksm.check().unwrap();
    assert_eq!(world.sharers(3, 2), sharers);
    assert_eq!(world.ksm.store_bytes().unwrap(), bytes);
    // Its neighbours' run is cut: the frame is another one.
    let vmas = |guest: usize| world.ksm.region_stats(world.regions[guest]).unwrap().vmas;
    assert_eq!(vmas(0), 3);
    // Whoever comes is merged with the frame where it is now.
    world.guests[0].write(PageIndex(5), &pattern(3));
    world.passes(2);
    assert_eq!(world.sharers(3, 2).len(), 6);
    for guest in &world.guests {
        assert_eq!(guest.read(PageIndex(2)), *pattern(3));
    }
}

/// Every gap is filled, however short, until nothing is left in the upper half.
#[test]
fn a_store_is_compacted() {
    let pages = 200;
    let world = world(Config::default(), 2, pages, |_, page| page + 1);
    world.passes(2);
    for page in (0..pages).step_by(2) {
        world.free_frame_of(page);
    }
    let half = FrameId(100);
    for page in (1..pages).step_by(2) {
        if world.frame(0, page) >= Some(half) {
            let moved = world.move_frame(0, page).unwrap();
            assert!(moved.to < half, "{moved:?}");
            assert_eq!(moved.moved, 2);
        }
    }
    world.ksm.check().unwrap();
    for page in (1..pages).step_by(2) {
        assert!(world.frame(1, page) < Some(half));
        assert_eq!(world.guests[1].read(PageIndex(page)), *pattern(page + 1));
    }
    assert_eq!(world.move_frame(0, 1), None, "no place is free below");
}

/// What cannot move stays, or has a copy; it keeps nobody else.
#[test]
fn a_frame_moves_without_those_that_cannot() {
    let world = world(Config::default(), 5, 4, |_, page| page + 1);
    world.passes(2);
    world.free_frame_of(0);
    let sim = world.ksm.backend();
    let pin = world.ksm.pin(world.regions[1], one(3));
    // A pin breaks COW: then the page is merged no longer.
    assert_eq!(world.sharers(0, 3).len(), 4);
    drop(pin);
    world.passes(2);
    assert_eq!(world.sharers(0, 3).len(), 5);
    sim.fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    let moved = world.move_frame(0, 3).unwrap();
    assert_eq!((moved.moved, moved.stayed.len()), (0, 5));
    assert!(
        moved
            .stayed
            .iter()
            .all(|(_, why)| *why == Outcome::NoMemory)
    );
    sim.no_failures();
    // The third that is merged finds no mapping left, and goes back.
    sim.fail_nth(Call::Share, Failure::NoVmas, 3);
    let moved = world.move_frame(0, 3).unwrap();
    assert_eq!((moved.moved, moved.stayed.len()), (4, 1), "{moved:?}");
    assert_eq!(moved.stayed[0].1, Outcome::NoVmas);
    world.ksm.check().unwrap();
    let frames = [0, 1, 2, 3, 4].map(|guest| world.frame(guest, 3));
    let old = frames.iter().filter(|&&frame| frame == Some(moved.from));
    assert_eq!(old.count(), 1, "{frames:?}");
    for guest in &world.guests {
        assert_eq!(guest.read(PageIndex(3)), *pattern(4));
    }
}

/// Where nobody may be moved the frame stays, and is found as before.
#[test]
fn a_frame_that_nobody_moves_with_stays() {
    let options = RegionOptions { dma_guarded: false };
    let world = world_of(options, Config::default(), 2, 4, |_, page| page + 1);
    world.passes(2);
    world.free_frame_of(0);
    let moved = world.move_frame(0, 1).unwrap();
    assert_eq!((moved.moved, moved.stayed.len()), (0, 2));
    assert_eq!(moved.stayed[0].1, Outcome::CopiedUnguarded);
    world.ksm.check().unwrap();
    assert_eq!(world.ksm.stats().stable_node_dups, 0);
    assert_eq!(world.sharers(0, 1).len(), 2);
}

/// No walk is unbounded: a content that very many pages have gets a chain of
/// frames, all of which are found, and die one by one.
#[test]
fn a_frame_has_no_more_sharers_than_it_may() {
    let config = Config {
        max_page_sharing: 3,
        // Not for long stretches, which get blocks anyway.
        stretch_pages: u32::MAX,
        ..Config::default()
    };
    // Every other page is of the one content.
    let pages = 600;
    let content = |_, page| if page % 2 == 0 { 1 } else { 1000 + page };
    let world = world(config, 2, pages, content);
    world.passes(6);
    let stats = world.ksm.stats();
    assert_eq!(stats.pages_shared + stats.pages_sharing, 600 + 600);
    // 300 pages of the one content in each guest.
    let frames = 300 + 600 / 3;
    assert_eq!((stats.pages_shared, stats.stable_node_dups), (frames, 199));
    for page in (0..pages).step_by(2) {
        assert!(world.sharers(0, page).len() <= 3);
    }
    // Most of them go, in an order in which the newest frames go first.
    for page in (0..pages).rev() {
        world.guests[1].write(PageIndex(page), &pattern(5000 + page));
        if page % 100 == 0 {
            world.passes(1);
        }
    }
    world.passes(3);
    let stats = world.ksm.stats();
    // The other guest's pages, of which the odd ones are alone with their frame.
    assert_eq!(stats.pages_shared + stats.pages_sharing, 300 + 300);
    // What is left is found by whoever comes.
    world.guests[1].write(PageIndex(0), &pattern(1));
    world.passes(2);
    let sharers = world.sharers(1, 0).len();
    assert!((1..=3).contains(&sharers), "{sharers}");
}
