//! The backend for Linux hosts: userfaultfd stops writes, a memfd holds the
//! frames, private mappings of it are the merged pages.
//!
//! The guest's memory is private anonymous memory of this process, or a memfd
//! that nobody else maps. To merge a run of pages:
//!
//! 1. **Stop** it: `UFFDIO_MOVE` takes the pages out to a staging area
//!    ([`StopMethod::Move`]), or write-protection stops their writers.
//! 2. Compare it with the frames.
//! 3. **Share**: `mmap(MAP_FIXED | MAP_PRIVATE)` the frames over it. KVM follows
//!    through its MMU notifiers, and a later write is copied by the kernel.
//! 4. **Lift** the stop: what was not replaced goes back, and whoever waited is
//!    woken.
//!
//! # Kinds of memory
//!
//! | | private anonymous | memfd, `MAP_SHARED` ([`HostRegion::memfd_owned`]) |
//! |---|---|---|
//! | its own pages are stopped | by moving or write-protection | by write-protection (`UFFDIO_MOVE` does not take them), so only where `dma_guarded` |
//! | a merge frees | what it maps over | what it punches out of the memfd, once the frames are mapped |
//! | a zero page | the host's | a hole of the memfd; **a read fills it** |
//! | unregistered | the copies, moved over | the copies, written to the memfd, which is mapped over |
//! | huge pages | split by moving | split by punching |
//!
//! Each region of a guest can be of another kind. Memory that other processes map
//! is left unregistered.
//!
//! # System calls
//!
//! For seccomp filters: [`OPEN_SYSTEM_CALLS`] and [`SYSTEM_CALLS`]. A test runs
//! the engine under a filter made of exactly these (`tests/linux_jail.rs`).
//!
//! # Safety
//!
//! This is the only folder with `unsafe` code. All of it acts on `Span`s: whole
//! pages in the backend's care, which no Rust reference ever points into.
//!
//! "Design fact" in a comment names a numbered fact about the kernel; for each
//! there is a test that fails if it is ignored.
#![allow(unsafe_code)]

mod anchor;
mod attach;
mod caps;
mod claim;
#[cfg(test)]
mod interrupted;
mod journal;
mod mapping;
mod memfd;
mod memory;
mod out;
mod pagemap;
mod protect;
mod replace;
mod smaps;
mod source;
mod span;
mod staging;
mod store;
mod trial;
mod uffd;
mod vet;
mod window;

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use caps::{Capabilities, Fds, OpenError, StopMethod};
pub use memory::LinuxMemory;
use rustix::io::Errno;
pub use source::HostRegion;
pub use store::LinuxStore;

use super::{Backend, RegionOptions};
use crate::error::{BackendError, RegisterError};
use caps::{Host, Stops};
use vet::Content;

/// The system calls that are made to open a backend, besides [`SYSTEM_CALLS`],
/// by their names on x86-64.
///
/// To open [`Fds`]: `userfaultfd`, or `open` of /dev/userfaultfd and an `ioctl`
/// (`USERFAULTFD_IOC_NEW`); `open` of /proc/self/pagemap and /proc/self/smaps;
/// /proc/sys/vm/max_map_count is read (`openat`, `statx`, `read`). To try the
/// userfaultfd out: `fcntl` (`F_GETFL`, `F_SETFL`), `ppoll`, `uname`, and a
/// thread. A process in a jail has all of it done before it goes in.
pub const OPEN_SYSTEM_CALLS: &[&str] = &[
    "fcntl",
    "ioctl",
    "open",
    "openat",
    "ppoll",
    "read",
    "statx",
    "uname",
    "userfaultfd",
];

/// The system calls that engine and backend make once the backend is open, by
/// their names on x86-64.
///
/// `ioctl` is called with `UFFDIO_REGISTER`, `UNREGISTER`, `WAKE`,
/// `WRITEPROTECT`, `MOVE`, `COPY` and `ZEROPAGE`, and with `PAGEMAP_SCAN`; `fcntl` with
/// `F_ADD_SEALS`; `prctl` with `PR_GET_MEMORY_MERGE`. `getrandom` is for the
/// secrets of trust domains, `futex` for locks that are not free. What the
/// allocator, the threads and the logging of the process need comes on top.
/// [`LinuxStore::open_read_only`] makes `open` besides.
pub const SYSTEM_CALLS: &[&str] = &[
    "clock_nanosleep",
    "close",
    "fallocate",
    "fchmod",
    "fcntl",
    "fstat",
    "futex",
    "getrandom",
    "ioctl",
    "lseek",
    "madvise",
    "memfd_create",
    "mincore",
    "mmap",
    "mremap",
    "munmap",
    "prctl",
    "pread64",
    "pwrite64",
    "sched_yield",
];

/// How long to wait before a call that must not fail is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A Linux host. Cheap to clone; clones share one userfaultfd.
///
/// Needs Linux 6.7, and 6.8 for [`StopMethod::Move`].
#[derive(Clone, Debug)]
pub struct LinuxBackend {
    host: Arc<Host>,
}

impl LinuxBackend {
    /// Opens what is needed, now: nothing under /proc is opened later. One for a
    /// process: two do not know of each other's regions, and the same memory must not
    /// be registered with both.
    ///
    /// # Errors
    /// [`OpenError`] names what is missing, and how to get it.
    pub fn open() -> Result<Self, OpenError> {
        Self::from_fds(Fds::open()?)
    }

    /// Opens what an unprivileged process can have, for memory that only threads
    /// of this process touch, in user mode: **not for KVM guests**. A system call
    /// that is given a page while it is being merged fails with `EFAULT`.
    ///
    /// # Errors
    /// As [`LinuxBackend::open`].
    pub fn open_user_mode() -> Result<Self, OpenError> {
        let host = Host::new(Fds::open_user_mode()?, StopMethod::Auto, Stops::UserMode)?;
        Ok(Self {
            host: Arc::new(host),
        })
    }

    /// Works with descriptors that were opened elsewhere, for a process in a
    /// jail.
    ///
    /// # Errors
    /// [`OpenError`] when they do not do what is needed.
    pub fn from_fds(fds: Fds) -> Result<Self, OpenError> {
        Self::with_stop_method(fds, StopMethod::Auto)
    }

    /// As [`LinuxBackend::from_fds`], with the method by which writes are
    /// stopped.
    ///
    /// # Errors
    /// [`OpenError`] when the descriptors or the kernel do not do what is needed.
    pub fn with_stop_method(fds: Fds, method: StopMethod) -> Result<Self, OpenError> {
        Ok(Self {
            host: Arc::new(Host::new(fds, method, Stops::Everybody)?),
        })
    }

    /// What the host can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.host.capabilities()
    }
}

impl Backend for LinuxBackend {
    type Source = HostRegion;
    type Memory = LinuxMemory;
    type Store = LinuxStore;

    fn free_vmas(&self) -> Option<u64> {
        let used = vet::count_mappings(&self.host)?;
        Some(self.host.max_map_count?.saturating_sub(used))
    }

    fn open_store(&self) -> Result<LinuxStore, BackendError> {
        LinuxStore::create()
    }

    fn attach(
        &self,
        source: HostRegion,
        options: RegionOptions,
    ) -> Result<LinuxMemory, RegisterError> {
        LinuxMemory::attach(Arc::clone(&self.host), source, options, Content::Live)
    }

    fn attach_unused(
        &self,
        source: HostRegion,
        options: RegionOptions,
    ) -> Result<LinuxMemory, RegisterError> {
        LinuxMemory::attach(Arc::clone(&self.host), source, options, Content::Unused)
    }
}

/// An error that the engine has no name for.
fn host_error(call: &'static str, source: impl Into<io::Error>) -> BackendError {
    BackendError::Host {
        call,
        source: source.into(),
    }
}

/// The error of a call that may need another mapping.
fn mapping_error(call: &'static str, errno: Errno) -> BackendError {
    match errno {
        Errno::NOMEM => BackendError::NoVmas,
        errno => host_error(call, errno),
    }
}
