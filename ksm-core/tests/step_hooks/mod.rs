//! What tests do at the steps of a merge.
#![allow(dead_code)] // No test file uses all of it.
#![allow(clippy::unwrap_used)]

use std::sync::mpsc;
use std::thread::{self, JoinHandle, ThreadId};

use ksm_core::fault::{Hook, Step, set_hook};

/// A hook that acts at the `nth` time that `step` is taken.
pub(crate) fn at(step: Step, nth: usize, act: impl Fn() + 'static) -> Option<Hook> {
    let mut left = nth;
    Some(Box::new(move |now| {
        if now == step && left > 0 {
            left -= 1;
            if left == 0 {
                act();
            }
        }
    }))
}

/// How often `scan` takes `step`.
pub(crate) fn times_taken(step: Step, scan: impl FnOnce()) -> usize {
    let (count, counted) = mpsc::channel();
    set_hook(Some(Box::new(move |now| {
        if now == step {
            count.send(()).unwrap();
        }
    })));
    scan();
    set_hook(None);
    counted.iter().count()
}

/// Lets `scan` panic at the `nth` time that it takes `step`. Returns whether it
/// did.
pub(crate) fn panics_at(step: Step, nth: usize, scan: impl FnOnce()) -> bool {
    set_hook(at(step, nth, || panic!("injected")));
    let scanned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(scan));
    set_hook(None);
    scanned.is_err()
}

/// Lets a thread that calls `scan` vanish at the `nth` time that it takes
/// `step`: it never runs again, and never unwinds. Returns which it was.
pub(crate) fn vanishes_at(
    step: Step,
    nth: usize,
    scan: impl FnOnce() + Send + 'static,
) -> ThreadId {
    let (gone, when_gone) = mpsc::channel();
    thread::spawn(move || {
        set_hook(at(step, nth, move || {
            gone.send(thread::current().id()).unwrap();
            loop {
                thread::park();
            }
        }));
        scan();
    });
    when_gone.recv().unwrap()
}

/// A thread that stands at `step` of `call` until it is told to go on, or nobody is
/// left who could tell it.
pub(crate) fn stands_at(
    step: Step,
    call: impl FnOnce() + Send + 'static,
) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let (here, is_here) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        set_hook(at(step, 1, move || {
            here.send(()).unwrap();
            let _ = may_go.recv();
        }));
        call();
        set_hook(None);
    });
    is_here.recv().unwrap();
    (go, thread)
}
