//! What tests do at the steps of a merge.
#![allow(dead_code)] // No test file uses all of it.
#![allow(clippy::unwrap_used)]

use std::fmt::Debug;
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

/// Every accident that can happen, where `taken` says how often each step is taken in
/// a scene: at the first times, `first` of them, and at the last; and what it is
/// called, if it is one `of` that kind.
pub(crate) fn accidents<S: Copy + Debug>(
    of: &str,
    taken: impl IntoIterator<Item = (S, Step, usize)>,
    first: usize,
) -> impl Iterator<Item = (S, Step, usize, String)> {
    let all = taken.into_iter().flat_map(move |(scene, step, times)| {
        let nths = (1..=times).filter(move |&nth| nth <= first || nth == times);
        nths.map(move |nth| (scene, step, nth))
    });
    all.map(move |(scene, step, nth)| {
        let when = format!("{scene:?}: {of} at {step:?} {nth}");
        (scene, step, nth, when)
    })
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

/// A thread that stands at a step until told to go on.
pub(crate) struct Standing {
    here: mpsc::Receiver<()>,
    go: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Standing {
    /// At the `nth` time that `call` takes `step`.
    pub(crate) fn at(step: Step, nth: usize, call: impl FnOnce() + Send + 'static) -> Self {
        let (is_here, here) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            set_hook(at(step, nth, move || {
                is_here.send(()).unwrap();
                let _ = may_go.recv();
            }));
            call();
            set_hook(None);
        });
        Self { here, go, thread }
    }

    /// Waits until it stands there.
    pub(crate) fn is_there(&self) {
        self.here.recv().unwrap();
    }

    pub(crate) fn go(&self) {
        self.go.send(()).unwrap();
    }

    /// Waits for the end of the call.
    pub(crate) fn ends(self) {
        self.thread.join().unwrap();
    }
}
