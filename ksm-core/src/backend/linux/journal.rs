//! [`Journal`]: which run is stopped, and how far its replacement got.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::span::usize_from;
use crate::page::{PageIndex, PageRange};

/// The longest run that is stopped at once, in pages.
pub(super) const MAX_STOP: u64 = 256;

const WORDS: usize = 4;
const _: () = assert!(WORDS as u64 * 64 == MAX_STOP);

/// Bits that hold the length of the run in [`Journal::run`].
const LEN_BITS: u32 = 9;
const _: () = assert!(MAX_STOP < 1 << LEN_BITS);

/// A bit for each page of the run.
#[derive(Debug, Default)]
struct Bits([AtomicU64; WORDS]);

impl Bits {
    fn clear(&self) {
        for word in &self.0 {
            word.store(0, Ordering::Release);
        }
    }

    fn set(&self, slot: u64) {
        self.0[usize_from(slot / 64)].fetch_or(1 << (slot % 64), Ordering::AcqRel);
    }

    fn get(&self, slot: u64) -> bool {
        self.0[usize_from(slot / 64)].load(Ordering::Acquire) >> (slot % 64) & 1 != 0
    }
}

/// What a thread that stopped a run leaves behind for whoever ends the stop,
/// were it to vanish between two system calls. No lock: it could be held for
/// ever.
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// First page and length of the run that was stopped last.
    run: AtomicU64,
    /// Whether its pages are moved out, to the run of the staging area: then what
    /// stands there may be theirs.
    out: AtomicBool,
    /// Whether some of it may be stopped still.
    open: AtomicBool,
    /// Pages whose mapping was replaced.
    mapped: Bits,
    /// Pages whose content, all zero, may be dropped.
    zeroed: Bits,
    /// First and last page of the part of the memory, over all runs, whose new
    /// mappings may not carry yet what the old ones did, one past each; 0 if
    /// there is none.
    bare: [AtomicU64; 2],
}

impl Journal {
    /// Begins a run, whose pages are moved `out` or stopped in place. Nothing of the
    /// last one is stopped any more.
    pub(super) fn begin(&self, run: PageRange, out: bool) {
        debug_assert!(run.len() <= MAX_STOP);
        // Were this thread lost in between, neither run would be thought to be out.
        self.out.store(false, Ordering::Release);
        self.mapped.clear();
        self.zeroed.clear();
        self.run
            .store(run.start.0 << LEN_BITS | run.len(), Ordering::Release);
        self.out.store(out, Ordering::Release);
        self.open.store(true, Ordering::Release);
    }

    /// The stop of `range` has been lifted.
    pub(super) fn lifted(&self, range: PageRange) {
        let run = self.run();
        if range.intersection(run) == run {
            self.open.store(false, Ordering::Release);
        }
    }

    /// Writes down that new mappings in `range` carry nothing of what the old ones
    /// did. Returns another part of which that was written down, and is not any
    /// more: it is too far away to be told together.
    pub(super) fn bared(&self, range: PageRange) -> Option<PageRange> {
        let near = |old: &PageRange| {
            let start = old.start.min(range.start);
            let end = old.end.max(range.end);
            let hull = PageRange { start, end };
            (hull.len() <= old.len() + range.len() + MAX_STOP).then_some(hull)
        };
        let old = self.take_bare();
        let hull = old.as_ref().and_then(near);
        let bare = hull.unwrap_or(range);
        let [start, end] = &self.bare;
        end.store(bare.end.0, Ordering::Release);
        start.store(bare.start.0 + 1, Ordering::Release);
        old.filter(|_| hull.is_none())
    }

    /// The part whose new mappings carry nothing yet, to be told now.
    pub(super) fn take_bare(&self) -> Option<PageRange> {
        let [start, end] = &self.bare;
        let start = start.swap(0, Ordering::AcqRel).checked_sub(1)?;
        let end = PageIndex(end.load(Ordering::Acquire));
        let start = PageIndex(start);
        Some(PageRange { start, end })
    }

    /// Whether pages of the run may be in the staging area.
    pub(super) fn is_out(&self) -> bool {
        self.out.load(Ordering::Acquire)
    }

    /// Whether some of the run may be stopped still.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// The run that was stopped last; empty before the first.
    pub(super) fn run(&self) -> PageRange {
        let packed = self.run.load(Ordering::Acquire);
        PageRange::new(
            PageIndex(packed >> LEN_BITS),
            packed & ((1 << LEN_BITS) - 1),
        )
    }

    /// Writes down that the mappings of `range` have been replaced.
    pub(super) fn mapped(&self, range: PageRange) {
        self.mark(&self.mapped, range);
    }

    /// Writes down that the pages of `range` are to be dropped.
    pub(super) fn zeroed(&self, range: PageRange) {
        self.mark(&self.zeroed, range);
    }

    fn mark(&self, bits: &Bits, range: PageRange) {
        let run = self.run();
        for page in range.intersection(run).iter() {
            bits.set(page.0 - run.start.0);
        }
    }

    /// Whether `page` has another mapping than the one that was stopped.
    pub(super) fn is_mapped(&self, page: PageIndex) -> bool {
        let run = self.run();
        run.contains(page) && self.mapped.get(page.0 - run.start.0)
    }

    /// Whether `page` has been replaced, one way or the other.
    pub(super) fn is_replaced(&self, page: PageIndex) -> bool {
        let run = self.run();
        self.is_mapped(page) || run.contains(page) && self.zeroed.get(page.0 - run.start.0)
    }

    /// The parts of `range` whose pages are as `wanted` says, in order.
    pub(super) fn parts(
        range: PageRange,
        wanted: impl Fn(PageIndex) -> bool,
    ) -> impl Iterator<Item = PageRange> {
        let mut pages = range.iter().filter(move |&page| wanted(page)).peekable();
        std::iter::from_fn(move || {
            let mut part = PageRange::one(pages.next()?);
            while let Some(page) = pages.next_if_eq(&part.end) {
                part.end = page.plus(1);
            }
            Some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_runs_are_told_together() {
        let journal = Journal::default();
        assert_eq!(journal.take_bare(), None);
        let range = |start, len| PageRange::new(PageIndex(start), len);
        assert_eq!(journal.bared(range(0, 8)), None);
        assert_eq!(journal.bared(range(8 + MAX_STOP, 8)), None);
        let near = range(0, 16 + MAX_STOP);
        assert_eq!(journal.bared(range(10_000, 1)), Some(near));
        assert_eq!(journal.take_bare(), Some(range(10_000, 1)));
        assert_eq!(journal.take_bare(), None);
    }

    #[test]
    fn a_new_run_forgets_the_last() {
        let journal = Journal::default();
        assert!(journal.run().is_empty());
        journal.begin(PageRange::new(PageIndex(1000), MAX_STOP), true);
        assert!(journal.is_out());
        assert_eq!(journal.run(), PageRange::new(PageIndex(1000), MAX_STOP));
        journal.lifted(PageRange::new(PageIndex(1001), MAX_STOP));
        assert!(journal.is_open());
        journal.lifted(PageRange::new(PageIndex(999), MAX_STOP + 1));
        assert!(!journal.is_open());
        journal.mapped(PageRange::new(PageIndex(1000), 2));
        journal.zeroed(PageRange::new(PageIndex(1255), 1));
        let kept: Vec<_> =
            Journal::parts(journal.run(), |page| !journal.is_replaced(page)).collect();
        assert_eq!(kept, [PageRange::new(PageIndex(1002), 253)]);
        assert!(!journal.is_mapped(PageIndex(1255)));
        journal.begin(PageRange::new(PageIndex(1001), 3), false);
        assert!(!journal.is_out());
        assert!(journal.run().iter().all(|page| !journal.is_replaced(page)));
        assert!(!journal.is_mapped(PageIndex(1000)));
    }
}
