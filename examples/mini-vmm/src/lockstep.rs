//! [`Lockstep`]: when which guest rewrites which part of its pages.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::recipe::Recipe;

/// Keeps guests in step without stopping any: time is cut in ticks, in each
/// tick every guest rewrites the next slice of its lockstep list, and no guest
/// begins a tick before all have ended the one before. A guest that must wait
/// does something else meanwhile.
#[derive(Debug)]
pub(crate) struct Lockstep {
    /// When guests began.
    start: OnceLock<Instant>,
    tick: Duration,
    slices: u64,
    /// Length of every guest's lockstep list.
    pages: u64,
    /// Ticks that each guest has ended; of one that is not born yet, `u64::MAX`.
    ended: Vec<AtomicU64>,
    /// No tick from this one on is begun.
    limit: AtomicU64,
}

impl Lockstep {
    /// Guests wait for [`Lockstep::open`]. Behind them come clones which are not born
    /// yet.
    pub(crate) fn new(recipe: &Recipe, pages: u64, guests: usize, clones: usize) -> Self {
        let slices = u64::from(recipe.slices).min(pages.max(1));
        let rest = Duration::from_millis(u64::from(recipe.rest_millisecs));
        Self {
            start: OnceLock::new(),
            tick: rest / u32::try_from(slices).expect("not more than the recipe's"),
            slices,
            pages,
            ended: [(0, guests), (u64::MAX, clones)]
                .into_iter()
                .flat_map(|(ticks, n)| (0..n).map(move |_| AtomicU64::new(ticks)))
                .collect(),
            limit: AtomicU64::new(u64::MAX),
        }
    }

    /// Guests begin their first tick now. Only the first call counts.
    pub(crate) fn open(&self) {
        self.start.get_or_init(Instant::now);
    }

    /// How many slices there are.
    pub(crate) const fn slices(&self) -> u64 {
        self.slices
    }

    /// The slice that `guest` is to rewrite now, if it is time.
    pub(crate) fn due(&self, guest: usize) -> Option<u64> {
        let start = self.start.get()?;
        let mine = self.ended[guest].load(Ordering::Acquire);
        let all_here = self
            .ended
            .iter()
            .all(|ended| ended.load(Ordering::Acquire) >= mine);
        let ticks = u32::try_from(mine).unwrap_or(u32::MAX);
        let in_time = start.elapsed() >= self.tick.saturating_mul(ticks);
        let go = self.pages > 0 && all_here && in_time && !self.is_over(guest);
        go.then_some(mine % self.slices)
    }

    /// Lets guests come to an end together: a tick that one of them has begun
    /// is the last of all. Without any, they make one.
    pub(crate) fn close(&self) {
        self.open();
        let ended = self.ended.iter().map(|ended| ended.load(Ordering::Acquire));
        let last = ended.filter(|&ended| ended != u64::MAX).max().unwrap_or(0);
        let limit = if self.pages > 0 { last + 1 } else { 0 };
        // Only the first call counts.
        let _ = self
            .limit
            .compare_exchange(u64::MAX, limit, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether `guest` has ended its last tick.
    pub(crate) fn is_over(&self, guest: usize) -> bool {
        self.ended[guest].load(Ordering::Acquire) >= self.limit.load(Ordering::Acquire)
    }

    /// A clone is born of `parent`, which is between two ticks, and keeps in step with
    /// all others from here on.
    pub(crate) fn join(&self, clone: usize, parent: usize) {
        let ended = self.ended[parent].load(Ordering::Acquire);
        self.ended[clone].store(ended, Ordering::Release);
    }

    /// Says that `guest` has rewritten its slice.
    pub(crate) fn end_tick(&self, guest: usize) {
        self.ended[guest].fetch_add(1, Ordering::AcqRel);
    }

    /// The part of the lockstep list that is slice number `slice`.
    pub(crate) const fn places(&self, slice: u64) -> Range<u64> {
        slice * self.pages / self.slices..(slice + 1) * self.pages / self.slices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lockstep(pages: u64) -> Lockstep {
        let recipe = "default,rest=1,slices=7".parse().unwrap();
        let lockstep = Lockstep::new(&recipe, pages, 2, 1);
        assert_eq!(lockstep.due(0), None, "not open yet");
        lockstep.open();
        lockstep
    }

    #[test]
    fn slices_cover_the_list_once() {
        for pages in [1, 6, 7, 100] {
            let lockstep = lockstep(pages);
            let places: Vec<_> = (0..lockstep.slices())
                .flat_map(|slice| lockstep.places(slice))
                .collect();
            assert_eq!(places, (0..pages).collect::<Vec<_>>());
        }
    }

    #[test]
    fn nobody_runs_ahead_by_more_than_a_tick() {
        let lockstep = lockstep(100);
        assert_eq!(lockstep.due(0), Some(0));
        lockstep.end_tick(0);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(lockstep.due(0), None, "guest 1 is not there yet");
        lockstep.end_tick(1);
        assert_eq!(lockstep.due(0), Some(1));
    }

    #[test]
    fn all_end_with_the_same_tick() {
        let lockstep = lockstep(100);
        lockstep.end_tick(0);
        lockstep.close();
        lockstep.close();
        assert!(!lockstep.is_over(0), "it may have begun a second tick");
        assert!(!lockstep.is_over(1));
        lockstep.end_tick(1);
        for guest in [0, 1] {
            lockstep.end_tick(guest);
            assert!(lockstep.is_over(guest));
            assert_eq!(lockstep.due(guest), None);
        }
    }

    #[test]
    fn a_clone_keeps_in_step_from_its_birth_on() {
        let lockstep = lockstep(100);
        for guest in [0, 1, 0] {
            lockstep.end_tick(guest);
        }
        lockstep.join(2, 0);
        lockstep.end_tick(1);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(lockstep.due(2), Some(2));
        lockstep.end_tick(0);
        lockstep.end_tick(1);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(lockstep.due(0), None, "the clone is not there yet");
        lockstep.close();
        assert!(!lockstep.is_over(2));
        lockstep.end_tick(2);
        assert_eq!(lockstep.due(0), Some(3));
    }

    #[test]
    fn without_rewritten_pages_nothing_is_ever_due() {
        let lockstep = lockstep(0);
        assert_eq!(lockstep.due(0), None);
        assert!(!lockstep.is_over(0));
        lockstep.close();
        assert!(lockstep.is_over(0));
    }
}
