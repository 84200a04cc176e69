//! The lease in every interleaving that loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ksm-core --release --lib loom_`

use loom::sync::Arc;
use loom::sync::mpsc::channel;
use loom::thread;

use super::*;

/// A read and a write of the journal with a gap between: two holders at once
/// would lose a count.
fn count(guard: &LeaseGuard<'_, u32>) {
    let before = *guard.journal();
    thread::yield_now();
    *guard.journal() = before + 1;
}

/// No two holders at once; every waiter gets its turn (loom reports a lost
/// wake-up as a deadlock).
#[test]
fn loom_one_holder_at_a_time_and_no_lost_wake_up() {
    loom::model(|| {
        let lease = Arc::new(Lease::<u32>::new());
        let threads = [(); 2].map(|()| {
            let lease = Arc::clone(&lease);
            thread::spawn(move || count(&lease.lock().unwrap()))
        });
        count(&lease.lock().unwrap());
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*lease.lock().unwrap().journal(), 3);
        assert_eq!(lease.counts().taken, 4);
    });
}

/// Trying never waits, and never gets in beside a holder.
#[test]
fn loom_trying_excludes() {
    loom::model(|| {
        let lease = Arc::new(Lease::<u32>::new());
        let thread = thread::spawn({
            let lease = Arc::clone(&lease);
            move || count(&lease.lock().unwrap())
        });
        let tried = lease.try_lock().unwrap().map(|guard| count(&guard));
        thread.join().unwrap();
        let expected = 1 + u32::from(tried.is_some());
        assert_eq!(*lease.lock().unwrap().journal(), expected);
    });
}

/// A holder vanishes while another thread waits or is about to: the evictor gets
/// the lease, the waiter its turn after it, and nobody else is in with them.
#[test]
fn loom_eviction_hands_the_lease_on() {
    loom::model(|| {
        let lease = Arc::new(Lease::<u32>::new());
        let (dead, is_dead) = channel();
        let holder = thread::spawn({
            let lease = Arc::clone(&lease);
            move || {
                let guard = lease.lock().unwrap();
                *guard.journal() = 7;
                std::mem::forget(guard);
                dead.send(thread::current().id()).unwrap();
            }
        });
        let dead = is_dead.recv().unwrap();
        let waiter = thread::spawn({
            let lease = Arc::clone(&lease);
            move || count(&lease.lock().unwrap())
        });
        let guard = lease.evict(dead).expect("nobody else could take it");
        assert_eq!(*guard.journal(), 7);
        count(&guard);
        drop(guard);
        waiter.join().unwrap();
        holder.join().unwrap();
        assert_eq!(*lease.lock().unwrap().journal(), 9);
    });
}

/// A waiter vanishes from the head of the queue: whoever stands behind it is
/// woken by the eviction or by the holder, whichever comes last.
#[test]
fn loom_a_vanished_waiter_blocks_nobody() {
    loom::model(|| {
        let lease = Arc::new(Lease::<u32>::new());
        let guard = lease.lock().unwrap();
        let (dead, is_dead) = channel();
        let gone = thread::spawn({
            let lease = Arc::clone(&lease);
            move || {
                lease.queue.lock().line_up();
                dead.send(thread::current().id()).unwrap();
            }
        });
        let dead = is_dead.recv().unwrap();
        let waiter = thread::spawn({
            let lease = Arc::clone(&lease);
            move || count(&lease.lock().unwrap())
        });
        drop(guard);
        assert!(lease.evict(dead).is_none());
        waiter.join().unwrap();
        gone.join().unwrap();
        assert_eq!(*lease.lock().unwrap().journal(), 1);
    });
}

/// The guard of an evicted holder that lives after all frees nothing.
#[test]
fn loom_a_late_guard_frees_nothing() {
    loom::model(|| {
        let lease = Arc::new(Lease::<u32>::new());
        let (dead, is_dead) = channel();
        let late = thread::spawn({
            let lease = Arc::clone(&lease);
            move || {
                let guard = lease.lock().unwrap();
                dead.send(thread::current().id()).unwrap();
                drop(guard);
            }
        });
        let evicted = lease.evict(is_dead.recv().unwrap());
        let tried = lease.try_lock();
        match &evicted {
            Some(_) => assert_eq!(tried.unwrap_err(), HeldByThisThread),
            None => assert!(tried.unwrap().is_some()),
        }
        late.join().unwrap();
        drop(evicted);
        assert!(lease.try_lock().unwrap().is_some());
    });
}
