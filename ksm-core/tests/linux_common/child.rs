//! Other processes: a test that runs once more, in one of its own.

use std::os::fd::BorrowedFd;
use std::process::Command;

use ksm_core::page::PAGE_SIZE;
use rustix::io::Result;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Set in the other process.
const AGAIN: &str = "KSM_TEST_AGAIN";

/// What runs the test `name` once more in another process; `None` in that one.
pub(crate) fn again(name: &str) -> Option<Command> {
    if std::env::var_os(AGAIN).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture"])
        .env(AGAIN, "1");
    Some(command)
}

/// From here on the process is an unprivileged user's.
pub(crate) fn become_nobody() {
    const NOBODY: u32 = 65_534;
    // SAFETY: takes numbers; all threads of the process follow.
    let done = unsafe {
        libc::setresgid(NOBODY, NOBODY, NOBODY) == 0 && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
    // Or /proc/self would still be root's.
    set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
}

/// Pages of a file, mapped.
pub(crate) struct View {
    start: *mut u8,
    len: usize,
}

impl View {
    pub(crate) fn new(
        file: BorrowedFd<'_>,
        pages: usize,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self> {
        let len = pages * PAGE_SIZE;
        // SAFETY: no existing mapping is touched.
        let start = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, file, 0) }?;
        Ok(Self {
            start: start.cast(),
            len,
        })
    }

    fn at(&self, page: usize) -> *mut u8 {
        assert!(page < self.len / PAGE_SIZE);
        self.start.wrapping_add(page * PAGE_SIZE)
    }

    /// The first byte of a page.
    pub(crate) fn load(&self, page: usize) -> u8 {
        // SAFETY: inside the mapping, which is readable.
        unsafe { self.at(page).read_volatile() }
    }

    /// Writes it. The mapping must be writable.
    pub(crate) fn store(&self, page: usize, byte: u8) {
        // SAFETY: inside the mapping; were it not writable, the test would end.
        unsafe { self.at(page).write_volatile(byte) }
    }

    /// Asks for the right to write.
    pub(crate) fn make_writable(&self) -> Result<()> {
        let protection = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: our own mapping, which no Rust reference points into.
        unsafe { mprotect(self.start.cast(), self.len, protection) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which no Rust reference points into.
        unsafe { munmap(self.start.cast(), self.len) }.unwrap();
    }
}
