//! Trying a userfaultfd out: does it stop the kernel's own accesses?

use std::io;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::mm::Advice;

use super::caps::OpenError;
use super::mapping::{self, Attributes, Scratch};
use super::span::Span;
use super::uffd::{Mode, Userfaultfd};

/// How often it is asked, a millisecond apart, whether the kernel waits.
const TRIES: u32 = 5_000;

/// Lets the kernel write to a stopped page. It must wait, as KVM must; with
/// `UFFD_USER_MODE_ONLY` (design fact 13), which a descriptor does not show, it
/// fails instead. Takes a thread, which has ended when this returns.
pub(super) fn stops_the_kernel(uffd: &Userfaultfd) -> Result<(), OpenError> {
    let failed = |errno: Errno| OpenError::Trial(errno.into());
    // Only then can it be polled.
    fcntl_getfl(uffd.fd())
        .and_then(|flags| fcntl_setfl(uffd.fd(), flags | OFlags::NONBLOCK))
        .map_err(failed)?;
    let scratch = Scratch::new(1, Attributes::default()).map_err(failed)?;
    let span = scratch.span();
    mapping::advise(span, Advice::LinuxPopulateWrite)
        .and_then(|()| uffd.register(span, Mode::WriteProtect))
        .and_then(|()| uffd.write_protect(span, true))
        .map_err(failed)?;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || kernel_writes(span));
        let waited = wait_for_fault(uffd, &writer);
        let lifted = uffd.write_protect(span, false);
        uffd.wake(span);
        if let Err(errno) = lifted {
            // This wakes as well, so the thread ends.
            let _ = uffd.unregister(span);
            return Err(failed(errno));
        }
        match writer.join() {
            Ok(true) if waited => Ok(()),
            Ok(true) => Err(OpenError::Trial(io::ErrorKind::TimedOut.into())),
            _ => Err(OpenError::UserModeOnly),
        }
    })
}

/// Waits until `writer` waits, and says whether it does.
fn wait_for_fault(uffd: &Userfaultfd, writer: &ScopedJoinHandle<'_, bool>) -> bool {
    let millisecond = Timespec::try_from(Duration::from_millis(1)).ok();
    for _ in 0..TRIES {
        let mut fds = [PollFd::from_borrowed_fd(uffd.fd(), PollFlags::IN)];
        let _ = poll(&mut fds, millisecond.as_ref());
        if fds[0].revents().contains(PollFlags::IN) {
            return true;
        }
        if writer.is_finished() {
            return false;
        }
    }
    false
}

/// Lets the kernel write to a page, and says whether it could.
fn kernel_writes(page: Span) -> bool {
    // SAFETY: uname writes a `utsname`, which is shorter than a page and has no
    // alignment, to the page, which is mapped, writable and ours.
    unsafe { libc::uname(page.pointer().cast()) == 0 }
}
