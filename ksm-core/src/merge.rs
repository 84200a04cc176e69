//! Merging one run: stop its writes, compare every page byte for byte, put
//! frames or zero pages in its place, let it run on.

use crate::backend::{Backend, Backing, FrameStore, Held, Memory, Refusal};
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::outcome::Outcome;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::region::{Change, Class, Pending, RegionGuard};

/// What a page is to become, if it still is what it looked like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    Frame(FrameId),
    Zero,
}

/// A page and its goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) page: PageIndex,
    pub(crate) goal: Goal,
}

/// What no run may exceed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) pages_per_stop: u64,
    /// rmap_items of one frame.
    pub(crate) max_sharing: u32,
}

/// Wishes for neighbouring pages over one backing, all of which are met already or
/// none.
#[derive(Clone, Copy, Debug)]
struct Run<'w> {
    wishes: &'w [Wish],
    backing: Backing,
    /// Guards hold them all; otherwise they hold none.
    pinned: bool,
}

/// The first of `wishes` that can be met in one stop, at most `cap`.
fn first_run<'w, B: Backend>(guard: &RegionGuard<'_, B>, wishes: &'w [Wish], cap: u64) -> Run<'w> {
    let first = wishes[0].page;
    let pins = guard.region().pinned(PageRange::new(first, cap));
    let pages = guard.region().pages();
    // A page may be wished for twice: what is merged by now has no copy to stop.
    let kind = |page| {
        let record = pages.get(page);
        (record.backing(), pins.contains(page), is_met(record.class))
    };
    let of_one_kind = kind(first);
    let joins =
        |pair: &[Wish]| pair[0].page.plus(1) == pair[1].page && kind(pair[1].page) == of_one_kind;
    let cap = usize::try_from(cap).unwrap_or(usize::MAX);
    let wishes = &wishes[..wishes.len().min(cap)];
    let joined = wishes.windows(2).take_while(|pair| joins(pair)).count();
    let (backing, pinned, _) = of_one_kind;
    Run {
        wishes: &wishes[..=joined],
        backing,
        pinned,
    }
}

const fn is_met(class: Class) -> bool {
    matches!(class, Class::Merged(_) | Class::Zero)
}

/// Meets what can be met in one stop of the first of `wishes`, within `limits`.
/// They are sorted by page; there is one. Says of each page of that run, in
/// order, what became of it. Whatever happens, panics included, nothing is
/// stopped or out when this is left.
pub(crate) fn commit<B: Backend>(
    guard: &RegionGuard<'_, B>,
    wishes: &[Wish],
    limits: Limits,
) -> Vec<Outcome> {
    let Run {
        wishes: run,
        backing,
        pinned,
    } = first_run(guard, wishes, limits.pages_per_stop);
    if pinned {
        return vec![Outcome::Pinned; run.len()];
    }
    let range = PageRange::new(run[0].page, run.len() as u64);
    let first = range.start;
    let mut outcomes = vec![Outcome::Raced; run.len()];

    let (wishes, pending) = reserve(guard, run, limits.max_sharing, &mut outcomes);
    if wishes.is_empty() {
        return outcomes;
    }
    let landing = guard.take_off(range, backing, pending);
    fault::point(Step::Stopping);
    match guard.memory().stop(range, backing) {
        Ok(held) => {
            fault::point(Step::Stopped);
            note_refused(&held, first, &mut outcomes);
            let equal = compare(guard, backing, &held, &wishes);
            fault::point(Step::Compared);
            for group in groups(guard, &equal) {
                let outcome = replace(guard, backing, &group);
                outcomes[place(first, group.range)].fill(outcome);
            }
        }
        Err(error) => outcomes.fill(refused(&error)),
    }
    drop(landing);
    fault::point(Step::Lifted);
    outcomes
}

/// Where the pages of `range` stand among the outcomes of a run from `first` on.
fn place(first: PageIndex, range: PageRange) -> std::ops::Range<usize> {
    let index = |page: PageIndex| {
        usize::try_from(page.0 - first.0).expect("a run is no longer than its slice of wishes")
    };
    index(range.start)..index(range.end)
}

/// Counts the pages among the sharers of their frames, so that the frames stay.
/// Leaves out pages that have been merged, and frames that have gone, meanwhile.
fn reserve<B: Backend>(
    guard: &RegionGuard<'_, B>,
    run: &[Wish],
    max_sharing: u32,
    outcomes: &mut [Outcome],
) -> (Vec<Wish>, Vec<Pending>) {
    let region = guard.region();
    let has_clones = region.anon_vma.has_many();
    let mut wishes = Vec::with_capacity(run.len());
    let mut pending = Vec::new();
    for (&wish, outcome) in run.iter().zip(outcomes) {
        let page = wish.page;
        let class = region.pages().get(page).class;
        if is_met(class) {
            *outcome = Outcome::Unchanged;
            continue;
        }
        if let Goal::Frame(frame) = wish.goal {
            let place = region.place(page);
            let reserved = region.domain.reserve(frame, place, max_sharing, has_clones);
            let Some(item) = reserved else {
                continue;
            };
            pending.push(Pending { page, frame, item });
        }
        wishes.push(wish);
    }
    (wishes, pending)
}

fn note_refused(held: &Held, first: PageIndex, outcomes: &mut [Outcome]) {
    for &(page, refusal) in &held.refused {
        let outcome = match refusal {
            Refusal::Pinned => Outcome::Pinned,
            Refusal::NotExclusive => Outcome::NotExclusive,
            Refusal::Raced => Outcome::Raced,
            Refusal::Huge => Outcome::Huge,
        };
        outcomes[place(first, PageRange::one(page))].fill(outcome);
    }
}

/// What becomes of a page for which a call to the host failed.
pub(crate) fn refused(error: &BackendError) -> Outcome {
    match error {
        BackendError::NoVmas => Outcome::NoVmas,
        BackendError::OutOfMemory => Outcome::NoMemory,
        BackendError::Again | BackendError::Host { .. } => Outcome::Refused,
    }
}

/// The wishes whose pages are held and equal, byte for byte, to what they are
/// to become.
fn compare<B: Backend>(
    guard: &RegionGuard<'_, B>,
    backing: Backing,
    held: &Held,
    wishes: &[Wish],
) -> Vec<Wish> {
    let (mut page_buf, mut frame_buf) = (PageBuf::zeroed(), PageBuf::zeroed());
    let store = &guard.region().domain.store;
    let mut equal = |wish: &Wish| {
        let page = guard.memory().read_held(wish.page, backing, &mut page_buf);
        page.is_ok()
            && match wish.goal {
                Goal::Zero => page_buf.is_zero(),
                Goal::Frame(frame) => {
                    store.read(frame, &mut frame_buf).is_ok() && page_buf == frame_buf
                }
            }
    };
    let held = |page: PageIndex| held.held.iter().any(|range| range.contains(page));
    let wishes = wishes.iter().filter(|wish| held(wish.page));
    wishes.filter(|wish| equal(wish)).copied().collect()
}

/// Neighbours that are replaced by one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    range: PageRange,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Consecutive frames from this one on.
    Share(FrameId),
    /// The frames that are mapped there already.
    Reuse,
    Zero,
}

/// Cuts `equal` into groups, as long as they can be.
fn groups<B: Backend>(guard: &RegionGuard<'_, B>, equal: &[Wish]) -> Vec<Group> {
    let pages = guard.region().pages();
    let mut groups: Vec<Group> = Vec::new();
    for wish in equal {
        let kind = match wish.goal {
            Goal::Zero => Kind::Zero,
            Goal::Frame(frame) if pages.get(wish.page).frame == Some(frame) => Kind::Reuse,
            Goal::Frame(frame) => Kind::Share(frame),
        };
        match groups.last_mut() {
            Some(group) if group.range.end == wish.page && group.goes_on(kind) => {
                group.range.end = wish.page.plus(1);
            }
            _ => groups.push(Group {
                range: PageRange::one(wish.page),
                kind,
            }),
        }
    }
    groups
}

impl Group {
    /// Whether a page of `kind` behind the last fits in.
    fn goes_on(&self, kind: Kind) -> bool {
        match (self.kind, kind) {
            (Kind::Share(first), Kind::Share(frame)) => {
                u64::from(frame.0) == u64::from(first.0) + self.range.len()
            }
            (mine, other) => mine == other,
        }
    }
}

/// Puts what `group` says in place of its held pages.
fn replace<B: Backend>(guard: &RegionGuard<'_, B>, backing: Backing, group: &Group) -> Outcome {
    let (memory, range) = (guard.memory(), group.range);
    let store = &guard.region().domain.store;
    let (done, outcome) = match group.kind {
        Kind::Share(first) => {
            let share = || memory.share(range, backing, store, first);
            (guard.change(Change::Share(range), share), Outcome::Merged)
        }
        Kind::Reuse => {
            let reuse = || memory.reuse(range);
            (guard.change(Change::Reuse(range), reuse), Outcome::Merged)
        }
        Kind::Zero => {
            let zero = || memory.zero(range, backing);
            (guard.change(Change::Zero(range), zero), Outcome::Zeroed)
        }
    };
    match done {
        Ok(()) => outcome,
        Err(error) => refused(&error),
    }
}
