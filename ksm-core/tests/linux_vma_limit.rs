//! The limit on mappings, met for real and met by the budget. One test: it
//! spends all that the process has.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use ksm_core::backend::linux::{LinuxBackend, StopMethod};
use ksm_core::page::{PageIndex, PageRange};
use ksm_core::{Config, Ksm, Outcome, RegionId, RegionOptions};
use linux_common::{Guest, METHODS, SpentVmas, backend, pages};

const PAGES: u64 = 256;
/// Pages that stand alone, four apart: merged, each costs a mapping, and one more
/// for what is between.
const SINGLES: u64 = 32;

/// Guests that share a domain, and what they must hold.
struct World {
    ksm: Ksm<LinuxBackend>,
    guests: [(Guest, RegionId); 3],
}

impl World {
    fn new(method: StopMethod, max_vmas: u64) -> Self {
        let config = Config {
            max_vmas: Some(max_vmas),
            settle_passes: 0,
            parallel_pages: u32::MAX, // No thread can be made without mappings.
            ..Config::default()
        };
        let ksm = Ksm::new(backend(method), config).unwrap();
        let domain = ksm.create_domain().unwrap();
        let guests = [(); 3].map(|()| {
            let guest = Guest::new(PAGES);
            let space = ksm.create_space(domain).unwrap();
            let options = RegionOptions { dma_guarded: true };
            let region = ksm.register(space, guest.source(), options).unwrap();
            (guest, region)
        });
        Self { ksm, guests }
    }

    /// Writes the same to some guests: page by page the next byte.
    fn fill(&self, guests: &[usize], range: PageRange, first: u8) {
        for &guest in guests {
            for (byte, page) in (first..).zip(range.iter()) {
                self.guests[guest].0.fill(page.0, byte);
            }
        }
    }

    fn fill_singles(&self, guests: &[usize]) {
        for n in 0..SINGLES {
            self.fill(guests, pages(place(n), 1), single(n));
        }
    }

    fn singles_hold(&self, guests: &[usize]) {
        for &guest in guests {
            for n in 0..SINGLES {
                let byte = single(n);
                assert_eq!(self.guests[guest].0.ends(place(n)), (byte, byte));
            }
        }
    }

    fn passes(&self, count: u64) {
        let until = self.ksm.stats().full_scans + count;
        while self.ksm.stats().full_scans < until {
            self.ksm.scan(1 << 20).unwrap();
        }
        self.ksm.check().unwrap();
    }

    fn outcome(&self, guest: usize, page: u64) -> Outcome {
        let explained = self.ksm.explain(self.guests[guest].1, PageIndex(page));
        explained.unwrap().outcome
    }

    /// Of the singles of a guest, how many have this outcome.
    fn singles(&self, guest: usize, outcome: Outcome) -> u64 {
        let all = (0..SINGLES).filter(|&n| self.outcome(guest, place(n)) == outcome);
        all.count() as u64
    }

    fn count(&self, outcome: Outcome) -> u64 {
        self.ksm.stats().outcomes[outcome]
    }
}

/// Where a single page is: never at the end of a mapping.
const fn place(n: u64) -> u64 {
    4 * n + 2
}

/// What a single page holds.
fn single(n: u64) -> u8 {
    100 + u8::try_from(n).unwrap()
}

/// The kernel refuses mappings. What needs none is still merged, nothing is
/// lost, and the reason is told; once there are some again, the rest is merged.
fn at_the_limit(method: StopMethod) {
    let world = World::new(method, 1 << 20);
    // A run that guests 1 and 2 share whole, and guest 0 for its first half.
    world.fill(&[1, 2], pages(160, 16), 1);
    world.fill(&[0], pages(160, 8), 1);
    world.passes(2);
    assert_eq!(world.ksm.stats().pages_sharing, 16 + 8);

    // Singles take two each of what is left.
    let mut spent = SpentVmas::all();
    spent.leave(16);
    world.fill_singles(&[0, 1]);
    world.passes(3);
    let merged = world.singles(0, Outcome::Merged) + world.singles(1, Outcome::Merged);
    let refused = world.singles(0, Outcome::NoVmas) + world.singles(1, Outcome::NoVmas);
    println!("{method:?}: {merged} singles merged, {refused} refused");
    assert!((6..=8).contains(&merged), "{method:?}: {merged}");
    assert_eq!(merged + refused, 2 * SINGLES, "{method:?}");
    assert!(world.count(Outcome::NoVmas) >= refused);
    assert_eq!(world.count(Outcome::VmaBudget), 0);
    world.singles_hold(&[0, 1]);

    // One mapping is left, which a merge takes for a while that needs none in the
    // end. Singles need two: what is tried for them may take that one, so it is
    // given back before each of these.
    //
    // In place: what was written, and is equal to its frame again.
    world.fill(&[0], pages(162, 2), 77);
    world.passes(1);
    assert_eq!(world.ksm.stats().cow_breaks, 2);
    world.fill(&[0], pages(162, 2), 3);
    spent.leave(1);
    world.passes(1);
    assert_eq!(world.outcome(0, 162), Outcome::Merged, "{method:?}");
    // The other half of a run, which joins the first.
    world.fill(&[0], pages(168, 8), 9);
    spent.leave(1);
    world.passes(1);
    for page in 168..176 {
        assert_eq!(world.outcome(0, page), Outcome::Merged, "{method:?} {page}");
    }
    // Zero pages, beside a mapping that is there.
    world.guests[0].0.fill_all(pages(176, 4), 5);
    world.guests[0].0.fill_all(pages(176, 4), 0);
    spent.leave(1);
    world.passes(1);
    assert_eq!(world.outcome(0, 177), Outcome::Zeroed, "{method:?}");
    // All of it is the guest's to write.
    assert!(
        world.singles(0, Outcome::NoVmas) > 0,
        "still no mapping for these"
    );
    world.singles_hold(&[0, 1]);
    for page in 160..176 {
        let byte = u8::try_from(page - 159).unwrap();
        assert_eq!(world.guests[0].0.ends(page), (byte, byte));
        world.guests[0].0.store(page, 200);
        assert_eq!(world.guests[0].0.ends(page), (200, byte));
    }

    drop(spent);
    let refusals = world.count(Outcome::NoVmas);
    world.passes(3);
    assert_eq!(world.singles(0, Outcome::Merged), SINGLES, "{method:?}");
    assert_eq!(world.singles(1, Outcome::Merged), SINGLES, "{method:?}");
    assert_eq!(world.count(Outcome::NoVmas), refusals, "and none more");
    world.singles_hold(&[0, 1]);
}

/// The budget holds merging back, and says so; mappings that come back are spent
/// on the rest.
fn at_the_budget(method: StopMethod) {
    const BUDGET: u64 = 48; // A mapping for 16 pages is plenty: no run is too short.
    let world = World::new(method, BUDGET);
    world.fill_singles(&[0, 1]);
    world.passes(3);
    let merged = world.singles(0, Outcome::Merged) + world.singles(1, Outcome::Merged);
    let held = world.singles(0, Outcome::VmaBudget) + world.singles(1, Outcome::VmaBudget);
    println!("{method:?}: {merged} singles merged, {held} held back");
    assert_eq!((merged, merged + held), (BUDGET / 2, 2 * SINGLES));
    assert_eq!(world.ksm.stats().vmas, BUDGET);
    assert_eq!(world.count(Outcome::NoVmas), 0);
    world.singles_hold(&[0, 1]);
    // Half of the pages that wait are wanted no more, and neither are the first
    // that were merged.
    for (guest, region) in &world.guests[..2] {
        world
            .ksm
            .discard(*region, pages(0, 4 * (SINGLES - 12)))
            .unwrap();
        assert_eq!(guest.ends(0), (0, 0));
    }
    world.passes(3);
    for n in SINGLES - 12..SINGLES {
        for guest in 0..2 {
            assert_eq!(
                world.outcome(guest, place(n)),
                Outcome::Merged,
                "{method:?} {n}"
            );
            assert_eq!(world.guests[guest].0.ends(place(n)).0, single(n));
        }
    }
    assert_eq!(world.ksm.stats().vmas, BUDGET);
}

#[test]
fn merging_goes_on_where_it_can_and_the_cause_is_named() {
    for method in METHODS {
        at_the_limit(method);
        at_the_budget(method);
    }
}
