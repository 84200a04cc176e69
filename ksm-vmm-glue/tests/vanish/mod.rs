//! The only unsafe code of these tests.
#![allow(unsafe_code)]

/// Ends the calling thread as a kill would: nothing is unwound.
pub(crate) fn this_thread() {
    // SAFETY: exit(2) ends this thread alone. The C library does not learn
    // of it, so it never gives the stack to another thread, and what stood
    // on it is leaked, as is sound.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}
