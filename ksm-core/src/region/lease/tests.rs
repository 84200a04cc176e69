//! The lease with real threads.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, ThreadId};

use super::*;

type Log = Arc<Mutex<Vec<&'static str>>>;

/// Returns once `waiters` threads stand in the queue.
fn wait_for_queue(lease: &Lease<u32>, waiters: usize) {
    while lease.queue.lock().waiting.len() != waiters {
        thread::yield_now();
    }
}

/// A thread that locks, and then logs its name while it holds the lease.
/// Returns once it stands in the queue, as number `place`.
fn waiter(lease: &Arc<Lease<u32>>, log: &Log, name: &'static str, place: usize) -> JoinHandle<()> {
    let (waiting, log) = (Arc::clone(lease), Arc::clone(log));
    let thread = thread::spawn(move || {
        let _guard = waiting.lock().unwrap();
        log.lock().unwrap().push(name);
    });
    wait_for_queue(lease, place);
    thread
}

/// Runs `last` in a thread that never runs on after it and never unwinds: what
/// it leaves on its stack is there for ever. Returns its id once `last` is done.
fn vanish(last: impl FnOnce(&dyn Fn()) + Send + 'static) -> ThreadId {
    let (done, is_done): (Sender<ThreadId>, Receiver<ThreadId>) = channel();
    thread::spawn(move || {
        last(&|| {
            done.send(thread::current().id()).unwrap();
            loop {
                thread::park();
            }
        });
    });
    is_done.recv().unwrap()
}

/// A thread that takes the lease, writes `entry` in the journal, and vanishes.
fn vanish_with(lease: &Arc<Lease<u32>>, entry: u32) -> ThreadId {
    let lease = Arc::clone(lease);
    vanish(move |gone| {
        let guard = lease.lock().unwrap();
        *guard.journal() = entry;
        gone();
    })
}

#[test]
fn turns_are_first_come_first_served() {
    let (lease, log) = (Arc::new(Lease::new()), Log::default());
    let guard = lease.lock().unwrap();
    let threads = [
        waiter(&lease, &log, "first", 1),
        waiter(&lease, &log, "second", 2),
        waiter(&lease, &log, "third", 3),
    ];
    drop(guard);
    // The scanner comes back at once, and still comes last.
    let guard = lease.lock().unwrap();
    log.lock().unwrap().push("scanner");
    drop(guard);
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(
        *log.lock().unwrap(),
        ["first", "second", "third", "scanner"]
    );
    let counts = lease.counts();
    assert_eq!((counts.taken, counts.evictions), (5, 0));
    assert!(counts.waits >= 3 && counts.longest_queue >= 3, "{counts:?}");
}

#[test]
fn trying_does_not_jump_the_queue() {
    let (lease, log) = (Arc::new(Lease::new()), Log::default());
    let guard = lease.lock().unwrap();
    assert_eq!(lease.try_lock().unwrap_err(), HeldByThisThread);
    let thread = waiter(&lease, &log, "first", 1);
    // Free it without letting the waiter see: it is next all the same.
    lease.queue.lock().holder = None;
    assert!(lease.try_lock().unwrap().is_none());
    assert_eq!(lease.counts().refusals, 1);
    lease.turn.notify_all();
    thread.join().unwrap();
    drop(guard);
    assert!(lease.try_lock().unwrap().is_some());
}

#[test]
fn a_holder_is_told_instead_of_waiting_for_itself() {
    let lease = Lease::<u32>::new();
    let guard = lease.lock().unwrap();
    assert_eq!(lease.lock().unwrap_err(), HeldByThisThread);
    drop(guard);
    assert!(lease.lock().is_ok());
}

#[test]
fn the_journal_of_a_vanished_holder_falls_to_the_evictor() {
    let (lease, log) = (Arc::new(Lease::new()), Log::default());
    let dead = vanish_with(&lease, 7);
    let thread = waiter(&lease, &log, "waiter", 1);
    assert!(lease.try_lock().unwrap().is_none());
    assert!(lease.evict(thread::current().id()).is_none());

    let guard = lease.evict(dead).unwrap();
    assert_eq!(*guard.journal(), 7);
    assert!(lease.evict(dead).is_none(), "it was taken over already");
    assert!(
        log.lock().unwrap().is_empty(),
        "the waiter overtook the evictor"
    );
    drop(guard);
    thread.join().unwrap();
    assert_eq!(lease.counts().evictions, 1);
}

#[test]
fn a_vanished_waiter_blocks_nobody() {
    let (lease, log) = (Arc::new(Lease::new()), Log::default());
    let guard = lease.lock().unwrap();
    let dead = vanish({
        let lease = Arc::clone(&lease);
        move |gone| {
            lease.queue.lock().line_up();
            gone();
        }
    });
    let thread = waiter(&lease, &log, "waiter", 2);
    drop(guard);
    assert!(lease.try_lock().unwrap().is_none());
    assert!(lease.evict(dead).is_none());
    thread.join().unwrap();
}

#[test]
fn a_waiter_evicted_by_mistake_loses_its_place_only() {
    let (lease, log) = (Arc::new(Lease::new()), Log::default());
    let guard = lease.lock().unwrap();
    let slow = waiter(&lease, &log, "slow", 1);
    let quick = waiter(&lease, &log, "quick", 2);
    assert!(lease.evict(slow.thread().id()).is_none());
    wait_for_queue(&lease, 2);
    drop(guard);
    for thread in [slow, quick] {
        thread.join().unwrap();
    }
    assert_eq!(*log.lock().unwrap(), ["quick", "slow"]);
}

#[test]
fn the_guard_of_an_evicted_holder_frees_nothing() {
    let lease = Arc::new(Lease::<u32>::new());
    let (dead, is_dead) = channel();
    let (wake, woken) = channel();
    let late = thread::spawn({
        let lease = Arc::clone(&lease);
        move || {
            let guard = lease.lock().unwrap();
            dead.send(thread::current().id()).unwrap();
            woken.recv().unwrap();
            drop(guard);
        }
    });
    let guard = lease.evict(is_dead.recv().unwrap()).unwrap();
    wake.send(()).unwrap();
    late.join().unwrap();
    let holder = lease.queue.lock().holder;
    assert_eq!(holder.map(|h| h.thread), Some(thread::current().id()));
    drop(guard);
    assert!(lease.try_lock().unwrap().is_some());
}

#[test]
fn a_panic_gives_the_lease_up() {
    let lease = Arc::new(Lease::<u32>::new());
    let thread = thread::spawn({
        let lease = Arc::clone(&lease);
        move || {
            let guard = lease.lock().unwrap();
            let mut journal = guard.journal();
            *journal = 3;
            panic!("a step of a merge");
        }
    });
    thread.join().unwrap_err();
    let guard = lease.lock().unwrap();
    assert_eq!(*guard.journal(), 3, "the journal outlives its writer");
}

#[test]
fn one_holder_at_a_time() {
    let lease = Arc::new(Lease::<u32>::new());
    let threads = [(); 4].map(|()| {
        let lease = Arc::clone(&lease);
        thread::spawn(move || {
            for _ in 0..1_000 {
                let guard = lease.lock().unwrap();
                let before = *guard.journal();
                thread::yield_now();
                *guard.journal() = before + 1;
            }
        })
    });
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*lease.lock().unwrap().journal(), 4_000);
}
