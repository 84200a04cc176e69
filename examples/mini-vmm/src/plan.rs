//! [`Plan`]: what each page of one guest holds, from a recipe and a seed.

use std::collections::HashMap;
use std::ops::Range;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::content::{Kind, PageSpec, key};
use crate::recipe::{Order, POISON, Recipe};

/// Pages that keep together in [`Order::Shuffled`].
const RUN_PAGES: usize = 16;

/// What keys are made for: equal tags and numbers give equal contents.
mod tag {
    pub(super) const COMMON: u64 = 1;
    pub(super) const UNIQUE: u64 = 2;
    pub(super) const LOCKSTEP: u64 = 3;
    pub(super) const DISCARDABLE: u64 = 4;
}

/// What each page of one guest holds when it has filled its memory.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// By page.
    pub(crate) pages: Vec<PageSpec>,
    /// The pages that are rewritten, by their place in the lockstep: the n-th
    /// page of one guest is equal to the n-th of another at the same time.
    pub(crate) lockstep: Vec<u64>,
    /// The pages that may be discarded: always the last ones.
    pub(crate) discardable: Range<u64>,
}

/// How many pages of a guest there are of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    stretch: u64,
    last_byte: u64,
    common: u64,
    zero: u64,
    rewritten: u64,
    discardable: u64,
    unique: u64,
}

impl Counts {
    fn new(recipe: &Recipe, pages: u64) -> Self {
        let share = |of: u64, percent: u8| of * u64::from(percent) / 100;
        let all_common = share(pages, recipe.common);
        let stretch = share(all_common, recipe.stretch);
        let last_byte = share(all_common, recipe.last_byte);
        let zero = share(pages, recipe.zero);
        let rewritten = share(pages, recipe.rewritten);
        let discardable = share(pages, recipe.discardable);
        Self {
            stretch,
            last_byte,
            common: all_common - stretch - last_byte,
            zero,
            rewritten,
            discardable,
            // What rounding leaves over is unique.
            unique: pages - all_common - zero - rewritten - discardable,
        }
    }

    /// Pages that `guests` guests can save altogether at most.
    const fn mergeable(&self, guests: u64) -> u64 {
        let once_each = self.common + self.rewritten + self.discardable;
        // A stretch is one content; a block of equal frames may be kept for it.
        let stretch = (self.stretch * guests).saturating_sub(1);
        (guests - 1) * once_each + stretch + guests * self.zero
    }
}

/// Pages that `guests` guests of `pages` pages can save altogether at most,
/// when all of them rest.
pub(crate) fn mergeable_pages(recipe: &Recipe, pages: u64, guests: u64) -> u64 {
    Counts::new(recipe, pages).mergeable(guests)
}

/// Pages that guests with these pages, which share what they can, can save at most.
pub(crate) fn duplicate_pages(pages: impl Iterator<Item = PageSpec>) -> u64 {
    let mut by_content = HashMap::new();
    for spec in pages.filter(|spec| spec.kind != Kind::Skip) {
        *by_content.entry(spec).or_insert(0) += 1;
    }
    let saved = |(spec, pages): (PageSpec, u64)| match spec == PageSpec::ZERO {
        true => pages,
        // A stretch is one content; a block of equal frames may be kept for it.
        false => pages - 1,
    };
    by_content.into_iter().map(saved).sum()
}

impl Plan {
    /// The plan of guest number `guest`.
    pub(crate) fn new(recipe: &Recipe, pages: u64, guest: u64, seed: u64) -> Self {
        let counts = Counts::new(recipe, pages);
        let common = |n| PageSpec::stream(key([seed, tag::COMMON, n]));
        let own_byte = u8::try_from(1 + guest % 255).expect("a remainder of 255 is a byte");

        // Each with its place in the lockstep, if it has one.
        let mut slots: Vec<(PageSpec, Option<u64>)> = Vec::new();
        let mut add = |n: u64, spec: &dyn Fn(u64) -> PageSpec| {
            slots.extend((0..n).map(|i| (spec(i), None)));
        };
        add(counts.common, &common);
        add(counts.stretch, &|_| PageSpec::repeat(POISON));
        add(counts.zero, &|_| PageSpec::ZERO);
        add(counts.last_byte, &|n| common(n).with_last_byte(own_byte));
        let unique = key([seed, tag::UNIQUE, guest]);
        add(counts.unique, &|n| {
            PageSpec::stream(key([unique, tag::UNIQUE, n]))
        });
        slots.extend((0..counts.rewritten).map(|n| {
            let spec = PageSpec::lockstep(key([seed, tag::LOCKSTEP, n]));
            (spec, Some(n))
        }));
        shuffle(&mut slots, recipe.order, key([seed, guest, 0]));
        slots.extend((0..counts.discardable).map(|n| {
            let spec = PageSpec::stream(key([seed, tag::DISCARDABLE, n]));
            (spec, None)
        }));

        let mut places: Vec<(u64, u64)> = (0u64..)
            .zip(&slots)
            .filter_map(|(page, (_, place))| place.map(|place| (place, page)))
            .collect();
        places.sort_unstable();
        Self {
            pages: slots.into_iter().map(|(spec, _)| spec).collect(),
            lockstep: places.into_iter().map(|(_, page)| page).collect(),
            discardable: pages - counts.discardable..pages,
        }
    }

    /// Pages of the guest.
    pub(crate) const fn len(&self) -> u64 {
        self.pages.len() as u64
    }

    /// What page number `page` holds.
    pub(crate) fn page(&self, page: u64) -> PageSpec {
        let at = usize::try_from(page).expect("a plan is held in memory");
        self.pages[at]
    }
}

fn shuffle<T: Clone>(slots: &mut Vec<T>, order: Order, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    match order {
        Order::Sorted => {}
        Order::Scattered => slots.shuffle(&mut rng),
        Order::Shuffled => {
            let mut runs: Vec<&[T]> = slots.chunks(RUN_PAGES).collect();
            runs.shuffle(&mut rng);
            *slots = runs.concat();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans(recipe: &str) -> Vec<Plan> {
        let recipe = recipe.parse().unwrap();
        (0..3)
            .map(|guest| Plan::new(&recipe, 1000, guest, 7))
            .collect()
    }

    /// What would be saved if all equal pages were merged, counted page by page.
    fn duplicates(plans: &[Plan]) -> u64 {
        let mut by_content: HashMap<Vec<u64>, u64> = HashMap::new();
        for spec in plans.iter().flat_map(|plan| &plan.pages) {
            *by_content.entry(spec.words().collect()).or_default() += 1;
        }
        by_content
            .into_iter()
            .map(|(words, n)| {
                if words.iter().all(|&w| w == 0) {
                    n
                } else {
                    n - 1
                }
            })
            .sum()
    }

    #[test]
    fn what_can_be_merged_is_what_is_equal() {
        for recipe in ["default", "lockstep", "chaos", "scattered", "poison"] {
            let plans = plans(recipe);
            assert_eq!(
                mergeable_pages(&recipe.parse().unwrap(), 1000, 3),
                duplicates(&plans),
                "{recipe}"
            );
            let pages = plans.iter().flat_map(|plan| plan.pages.iter().copied());
            assert_eq!(duplicate_pages(pages), duplicates(&plans), "{recipe}");
        }
    }

    #[test]
    fn the_lockstep_lists_name_equal_pages() {
        let plans = plans("scattered");
        for place in 0..plans[0].lockstep.len() {
            let specs: Vec<_> = plans
                .iter()
                .map(|plan| plan.page(plan.lockstep[place]))
                .collect();
            assert!(specs.iter().all(|spec| *spec == specs[0]));
        }
        assert_ne!(plans[0].lockstep, plans[1].lockstep);
    }
}
