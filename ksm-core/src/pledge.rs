//! [`Pledge`]: mappings promised to memory that nobody knows of yet, so that nobody
//! else spends them.

use std::collections::BTreeMap;

use crate::budget::VmaBudget;
use crate::sync::{Mutex, ThreadId, current};

/// What is promised to whom. It is written down here, and not only on the stack of
/// who was promised it: a thread may vanish, and its mappings be missing for ever.
#[derive(Debug, Default)]
pub(crate) struct Pledges(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The number of the pledge that comes next.
    next: u64,
    entries: BTreeMap<u64, Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    to: ThreadId,
    mappings: u64,
}

/// Mappings of a region that nobody knows of yet: they count as spent until this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Pledge<'b> {
    budget: &'b VmaBudget,
    number: u64,
}

impl Pledges {
    /// How many mappings count as spent though nobody knows of the region.
    pub(crate) fn total(&self) -> u64 {
        self.0.lock().total()
    }

    /// What was promised to a thread that is gone for good is nobody's.
    pub(crate) fn drop_after(&self, dead: ThreadId) {
        self.0.lock().entries.retain(|_, entry| entry.to != dead);
    }
}

impl Inner {
    fn total(&self) -> u64 {
        self.entries.values().map(|entry| entry.mappings).sum()
    }
}

impl<'b> Pledge<'b> {
    /// Of nothing as yet, to the calling thread.
    pub(crate) fn new(budget: &'b VmaBudget) -> Self {
        let mut inner = budget.pledges.0.lock();
        let number = inner.next;
        inner.next += 1;
        Self { budget, number }
    }

    /// The region has so many `now`, and might do with `more`, with `used` spent on
    /// what is registered. Returns how many more it may have, which nobody else may
    /// then.
    pub(crate) fn ask(&mut self, now: u64, more: u64, used: impl FnOnce() -> u64) -> u64 {
        // Held throughout: what becomes registered meanwhile counts twice, not never.
        let mut inner = self.budget.pledges.0.lock();
        inner.entries.remove(&self.number);
        let granted = more.min(self.budget.left(used(), inner.total() + now));
        let entry = Entry {
            to: current().id(),
            mappings: now + granted,
        };
        inner.entries.insert(self.number, entry);
        granted
    }
}

impl Drop for Pledge<'_> {
    fn drop(&mut self) {
        self.budget.pledges.0.lock().entries.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pledged_is_not_left() {
        let budget = VmaBudget::new(Some(10));
        let mut one = Pledge::new(&budget);
        let mut other = Pledge::new(&budget);
        assert_eq!(one.ask(0, 4, || 2), 4);
        assert_eq!(other.ask(0, 9, || 2), 4, "that is all there is");
        assert_eq!(one.ask(3, 5, || 2), 1, "of four it needed three only");
        drop(one);
        assert_eq!(other.ask(4, 5, || 2), 4);
        assert_eq!(other.ask(8, 5, || 5), 0, "too many are used");
        drop(other);
        assert_eq!(budget.pledges.total(), 0);
        assert_eq!(Pledge::new(&VmaBudget::new(None)).ask(7, 9, || 2), 9);
    }

    #[test]
    fn what_was_pledged_to_who_is_gone_is_left_again() {
        let budget = VmaBudget::new(Some(10));
        let dead = std::thread::scope(|scope| {
            let gone = scope.spawn(|| {
                let mut pledge = Pledge::new(&budget);
                assert_eq!(pledge.ask(0, 7, || 0), 7);
                std::mem::forget(pledge);
                current().id()
            });
            gone.join().expect("it forgets its pledge")
        });
        let mut mine = Pledge::new(&budget);
        assert_eq!(mine.ask(0, 9, || 0), 3);
        budget.pledges.drop_after(dead);
        assert_eq!(budget.pledges.total(), 3);
        assert_eq!(mine.ask(3, 9, || 0), 7);
    }
}
