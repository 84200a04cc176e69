//! The lease of a region: who may change the states of its pages.
//!
//! It is a logical lock, a word under a mutex that is held for a few
//! instructions, and no mutex itself, for two reasons. It is held across system
//! calls, by a scanner that takes it again and again: whoever wants it in between
//! must get its turn, so turns are first come first served. And its holder may
//! vanish (its thread is killed without unwinding, its stack is leaked): then
//! [`Lease::evict`] takes the lease over, with the [journal](LeaseGuard::journal)
//! in which the holder wrote what it was about to do.
//!
//! A thread must not vanish inside the calls of this module themselves.

use std::collections::VecDeque;
use std::marker::PhantomData;

use thiserror::Error;

use crate::sync::{Condvar, Mutex, MutexGuard, ThreadId, current};

/// The lease of one region, with the journal of its holder.
#[derive(Debug)]
pub(crate) struct Lease<J> {
    queue: Mutex<Queue>,
    /// Notified when the lease is free or the queue has a new head.
    turn: Condvar,
    journal: Mutex<J>,
}

/// Who holds the lease and who waits for it.
#[derive(Debug, Default)]
struct Queue {
    holder: Option<Holder>,
    waiting: VecDeque<Waiter>,
    tickets: u64,
    counts: LeaseCounts,
}

/// A holder. Its epoch tells its guard from those of holders before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    thread: ThreadId,
    epoch: u64,
}

/// A place in the queue.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    thread: ThreadId,
    ticket: u64,
}

/// Counters of one lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaseCounts {
    /// Times it was taken, evictions among them.
    pub(crate) taken: u64,
    /// Times somebody had to wait for it.
    pub(crate) waits: u64,
    /// Times [`Lease::try_lock`] found it busy.
    pub(crate) refusals: u64,
    /// The most holders that somebody has had to wait for.
    pub(crate) longest_queue: u64,
    /// Times it was taken from a thread that had vanished.
    pub(crate) evictions: u64,
}

/// The calling thread holds the lease: waiting for it would be for ever.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("this thread holds the lease of the region already")]
pub(crate) struct HeldByThisThread;

/// The right to change the states of the region's pages. Given up when dropped,
/// unless somebody has taken it over meanwhile.
#[derive(Debug)]
#[must_use = "the lease is given up at once"]
pub(crate) struct LeaseGuard<'a, J> {
    lease: &'a Lease<J>,
    epoch: u64,
    /// The holder is a thread: the guard stays with it, but others may look at
    /// it (as with the standard library's guards).
    _stays: PhantomData<std::sync::MutexGuard<'a, ()>>,
}

impl<J: Default> Lease<J> {
    /// A lease that nobody holds.
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::default(),
            turn: Condvar::new(),
            journal: Mutex::default(),
        }
    }
}

impl<J> Lease<J> {
    /// Takes the lease, after all who have been waiting for it.
    ///
    /// # Errors
    /// When the calling thread holds it.
    pub(crate) fn lock(&self) -> Result<LeaseGuard<'_, J>, HeldByThisThread> {
        let mut queue = self.queue.lock();
        queue.refuse_holder()?;
        if !queue.is_free() {
            let mut ticket = queue.line_up();
            while !queue.is_turn_of(ticket) {
                queue = self.turn.wait(queue);
                if !queue.has(ticket) {
                    // Thought to have vanished, but here it is: it lost its place.
                    ticket = queue.line_up();
                }
            }
            queue.waiting.pop_front();
        }
        Ok(self.guard(queue.take()))
    }

    /// Takes the lease if nobody holds it or waits for it.
    ///
    /// # Errors
    /// When the calling thread holds it.
    pub(crate) fn try_lock(&self) -> Result<Option<LeaseGuard<'_, J>>, HeldByThisThread> {
        let mut queue = self.queue.lock();
        queue.refuse_holder()?;
        if queue.is_free() {
            return Ok(Some(self.guard(queue.take())));
        }
        queue.counts.refusals += 1;
        Ok(None)
    }

    /// Whether anybody holds it now.
    pub(crate) fn is_held(&self) -> bool {
        self.queue.lock().holder.is_some()
    }

    /// Takes the places of a thread that will never run again out of the queue,
    /// and, if it holds the lease, the lease from it: then the journal says what
    /// it had under way. `None` if it does not hold it.
    pub(crate) fn evict(&self, dead: ThreadId) -> Option<LeaseGuard<'_, J>> {
        let mut queue = self.queue.lock();
        queue.waiting.retain(|waiter| waiter.thread != dead);
        if queue.holder.is_some_and(|holder| holder.thread == dead) {
            queue.counts.evictions += 1;
            return Some(self.guard(queue.take()));
        }
        self.turn.notify_all();
        None
    }

    /// The lease's counters.
    pub(crate) fn counts(&self) -> LeaseCounts {
        self.queue.lock().counts
    }

    fn guard(&self, epoch: u64) -> LeaseGuard<'_, J> {
        LeaseGuard {
            lease: self,
            epoch,
            _stays: PhantomData,
        }
    }
}

impl<J> LeaseGuard<'_, J> {
    /// Counts those who took the lease, this one included.
    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// What the holder has under way. To be let go of at once: a thread that
    /// vanishes with it cannot be evicted.
    pub(crate) fn journal(&self) -> MutexGuard<'_, J> {
        self.lease.journal.lock()
    }
}

impl<J> Drop for LeaseGuard<'_, J> {
    fn drop(&mut self) {
        let mut queue = self.lease.queue.lock();
        if queue
            .holder
            .is_some_and(|holder| holder.epoch == self.epoch)
        {
            queue.holder = None;
            if !queue.waiting.is_empty() {
                // A system call, whether anybody waits or not.
                self.lease.turn.notify_all();
            }
        }
    }
}

impl Queue {
    fn refuse_holder(&self) -> Result<(), HeldByThisThread> {
        match self.holder {
            Some(holder) if holder.thread == current().id() => Err(HeldByThisThread),
            _ => Ok(()),
        }
    }

    /// Whether it is held by nobody and wanted by nobody.
    fn is_free(&self) -> bool {
        self.holder.is_none() && self.waiting.is_empty()
    }

    /// A place at the end of the queue.
    fn line_up(&mut self) -> u64 {
        self.tickets += 1;
        let ahead = self.waiting.len() + usize::from(self.holder.is_some());
        self.counts.waits += 1;
        self.counts.longest_queue = self.counts.longest_queue.max(ahead as u64);
        self.waiting.push_back(Waiter {
            thread: current().id(),
            ticket: self.tickets,
        });
        self.tickets
    }

    fn has(&self, ticket: u64) -> bool {
        self.waiting.iter().any(|waiter| waiter.ticket == ticket)
    }

    fn is_turn_of(&self, ticket: u64) -> bool {
        let head = self.waiting.front();
        self.holder.is_none() && head.is_some_and(|waiter| waiter.ticket == ticket)
    }

    /// Makes the calling thread the holder, and returns its epoch.
    fn take(&mut self) -> u64 {
        self.counts.taken += 1;
        self.holder = Some(Holder {
            thread: current().id(),
            epoch: self.counts.taken,
        });
        self.counts.taken
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
