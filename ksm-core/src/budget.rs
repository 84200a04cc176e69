//! Virtual memory areas are what runs out first: a process has 65,530 by
//! default, and an isolated merged page costs two. So they are a budget, spent
//! where it saves most.
//!
//! Where the budget is small beside the memory that is registered, the first
//! pass that merges takes only long runs, and each pass after it is content with
//! shorter ones while something is left; so a few long runs are never kept out by
//! many single pages.
//!
//! What is short at the end of a pass is noted, by how much it would save. Mappings
//! that save less than half as much are given back then ([`giveback`](crate::giveback)),
//! and the passes after that take long runs first once more.

use std::ops::Deref;

use crate::merge::{Goal, Wish};
use crate::page::{FrameId, PageIndex};
use crate::pledge::Pledges;
use crate::ration::Ration;
use crate::region::{PageTable, is_seam};
use crate::sync::Mutex;

/// Twice the pages that a mapping must save at first where the budget is small.
const FIRST_FLOOR: u64 = 16;

/// A mapping for so many registered pages is plenty: every run is welcome then.
pub(crate) const PAGES_PER_VMA: u64 = 16;

/// What may be spent, and on what.
#[derive(Debug)]
pub(crate) struct VmaBudget {
    /// The most that merging may cost; `None` for no limit.
    max: Option<u64>,
    state: Mutex<State>,
    /// What is promised to regions that nobody knows of yet.
    pub(crate) pledges: Pledges,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// Twice the pages that a mapping must save, at least 1.
    floor: u64,
    /// The same, for some passes after mappings were given back. Then 0.
    raised: u64,
    /// Pages that this pass held back.
    held_back: u64,
    /// What this pass would have spent more.
    shortage: Shortage,
}

/// Steps in which [`Shortage`] counts, the last for all that save more.
const WORTHS: usize = 12;

/// Mappings that were missing for runs held back: the nth entry, for runs in which
/// twice the pages are at least 2 to the nth for each mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shortage([u64; WORTHS]);

impl Shortage {
    /// A run of `pages` misses `mappings`. The other side of a new frame misses
    /// its own.
    fn note(&mut self, pages: u64, mappings: u64) {
        let worth = (2 * pages / mappings).max(1).ilog2() as usize;
        self.0[worth.min(WORTHS - 1)] += mappings;
    }

    fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }

    /// What the best of the runs would save, as twice the pages for a mapping;
    /// 0 where nothing is short.
    pub(crate) fn best(&self) -> u64 {
        self.0
            .iter()
            .rposition(|&missing| missing > 0)
            .map_or(0, |worth| 1 << worth)
    }

    /// How many mappings are missing for runs that save twice as much with each
    /// as `pages` pages do with `mappings`.
    pub(crate) fn demand(&self, pages: u64, mappings: u64) -> u64 {
        let better = |worth: usize| mappings << worth >= 4 * pages;
        let counts = self.0.iter().enumerate();
        counts
            .filter(|&(worth, _)| better(worth))
            .map(|(_, missing)| missing)
            .sum()
    }
}

/// Wishes, parted by what they are worth.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    pub(crate) admitted: Vec<Wish>,
    pub(crate) held_back: Vec<Wish>,
    /// What was missing for those held back that are worth their mappings.
    pub(crate) shortage: Shortage,
}

/// What becomes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Admitted,
    /// Others may come that save more.
    NotWorth,
    /// This many mappings are not left.
    Short(u64),
}

/// What is left for one region's merges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Purse {
    left: u64,
    floor: u64,
    /// Whether every page will be paid for twice.
    twice: bool,
}

impl VmaBudget {
    pub(crate) fn new(max: Option<u64>) -> Self {
        let state = State {
            floor: FIRST_FLOOR,
            raised: 0,
            held_back: 0,
            shortage: Shortage::default(),
        };
        Self {
            max,
            state: Mutex::new(state),
            pledges: Pledges::default(),
        }
    }

    /// What may be spent now, with `used` mappings spent on `pages` registered.
    pub(crate) fn purse(&self, used: u64, pages: u64) -> Purse {
        let Some(max) = self.max else {
            return Purse::BOTTOMLESS;
        };
        let plenty = max >= pages / PAGES_PER_VMA;
        let State { floor, raised, .. } = *self.state.lock();
        Purse {
            left: self.left(used, self.pledges.total()),
            floor: if plenty { raised } else { floor.max(raised) },
            twice: false,
        }
    }

    /// The same for memory that is about to be cloned, of which `pages` are still to
    /// come: whatever mappings it takes, its clone takes as well.
    pub(crate) fn freeze_purse(&self, used: u64, pages: u64) -> Purse {
        let left = self.left(used, self.pledges.total());
        Purse {
            left,
            floor: Ration::new(left / 2, pages).floor(),
            twice: true,
        }
    }

    /// How many mappings are left, with `used` spent on what is registered and
    /// `pledged` on what is not yet; `u64::MAX` where there is no limit.
    pub(crate) fn left(&self, used: u64, pledged: u64) -> u64 {
        self.max
            .map_or(u64::MAX, |max| max.saturating_sub(used + pledged))
    }

    pub(crate) fn note_held_back(&self, pages: u64, shortage: &Shortage) {
        let mut state = self.state.lock();
        state.held_back += pages;
        state.shortage.add(shortage);
    }

    /// A pass begins anew: what one that never ended was short of does not count.
    pub(crate) fn start_pass(&self) {
        self.state.lock().shortage = Shortage::default();
    }

    /// What was short in this pass, so far.
    pub(crate) fn shortage(&self) -> Shortage {
        self.state.lock().shortage
    }

    /// The next pass is content with shorter runs if this one held some back, but
    /// what was given back is not for the first that comes.
    pub(crate) fn end_pass(&self, given_back: u64) {
        let mut state = self.state.lock();
        let shortage = std::mem::take(&mut state.shortage);
        state.raised = match given_back {
            0 => state.raised / 2,
            _ => shortage.best().min(FIRST_FLOOR),
        };
        if std::mem::take(&mut state.held_back) > 0 {
            state.floor = (state.floor / 2).max(1);
        }
    }
}

impl Purse {
    /// Everything is worth its mappings.
    const BOTTOMLESS: Self = Self {
        left: u64::MAX,
        floor: 0,
        twice: false,
    };

    /// Parts `wishes`, sorted by page, into those that are worth their mappings
    /// and those that are held back. A frame that `is_new`, with no sharer yet,
    /// saves nothing before its second page has paid as well, so it is charged
    /// twice. The records that `pages` gives are held for one run at a time, and while
    /// nothing else is asked for.
    pub(crate) fn admit<P: Deref<Target = PageTable>>(
        mut self,
        pages: impl Fn() -> P,
        wishes: Vec<Wish>,
        is_new: impl Fn(FrameId) -> bool,
    ) -> Admission {
        let mut parted = Admission::default();
        if self.left == u64::MAX {
            parted.admitted = wishes;
            return parted;
        }
        for run in wishes.chunk_by(|left, right| continues(*left, *right)) {
            let before = parted.admitted.last().copied();
            let twice = self.twice || frame(run[0]).is_some_and(&is_new);
            let times = if twice { 2 } else { 1 };
            let verdict = self.spend(&pages(), before, run, times);
            match verdict {
                Verdict::Admitted => parted.admitted.extend(run),
                Verdict::NotWorth => parted.held_back.extend(run),
                Verdict::Short(mappings) => {
                    parted.shortage.note(run.len() as u64, mappings);
                    parted.held_back.extend(run);
                }
            }
        }
        parted
    }

    /// Spends what `run` costs, if it is worth that and there is as much left.
    fn spend(
        &mut self,
        pages: &PageTable,
        before: Option<Wish>,
        run: &[Wish],
        times: u64,
    ) -> Verdict {
        let (gained, cost) = cost(pages, before, run);
        let mappings = cost.saturating_sub(gained);
        let charge = mappings * times;
        if mappings > 0 {
            if 2 * (run.len() as u64) < mappings.saturating_mul(self.floor) {
                return Verdict::NotWorth;
            }
            if charge > self.left {
                return Verdict::Short(mappings);
            }
        }
        self.left = self.left - charge + gained.saturating_sub(cost);
        Verdict::Admitted
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
    use std::cell::RefCell;

    fn run(page: u64, frame: u32, len: u64) -> impl Iterator<Item = Wish> {
        (0..len).map(move |n| Wish {
            page: PageIndex(page + n),
            goal: Goal::Frame(FrameId(frame + u32::try_from(n).expect("short"))),
        })
    }

    /// Records of which none was ever seen.
    fn no_pages() -> impl Fn() -> Box<PageTable> {
        Box::default
    }

    fn admit(budget: &VmaBudget, used: u64) -> (usize, usize) {
        let wishes = run(10, 0, 1).chain(run(20, 4, 40)).chain(run(70, 90, 4));
        let purse = budget.purse(used, 1 << 20);
        let parted = purse.admit(no_pages(), wishes.collect(), |_| false);
        (parted.admitted.len(), parted.held_back.len())
    }

    #[test]
    fn long_runs_come_first() {
        let budget = VmaBudget::new(Some(6));
        assert_eq!(admit(&budget, 0), (40, 5));
        for expected in [(40, 5), (44, 1), (44, 1), (45, 0)] {
            budget.note_held_back(1, &Shortage::default());
            budget.end_pass(0);
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
        let parted = purse.admit(no_pages(), wishes, |_| false);
        assert_eq!((parted.admitted.len(), parted.held_back.len()), (21, 0));
    }

    #[test]
    fn a_new_frame_is_charged_for_both_its_pages() {
        let purse = VmaBudget::new(Some(2)).purse(0, 1 << 20);
        let parted = purse.admit(no_pages(), run(10, 0, 40).collect(), |_| true);
        assert!(parted.admitted.is_empty());
        assert_eq!(parted.shortage.demand(0, 1), 2);
    }

    #[test]
    fn frames_are_asked_after_with_no_records_held() {
        let table = RefCell::new(PageTable::default());
        let is_new = |_| {
            assert!(table.try_borrow_mut().is_ok(), "the records are held");
            false
        };
        let wishes: Vec<_> = run(10, 0, 1).chain(run(20, 4, 40)).collect();
        let purse = VmaBudget::new(Some(4)).purse(0, 32);
        let parted = purse.admit(|| table.borrow_mut(), wishes, is_new);
        assert_eq!((parted.admitted.len(), parted.held_back.len()), (41, 0));
    }

    #[test]
    fn what_is_short_is_known_by_its_worth() {
        let purse = VmaBudget::new(Some(2)).purse(2, 32);
        // 40 pages for two mappings, a single page for two.
        let wishes: Vec<_> = run(10, 0, 40).chain(run(70, 90, 1)).collect();
        let shortage = purse.admit(no_pages(), wishes, |_| false).shortage;
        assert_eq!(shortage.best(), 32, "at least 16 pages for a mapping");
        // Whatever saves nothing gives way to both.
        assert_eq!(shortage.demand(0, 2), 4);
        // 8 pages a mapping give way to 16, but not to half a one, nor 9 to 16.
        assert_eq!(shortage.demand(16, 2), 2);
        assert_eq!(shortage.demand(18, 2), 0);
        assert_eq!(Shortage::default().demand(0, 2), 0);
    }

    #[test]
    fn what_was_given_back_is_for_long_runs_first() {
        let budget = VmaBudget::new(Some(1 << 20));
        assert_eq!(admit(&budget, 0), (45, 0));
        let mut shortage = Shortage::default();
        shortage.note(40, 2);
        budget.note_held_back(40, &shortage);
        budget.end_pass(2);
        for expected in [(40, 5), (40, 5), (44, 1), (44, 1), (45, 0), (45, 0)] {
            assert_eq!(admit(&budget, 0), expected);
            budget.end_pass(0);
        }
    }
}
