//! [`share_out`]: work that the calling thread does with the help of a rayon pool, as
//! far as that has threads to spare.
//!
//! A lease is held meanwhile, and so rayon's own iterators will not do: who calls them
//! waits until the pool has a free thread, and all of them may be waiting for that
//! very lease; or he passes the time with other jobs of the pool, which may want it.
//! Here nobody is waited for but who has begun with a piece, and nothing else is done
//! in the meantime.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::sync::{Condvar, Mutex};

/// Does `work` on each piece of up to `piece` of `items`. Returns what came of each, in
/// order. The pool is the one that this is called in, or else rayon's global one.
///
/// # Panics
/// If `work` does, on whatever thread.
pub(crate) fn share_out<T, R, W>(items: Vec<T>, piece: usize, work: W) -> Vec<R>
where
    T: Send + Sync + 'static,
    R: Send + 'static,
    W: Fn(&[T]) -> R + Send + Sync + 'static,
{
    let pieces = items.len().div_ceil(piece);
    let crew = Arc::new(Crew {
        items,
        piece,
        work,
        progress: Mutex::new(Progress {
            to_begin: 0..pieces,
            at_work: 0,
            done: (0..pieces).map(|_| None).collect(),
        }),
        idle: Condvar::new(),
    });
    let helpers = rayon::current_num_threads().min(pieces).saturating_sub(1);
    for _ in 0..helpers {
        // Who comes too late finds nothing, and keeps nothing until then.
        let crew = Arc::downgrade(&crew);
        rayon::spawn(move || {
            if let Some(crew) = crew.upgrade() {
                // A panic would end the process; the caller finds the piece missing.
                let _ = catch_unwind(AssertUnwindSafe(|| crew.work()));
            }
        });
    }
    {
        let _end = End(&crew);
        crew.work();
    }
    let done = std::mem::take(&mut crew.progress.lock().done);
    let done = done.into_iter();
    done.map(|of_piece| of_piece.expect("whoever did this piece has panicked"))
        .collect()
}

/// Work, and how far it is.
#[derive(Debug)]
struct Crew<T, R, W> {
    items: Vec<T>,
    /// Items of a piece.
    piece: usize,
    work: W,
    progress: Mutex<Progress<R>>,
    /// Notified when the last at work is through with a piece.
    idle: Condvar,
}

#[derive(Debug)]
struct Progress<R> {
    /// Pieces that nobody has begun with.
    to_begin: std::ops::Range<usize>,
    /// Pieces that somebody has begun with and is not through with.
    at_work: usize,
    /// Of each piece.
    done: Vec<Option<R>>,
}

impl<T, R, W: Fn(&[T]) -> R> Crew<T, R, W> {
    /// Does piece by piece, until none is left to begin with.
    fn work(&self) {
        while let Some(number) = self.begin() {
            let through = Through(self);
            let first = number * self.piece;
            let last = self.items.len().min(first + self.piece);
            let of_piece = (self.work)(&self.items[first..last]);
            self.progress.lock().done[number] = Some(of_piece);
            drop(through);
        }
    }

    fn begin(&self) -> Option<usize> {
        let mut progress = self.progress.lock();
        let number = progress.to_begin.next()?;
        progress.at_work += 1;
        Some(number)
    }
}

/// When this is dropped, its thread is through with a piece.
struct Through<'c, T, R, W>(&'c Crew<T, R, W>);

impl<T, R, W> Drop for Through<'_, T, R, W> {
    fn drop(&mut self) {
        let mut progress = self.0.progress.lock();
        progress.at_work -= 1;
        if progress.at_work == 0 {
            self.0.idle.notify_all();
        }
    }
}

/// When this is dropped, on unwinding as well, nobody is at work any more.
struct End<'c, T, R, W>(&'c Crew<T, R, W>);

impl<T, R, W> Drop for End<'_, T, R, W> {
    fn drop(&mut self) {
        let mut progress = self.0.progress.lock();
        progress.to_begin.start = progress.to_begin.end;
        while progress.at_work > 0 {
            progress = self.0.idle.wait(progress);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn in_pool<R: Send>(threads: usize, act: impl FnOnce() -> R + Send) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().unwrap().install(act)
    }

    #[test]
    fn what_comes_of_pieces_is_in_their_order() {
        for items in [0, 1, 31, 32, 33, 1000] {
            let sum = |piece: &[u64]| piece.iter().sum::<u64>();
            let all: Vec<u64> = (0..items).collect();
            let expected: Vec<_> = all.chunks(32).map(sum).collect();
            for threads in [1, 2, 7] {
                let sums = in_pool(threads, || share_out(all.clone(), 32, sum));
                assert_eq!(sums, expected);
            }
        }
    }

    #[test]
    fn a_pool_without_a_free_thread_is_not_waited_for() {
        in_pool(2, || {
            let (is_busy, busy) = mpsc::channel();
            let (end, may_end) = mpsc::channel::<()>();
            rayon::spawn(move || {
                is_busy.send(()).unwrap();
                may_end.recv().unwrap();
            });
            busy.recv().unwrap();
            assert_eq!(share_out(vec![1, 2, 3], 1, |piece| piece[0]), [1, 2, 3]);
            end.send(()).unwrap();
        });
    }

    /// Another job might want what the caller holds.
    #[test]
    fn no_other_job_is_done_while_a_helper_is_waited_for() {
        in_pool(2, || {
            let caller = rayon::current_thread_index();
            let (begin, begun) = mpsc::channel();
            let (run, has_run) = mpsc::channel();
            let (begun, has_run) = (Mutex::new(begun), Mutex::new(has_run));
            share_out(vec![(); 2], 1, move |_| {
                if rayon::current_thread_index() == caller {
                    begun.lock().recv().unwrap();
                    // For nobody but this thread, as the helper is at work.
                    let run = run.clone();
                    rayon::spawn(move || {
                        let _ = run.send(());
                    });
                } else {
                    begin.send(()).unwrap();
                    let soon = Duration::from_millis(50);
                    assert!(has_run.lock().recv_timeout(soon).is_err());
                }
            });
        });
    }

    #[test]
    fn a_panic_of_whoever_helps_is_one_of_the_caller() {
        for threads in [1, 4] {
            let shared = catch_unwind(|| {
                in_pool(threads, || {
                    share_out((0..64).collect(), 1, |piece: &[u32]| {
                        assert!(piece[0] != 40, "injected");
                    })
                })
            });
            assert!(shared.is_err());
        }
    }
}
