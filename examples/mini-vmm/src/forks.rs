//! [`Forks`]: clones of guests that run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};

use crate::dedup::Dedup;
use crate::guest::{Guest, Work};
use crate::phase::{GLANCE, SignsOfLife};
use crate::ram::Ram;

/// What was cloned.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct ForkTally {
    /// How many clones were made.
    pub(crate) clones: u64,
    /// How long the first took to be made, in milliseconds. Its parent is paused.
    pub(crate) first_millis: f64,
    /// How long the slowest of the others took.
    pub(crate) longest_other_millis: f64,
    /// Pages that clones shared when they began.
    pub(crate) pages_shared_at_birth: u64,
}

impl ForkTally {
    /// One line for people.
    pub(crate) fn line(&self) -> String {
        format!(
            "{} clones made, sharing {} pages at once: the first in {:.1} ms, the others in {:.1} at most",
            self.clones, self.pages_shared_at_birth, self.first_millis, self.longest_other_millis,
        )
    }
}

/// A clone, as others see it.
#[derive(Clone, Debug)]
pub(crate) struct Clone {
    /// The guest that it was made of.
    pub(crate) parent: usize,
    /// Its memory.
    pub(crate) ram: Ram,
}

/// Clones that are to be made, and those that were. A guest clones itself when it
/// sees that it is time: its vCPU stands still then.
pub(crate) struct Forks<'a> {
    dedup: &'a Dedup,
    guests: usize,
    clones: usize,
    due: AtomicBool,
    /// By the clone's number.
    born: Mutex<BTreeMap<usize, Clone>>,
    tally: Mutex<ForkTally>,
    births: Mutex<Sender<Guest>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Forks<'a> {
    /// `clones` of `guests`, one after another, which come out at `births`.
    pub(crate) fn new(
        dedup: &'a Dedup,
        guests: usize,
        clones: usize,
        births: Sender<Guest>,
    ) -> Self {
        Self {
            dedup,
            guests,
            clones,
            due: AtomicBool::new(false),
            born: Mutex::default(),
            tally: Mutex::default(),
            births: Mutex::new(births),
        }
    }

    /// From now on guests clone themselves.
    pub(crate) fn begin(&self) {
        self.due.store(true, Ordering::Relaxed);
    }

    /// What was cloned.
    pub(crate) fn tally(&self) -> ForkTally {
        *locked(&self.tally)
    }

    /// The clones that there are, by number.
    pub(crate) fn born(&self) -> BTreeMap<usize, Clone> {
        locked(&self.born).clone()
    }

    /// Numbers of the clones that are to be made of a guest now.
    pub(crate) fn due(&self, parent: usize) -> Vec<usize> {
        let is_due = self.due.load(Ordering::Relaxed) && parent < self.guests;
        let of_parent = (0..self.clones).filter(|clone| clone % self.guests == parent);
        let numbers = of_parent.map(|clone| self.guests + clone);
        let born = locked(&self.born);
        numbers
            .filter(|number| is_due && !born.contains_key(number))
            .collect()
    }

    /// Makes a clone of a guest that is paused.
    pub(crate) fn make(
        &self,
        parent: &mut Guest,
        number: usize,
        work: &Work,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let index = parent.index();
        let clone = parent.fork(number, |ram| {
            self.dedup
                .fork(index, number, &ram.work)
                .with_context(|| format!("guest {index} cannot be cloned"))
        })?;
        let millis = start.elapsed().as_secs_f64() * 1000.0;
        let shared = self.dedup.guest_stats(number)?.ksm_merging_pages;
        work.lockstep.join(number, index);
        let mut tally = locked(&self.tally);
        match tally.clones {
            0 => tally.first_millis = millis,
            _ => tally.longest_other_millis = tally.longest_other_millis.max(millis),
        }
        tally.clones += 1;
        tally.pages_shared_at_birth += shared;
        let (parent, ram) = (index, clone.ram().clone());
        locked(&self.born).insert(number, Clone { parent, ram });
        // Whoever raises clones waits until there will be no more.
        locked(&self.births)
            .send(clone)
            .map_err(|_| anyhow!("nobody raises clones"))
    }
}

/// Lets clones work, each on a thread of its own, as they come. Returns them, by
/// number, when there will be no more and all have ended.
///
/// One that hangs ends the process, as in [`run_guests`](crate::phase::run_guests).
pub(crate) fn raise(births: &Receiver<Guest>, work: &Work) -> anyhow::Result<Vec<Guest>> {
    thread::scope(|scope| {
        let mut threads = Vec::new();
        let (mut sides, mut signs) = (Vec::new(), SignsOfLife::default());
        let mut more = true;
        while more
            || threads
                .iter()
                .any(|(_, thread): &(_, thread::ScopedJoinHandle<'_, _>)| !thread.is_finished())
        {
            match births.recv_timeout(GLANCE) {
                Ok(mut clone) => {
                    sides.push(Arc::clone(clone.side()));
                    signs.watch();
                    let number = clone.index();
                    let thread = thread::Builder::new()
                        .name(format!("guest-{number}"))
                        .spawn_scoped(scope, move || clone.work(work, None).map(|()| clone))
                        .context("cannot start a clone's thread")?;
                    threads.push((number, thread));
                }
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    more = false;
                    sleep(Duration::from_millis(10));
                }
            }
            signs.check(&sides, |index| !threads[index].1.is_finished());
        }
        let mut clones = Vec::new();
        for (number, thread) in threads {
            let clone = thread.join();
            clones.push(clone.map_err(|_| anyhow!("the thread of clone {number} panicked"))??);
        }
        clones.sort_by_key(Guest::index);
        Ok(clones)
    })
}
