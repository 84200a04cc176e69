//! How fast a scanner goes, and how it is told to stop.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::poll::{EpollContext, EpollEvents};

/// How fast to scan: the kernel's two knobs of the same names
/// (`/sys/kernel/mm/ksm`), with its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pacing {
    /// Pages to scan before sleeping.
    pub pages_to_scan: u32,
    /// How long to sleep then, in milliseconds. 0 for not at all.
    pub sleep_millisecs: u32,
}

impl Default for Pacing {
    fn default() -> Self {
        Self {
            pages_to_scan: 100,
            sleep_millisecs: 20,
        }
    }
}

/// A [`Pacing`] that can be changed while it is used: both halves in one word.
#[derive(Debug)]
pub(super) struct Pace(AtomicU64);

impl Pace {
    pub(super) fn new(pacing: Pacing) -> Self {
        let pace = Self(AtomicU64::new(0));
        pace.set(pacing);
        pace
    }

    pub(super) fn set(&self, pacing: Pacing) {
        let high = u64::from(pacing.pages_to_scan) << 32;
        let word = high | u64::from(pacing.sleep_millisecs);
        self.0.store(word, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Pacing {
        let word = self.0.load(Ordering::Relaxed);
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).expect("masked");
        Pacing {
            pages_to_scan: half(word >> 32),
            sleep_millisecs: half(word),
        }
    }
}

/// An eventfd that is written once, and wakes whoever sleeps on it.
pub(super) struct StopSignal {
    event: EventFd,
    poll: EpollContext<()>,
}

impl std::fmt::Debug for StopSignal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StopSignal").finish_non_exhaustive()
    }
}

impl StopSignal {
    pub(super) fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        let poll = EpollContext::new()?;
        poll.add(&event, ())?;
        Ok(Self { event, poll })
    }

    /// Tells everybody to stop, now and for ever.
    pub(super) fn give(&self) {
        // It fails only when the counter is full: then it has been given.
        let _ = self.event.write(1);
    }

    /// Sleeps for `pause` at most. Returns whether to stop.
    pub(super) fn wait(&self, pause: Duration) -> bool {
        let events = EpollEvents::new();
        // An interrupted wait is a short one.
        self.poll
            .wait_timeout(&events, pause)
            .is_ok_and(|events| events.iter_readable().next().is_some())
    }
}
