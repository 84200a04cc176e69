//! [`DiscardDesk`]: how a discard is agreed on with a guest that is running.
//!
//! Whoever discards must not pull pages from under a guest that is just
//! checking them. So the guest's thread marks the pages as unknown between two
//! commands, the discarder drops them while the guest works elsewhere, and the
//! guest's thread marks them as zero. The guest then checks that they are, and
//! some time later fills them again.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Where the discard of one guest's pages stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Discard {
    /// All pages hold what the plan says.
    #[default]
    None,
    /// The discarder wants these pages.
    Asked(Range<u64>),
    /// The guest keeps away from them.
    Granted(Range<u64>),
    /// They are discarded.
    Done(Range<u64>),
    /// The guest knows, and expects zeros.
    Zero(Range<u64>),
}

/// One guest's side table.
#[derive(Debug, Default)]
pub(crate) struct DiscardDesk {
    state: Mutex<Discard>,
    moved: Condvar,
}

impl DiscardDesk {
    fn lock(&self) -> MutexGuard<'_, Discard> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it stands.
    pub(crate) fn state(&self) -> Discard {
        self.lock().clone()
    }

    /// The next step is taken.
    pub(crate) fn set(&self, state: Discard) {
        *self.lock() = state;
        self.moved.notify_all();
    }

    /// The discarder asks for `pages`, and waits until the guest keeps away from
    /// them. False if an earlier discard is not over, or the guest does not
    /// answer within `patience`: then nothing may be discarded.
    pub(crate) fn ask(&self, pages: &Range<u64>, patience: Duration) -> bool {
        let mut state = self.lock();
        if *state != Discard::None {
            return false;
        }
        *state = Discard::Asked(pages.clone());
        let waiting = |state: &mut Discard| matches!(state, Discard::Asked(_));
        let (mut state, _) = self
            .moved
            .wait_timeout_while(state, patience, waiting)
            .unwrap_or_else(PoisonError::into_inner);
        if let Discard::Asked(_) = *state {
            *state = Discard::None;
            return false;
        }
        true
    }
}
