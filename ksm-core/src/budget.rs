//! Virtual memory areas are what runs out first: a process has 65,530 by
//! default, and an isolated merged page costs two. So they are a budget, spent
//! where it saves most.
//!
//! Where the budget is small beside the memory that is registered, the first
//! pass that merges takes only long runs, and each pass after it is content with
//! shorter ones while something is left; so a few long runs are never kept out by
//! many single pages.

use crate::merge::{Goal, Wish};
use crate::page::{FrameId, PageIndex};
use crate::region::{PageTable, is_seam};
use crate::sync::Mutex;

/// Twice the pages that a mapping must save at first where the budget is small.
const FIRST_FLOOR: u64 = 16;

/// A mapping for so many registered pages is plenty: every run is welcome then.
const PAGES_PER_VMA: u64 = 16;

/// What may be spent, and on what.
#[derive(Debug)]
pub(crate) struct VmaBudget {
    /// The most that merging may cost; `None` for no limit.
    max: Option<u64>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// Twice the pages that a mapping must save, at least 1.
    floor: u64,
    /// Pages that this pass held back.
    held_back: u64,
}

/// What is left for one region's merges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Purse {
    left: u64,
    floor: u64,
}

impl VmaBudget {
    pub(crate) fn new(max: Option<u64>) -> Self {
        let state = State {
            floor: FIRST_FLOOR,
            held_back: 0,
        };
        Self {
            max,
            state: Mutex::new(state),
        }
    }

    /// What may be spent now, with `used` mappings spent on `pages` registered.
    pub(crate) fn purse(&self, used: u64, pages: u64) -> Purse {
        let Some(max) = self.max else {
            return Purse::BOTTOMLESS;
        };
        let plenty = max >= pages / PAGES_PER_VMA;
        Purse {
            left: max.saturating_sub(used),
            floor: if plenty { 0 } else { self.state.lock().floor },
        }
    }

    pub(crate) fn note_held_back(&self, pages: u64) {
        self.state.lock().held_back += pages;
    }

    /// The next pass is content with shorter runs if this one held some back.
    pub(crate) fn end_pass(&self) {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.held_back) > 0 {
            state.floor = (state.floor / 2).max(1);
        }
    }
}

impl Purse {
    /// Everything is worth its mappings.
    pub(crate) const BOTTOMLESS: Self = Self {
        left: u64::MAX,
        floor: 0,
    };

    /// Parts `wishes`, sorted by page, into those that are worth their mappings
    /// and those that are held back. A frame that `is_new`, with no sharer yet,
    /// saves nothing before its second page has paid as well, so it is charged
    /// twice.
    pub(crate) fn admit(
        mut self,
        pages: &PageTable,
        wishes: Vec<Wish>,
        is_new: impl Fn(FrameId) -> bool,
    ) -> (Vec<Wish>, Vec<Wish>) {
        if self.left == u64::MAX {
            return (wishes, Vec::new());
        }
        let mut admitted: Vec<Wish> = Vec::with_capacity(wishes.len());
        let mut held_back = Vec::new();
        for run in wishes.chunk_by(|left, right| continues(*left, *right)) {
            let before = admitted.last().copied();
            let times = if frame(run[0]).is_some_and(&is_new) {
                2
            } else {
                1
            };
            if self.spend(pages, before, run, times) {
                admitted.extend(run);
            } else {
                held_back.extend(run);
            }
        }
        (admitted, held_back)
    }

    /// Spends what `run` costs, if it is worth that and there is as much left.
    fn spend(&mut self, pages: &PageTable, before: Option<Wish>, run: &[Wish], times: u64) -> bool {
        let (gained, cost) = cost(pages, before, run);
        let spent = cost.saturating_sub(gained);
        let worth = 2 * run.len() as u64 >= spent * self.floor;
        let spent = spent * times;
        if spent > 0 && (spent > self.left || !worth) {
            return false;
        }
        self.left = self.left - spent + gained.saturating_sub(cost);
        true
    }
}

/// Whether one mapping can hold both.
fn continues(left: Wish, right: Wish) -> bool {
    left.page.plus(1) == right.page && !is_seam(frame(left), frame(right))
}

fn frame(wish: Wish) -> Option<FrameId> {
    match wish.goal {
        Goal::Frame(frame) => Some(frame),
        Goal::Zero => None,
    }
}

/// How many seams go away with a run that is one mapping, and how many come.
/// `before` is the wish admitted last.
fn cost(pages: &PageTable, before: Option<Wish>, run: &[Wish]) -> (u64, u64) {
    let (first, last) = (run[0], run[run.len() - 1]);
    let now = |page: PageIndex| pages.get(page).frame;
    let left = first.page.0.checked_sub(1).map(PageIndex);
    let left = left.map(|left| match before {
        Some(before) if before.page == left => frame(before),
        _ => now(left),
    });
    let right = pages.after(last.page).map(now);
    let seams_now = run
        .windows(2)
        .filter(|pair| is_seam(now(pair[0].page), now(pair[1].page)));
    let ends = |first, last| {
        let left = left.is_some_and(|left| is_seam(left, first));
        let right = right.is_some_and(|right| is_seam(last, right));
        u64::from(left) + u64::from(right)
    };
    let gone = seams_now.count() as u64 + ends(now(first.page), now(last.page));
    (gone, ends(frame(first), frame(last)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(page: u64, frame: u32, len: u64) -> impl Iterator<Item = Wish> {
        (0..len).map(move |n| Wish {
            page: PageIndex(page + n),
            goal: Goal::Frame(FrameId(frame + u32::try_from(n).expect("short"))),
        })
    }

    fn admit(budget: &VmaBudget, used: u64) -> (usize, usize) {
        let wishes = run(10, 0, 1).chain(run(20, 4, 40)).chain(run(70, 90, 4));
        let purse = budget.purse(used, 1 << 20);
        let (admitted, held_back) = purse.admit(&PageTable::default(), wishes.collect(), |_| false);
        (admitted.len(), held_back.len())
    }

    #[test]
    fn long_runs_come_first() {
        let budget = VmaBudget::new(Some(6));
        assert_eq!(admit(&budget, 0), (40, 5));
        for expected in [(40, 5), (44, 1), (44, 1), (45, 0)] {
            budget.note_held_back(1);
            budget.end_pass();
            assert_eq!(admit(&budget, 0), expected);
        }
        assert_eq!(admit(&budget, 4), (1, 44), "two mappings are left");
        assert_eq!(admit(&budget, 6), (0, 45), "none is left");
    }

    #[test]
    fn where_mappings_are_plenty_every_run_is_welcome() {
        assert_eq!(admit(&VmaBudget::new(None), 1 << 40), (45, 0));
        let budget = VmaBudget::new(Some(1 << 20));
        assert_eq!(admit(&budget, 0), (45, 0));
    }

    #[test]
    fn a_run_that_joins_others_costs_nothing() {
        let purse = VmaBudget::new(Some(2)).purse(0, 1 << 20);
        let wishes: Vec<_> = run(10, 0, 20).chain(run(30, 20, 1)).collect();
        let (admitted, held_back) = purse.admit(&PageTable::default(), wishes, |_| false);
        assert_eq!((admitted.len(), held_back.len()), (21, 0));
    }

    #[test]
    fn a_new_frame_is_charged_for_both_its_pages() {
        let purse = VmaBudget::new(Some(2)).purse(0, 1 << 20);
        let (admitted, _) = purse.admit(&PageTable::default(), run(10, 0, 40).collect(), |_| true);
        assert!(admitted.is_empty());
    }
}
