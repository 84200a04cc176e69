//! Noticing the end of a thread, however it ends.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io;
use rustix::process::{PidfdFlags, pidfd_open};

/// `PIDFD_THREAD` (Linux 6.9): the descriptor is one thread's, not the
/// process's. Its value is that of `O_EXCL`.
const PIDFD_THREAD: u32 = OFlags::EXCL.bits();

/// Whether the death of a scanner thread without unwinding would be noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watch {
    /// It would, and [`Ksm::recover`](ksm_core::Ksm::recover) be called.
    Watched,
    /// It would not, for this reason: `PIDFD_THREAD` needs Linux 6.9.
    Unavailable(String),
}

/// A descriptor that can be read once a thread has ended.
pub(super) struct ThreadWatch {
    pidfd: OwnedFd,
}

impl ThreadWatch {
    /// Watches the calling thread.
    pub(super) fn on_this_thread() -> io::Result<Self> {
        let flags = PidfdFlags::from_bits_retain(PIDFD_THREAD);
        let pidfd = pidfd_open(rustix::thread::gettid(), flags)?;
        Ok(Self { pidfd })
    }

    /// Waits until that thread has ended.
    pub(super) fn wait(&self) {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        while poll(&mut fds, None).is_err() {
            // Interrupted, or short of memory: the thread has not ended.
            std::thread::yield_now();
        }
    }
}
