//! What tests ask of the host.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use ksm_core::page::PageRange;

use super::Guest;

/// Whether pages can be swapped out here.
pub(crate) fn swap_is_on() -> bool {
    std::fs::read_to_string("/proc/swaps")
        .unwrap()
        .lines()
        .count()
        > 1
}

/// A userfaultfd that does not stop the kernel.
pub(crate) fn user_mode_only_userfaultfd() -> OwnedFd {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | 1;
    // SAFETY: userfaultfd takes flags and returns a descriptor of ours.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, flags);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd as i32)
    }
}

/// A child that shares the memory it was forked with, and does nothing.
pub(crate) struct Child(libc::pid_t);

impl Child {
    pub(crate) fn fork() -> Self {
        // SAFETY: the child calls nothing but pause, which is async-signal-safe.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            loop {
                // SAFETY: takes nothing.
                unsafe { libc::pause() };
            }
        }
        Self(pid)
    }

    /// Kills it and waits until it is gone.
    pub(crate) fn end(self) {
        drop(self);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: our own child, not waited for yet.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Guest pages that are fixed buffers of an io_uring: pinned for DMA.
pub(crate) struct FixedBuffers(#[allow(dead_code)] OwnedFd);

impl FixedBuffers {
    pub(crate) fn new(guest: &Guest, range: PageRange) -> Self {
        const IORING_REGISTER_BUFFERS: libc::c_uint = 0;
        let mut params = [0_u64; 15]; // struct io_uring_params, 120 bytes.
        let buffer = libc::iovec {
            iov_base: guest.pointer(range.start.0).cast(),
            iov_len: range.byte_len() as usize,
        };
        // SAFETY: `params` and `buffer` are what the calls take, and outlive
        // them; the pages stay mapped while they are pinned or longer.
        unsafe {
            let fd = libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr());
            assert!(
                fd >= 0,
                "this test needs io_uring: {}",
                std::io::Error::last_os_error()
            );
            let fd = OwnedFd::from_raw_fd(fd as i32);
            let registered = libc::syscall(
                libc::SYS_io_uring_register,
                fd.as_raw_fd(),
                IORING_REGISTER_BUFFERS,
                &raw const buffer,
                1,
            );
            assert_eq!(registered, 0, "{}", std::io::Error::last_os_error());
            Self(fd)
        }
    }
}

/// A field of /proc/self/status, in KiB.
pub(crate) fn status_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// PR_SET_MEMORY_MERGE.
pub(crate) fn set_memory_merge(on: bool) {
    // SAFETY: takes no pointer; merging by the kernel changes no content.
    let set = unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, libc::c_ulong::from(on), 0, 0, 0) };
    assert_eq!(set, 0, "this test needs a kernel with KSM");
}

/// mlockall(MCL_FUTURE), or munlockall.
pub(crate) fn lock_future_mappings(on: bool) {
    // SAFETY: locking changes no content.
    let done = unsafe {
        if on {
            libc::mlockall(libc::MCL_FUTURE)
        } else {
            libc::munlockall()
        }
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// Mappings that the process may have, taken away from it.
pub(crate) struct SpentVmas {
    start: *mut std::ffi::c_void,
    len: usize,
    /// From the first on, as many take a mapping each.
    pages: usize,
}

impl SpentVmas {
    /// All.
    pub(crate) fn all() -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let len = (limit + 2) * 4096;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: memory of our own, which nobody uses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) };
        let mut spent = Self {
            start: start.unwrap(),
            len,
            pages: 0,
        };
        spent.leave(0);
        spent
    }

    /// Leaves exactly so many to the process.
    pub(crate) fn leave(&mut self, left: usize) {
        // One page after the other gets a protection that neither the page in
        // front of it has nor the rest behind it: that costs one each.
        while self.protect(self.pages, 1 + self.pages % 2) {
            self.pages += 1;
            assert!(self.pages * 4096 < self.len, "the limit was never met");
        }
        for _ in 0..left {
            self.pages -= 1;
            assert!(self.protect(self.pages, 0));
        }
    }

    /// Gives a page the protection of that number. False if that takes a
    /// mapping which is not to be had.
    fn protect(&self, page: usize, number: usize) -> bool {
        use rustix::mm::{MprotectFlags, mprotect};
        let read = MprotectFlags::READ;
        let protections = [MprotectFlags::empty(), read, read | MprotectFlags::EXEC];
        let at = self.start.wrapping_byte_add(page * 4096);
        // SAFETY: memory of our own, which nobody uses.
        unsafe { mprotect(at, 4096, protections[number]) }.is_ok()
    }
}

impl Drop for SpentVmas {
    fn drop(&mut self) {
        // SAFETY: our own, and nobody uses it.
        unsafe { rustix::mm::munmap(self.start, self.len) }.unwrap();
    }
}
