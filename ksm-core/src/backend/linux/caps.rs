//! What the host can do: descriptors opened at start, and errors that say what
//! is missing and how to get it.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use linux_raw_sys::general as raw;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::opcode;
use rustix::mm::{Advice, UserfaultfdFlags, userfaultfd};
use thiserror::Error;

use super::claim::Claims;
use super::mapping::{self, Attributes, Scratch};
use super::pagemap::Pagemap;
use super::smaps::Smaps;
use super::span::Span;
use super::staging::Stagings;
use super::trial::stops_the_kernel;
use super::uffd::Userfaultfd;

/// How writes to the guest's own memory are stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopMethod {
    /// [`StopMethod::Move`] where the host has it, otherwise
    /// [`StopMethod::WriteProtect`], and then only for memory that is
    /// [`dma_guarded`](crate::RegionOptions::dma_guarded).
    #[default]
    Auto,
    /// `UFFDIO_MOVE` (Linux 6.8): finds pages that the kernel has pinned for a device
    /// (`FOLL_PIN`; those it only holds a reference to, `FOLL_GET`, nobody finds), splits
    /// huge pages. Readers of a stopped page wait.
    Move,
    /// Write-protection by userfaultfd: readers go on. **What a device writes
    /// to a page while it is being merged is lost, unnoticed**, so this is for
    /// memory without DMA. Pages of huge pages are refused.
    WriteProtect,
}

/// What this host can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The kernel has `UFFDIO_MOVE`.
    pub can_move: bool,
    /// The method in use: never [`StopMethod::Auto`].
    pub stop_method: StopMethod,
}

/// Descriptors for a process that may not open them itself.
#[derive(Debug)]
pub struct Fds {
    /// Of userfaultfd(2), fresh, and made **without** `UFFD_USER_MODE_ONLY`.
    pub userfaultfd: OwnedFd,
    /// Of `/proc/self/pagemap`, opened for reading by this process.
    pub pagemap: OwnedFd,
    /// Of `/proc/self/smaps`, opened for reading by this process.
    pub smaps: OwnedFd,
    /// What `/proc/sys/vm/max_map_count` says; `None` if that is not known, and
    /// the engine is to merge until the kernel refuses.
    pub max_map_count: Option<u64>,
}

/// Why the backend cannot work on this host.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// userfaultfd is not permitted.
    #[error(
        "userfaultfd is not permitted: give the process CAP_SYS_PTRACE, or read and write access to /dev/userfaultfd (Linux 6.1), or set vm.unprivileged_userfaultfd=1"
    )]
    UserfaultfdNotPermitted(#[source] io::Error),
    /// There is no userfaultfd.
    #[error(
        "userfaultfd cannot be made: a kernel with CONFIG_USERFAULTFD is needed, and a seccomp filter must let it through"
    )]
    NoUserfaultfd(#[source] io::Error),
    /// The kernel's userfaultfd lacks what is needed.
    #[error(
        "userfaultfd refuses write-protection of absent pages: Linux 6.4 or later is needed (5.19 for write-protection of shared memory, 6.4 for WP_UNPOPULATED), and a descriptor that is not in use yet"
    )]
    NoWriteProtect(#[source] io::Error),
    /// The descriptor does not stop the kernel's own accesses, KVM's among them.
    #[error(
        "the userfaultfd was made with UFFD_USER_MODE_ONLY and would not stop KVM's accesses: make it without"
    )]
    UserModeOnly,
    /// The page map cannot be opened.
    #[error("/proc/self/pagemap cannot be opened: mount /proc, or hand in a descriptor")]
    NoPagemap(#[source] io::Error),
    /// The page map cannot be scanned.
    #[error("/proc/self/pagemap has no PAGEMAP_SCAN: Linux 6.7 or later is needed")]
    NoPagemapScan(#[source] io::Error),
    /// The list of mappings cannot be opened.
    #[error("/proc/self/smaps cannot be opened: mount /proc, or hand in a descriptor")]
    NoSmaps(#[source] io::Error),
    /// The page map or the list of mappings is not of this address space.
    #[error(
        "/proc/self/pagemap and /proc/self/smaps were opened by another process, or before an exec: open them in the process that merges"
    )]
    OtherAddressSpace,
    /// [`StopMethod::Move`] was asked for.
    #[error("userfaultfd has no UFFDIO_MOVE: Linux 6.8 or later is needed")]
    NoMove,
    /// The trial of the userfaultfd failed.
    #[error("the userfaultfd could not be tried out")]
    Trial(#[source] io::Error),
}

impl Fds {
    /// Opens all of them.
    ///
    /// # Errors
    /// [`OpenError`] says which cannot be had, and how to get it.
    pub fn open() -> Result<Self, OpenError> {
        Self::with_userfaultfd(open_userfaultfd()?)
    }

    /// Opens all of them, the userfaultfd with `UFFD_USER_MODE_ONLY`, which needs
    /// no privilege.
    pub(super) fn open_user_mode() -> Result<Self, OpenError> {
        let user_mode_only = UserfaultfdFlags::from_bits_retain(raw::UFFD_USER_MODE_ONLY);
        // SAFETY: as in `open_userfaultfd`.
        let fd = unsafe { userfaultfd(USERFAULTFD_FLAGS | user_mode_only) };
        Self::with_userfaultfd(fd.map_err(|errno| OpenError::NoUserfaultfd(errno.into()))?)
    }

    fn with_userfaultfd(userfaultfd: OwnedFd) -> Result<Self, OpenError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let proc_file = |path: &str| open(path, flags, Mode::empty()).map_err(io::Error::from);
        Ok(Self {
            userfaultfd,
            pagemap: proc_file("/proc/self/pagemap").map_err(OpenError::NoPagemap)?,
            smaps: proc_file("/proc/self/smaps").map_err(OpenError::NoSmaps)?,
            max_map_count: max_map_count(),
        })
    }
}

/// Whose accesses to a stopped page must wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stops {
    /// Everybody's, KVM's and system calls' among them: tried out at start.
    Everybody,
    /// Those of threads in user mode. The kernel's fail.
    UserMode,
}

/// The limit on mappings of a process, if /proc tells.
fn max_map_count() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
    text.trim().parse().ok()
}

/// The kernel's side of a backend.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) uffd: Userfaultfd,
    pub(super) pagemap: Pagemap,
    pub(super) smaps: Smaps,
    /// A page that is mapped anew to find out what new mappings carry.
    pub(super) canary: Scratch,
    pub(super) max_map_count: Option<u64>,
    /// The method that was asked for.
    pub(super) asked: StopMethod,
    pub(super) claims: Claims,
    pub(super) stagings: Stagings,
}

impl Host {
    pub(super) fn new(fds: Fds, asked: StopMethod, stops: Stops) -> Result<Self, OpenError> {
        let uffd = Userfaultfd::initialise(fds.userfaultfd)
            .map_err(|errno| OpenError::NoWriteProtect(errno.into()))?;
        if asked == StopMethod::Move && !uffd.can_move() {
            return Err(OpenError::NoMove);
        }
        if stops == Stops::Everybody {
            stops_the_kernel(&uffd)?;
        }
        let canary = Scratch::new(1, Attributes::default())
            .map_err(|errno| OpenError::Trial(errno.into()))?;
        let pagemap =
            Pagemap::new(fds.pagemap).map_err(|errno| OpenError::NoPagemapScan(errno.into()))?;
        let smaps = Smaps::new(fds.smaps);
        check_address_space(canary.span(), &pagemap, &smaps)?;
        Ok(Self {
            uffd,
            pagemap,
            smaps,
            canary,
            max_map_count: fds.max_map_count,
            asked,
            claims: Claims::default(),
            stagings: Stagings::default(),
        })
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        let can_move = self.uffd.can_move();
        let stop_method = match self.asked {
            StopMethod::Auto if can_move => StopMethod::Move,
            StopMethod::Auto => StopMethod::WriteProtect,
            asked => asked,
        };
        Capabilities {
            can_move,
            stop_method,
        }
    }
}

/// What was opened before a fork or an exec tells of other memory: that nothing is out,
/// say. A page that was mapped since is known to none but the right ones.
fn check_address_space(page: Span, pagemap: &Pagemap, smaps: &Smaps) -> Result<(), OpenError> {
    mapping::advise(page, Advice::LinuxPopulateWrite)
        .map_err(|errno| OpenError::Trial(errno.into()))?;
    let mut is_mapped = false;
    let read = smaps.each(|map| {
        is_mapped = (map.start..map.end).contains(&page.address());
        match is_mapped {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    read.map_err(|errno| OpenError::NoSmaps(errno.into()))?;
    match pagemap.exclusive(page) {
        Ok(true) if is_mapped => Ok(()),
        Err(errno) => Err(OpenError::NoPagemap(errno.into())),
        Ok(_) => Err(OpenError::OtherAddressSpace),
    }
}

const USERFAULTFD_FLAGS: UserfaultfdFlags =
    UserfaultfdFlags::CLOEXEC.union(UserfaultfdFlags::NONBLOCK);

/// userfaultfd(2), or /dev/userfaultfd, whose permissions an administrator can
/// give to a group.
fn open_userfaultfd() -> Result<OwnedFd, OpenError> {
    // UFFD_USER_MODE_ONLY would make it available to anybody, and would not
    // stop KVM's accesses (design fact 13).
    let flags = USERFAULTFD_FLAGS;
    // SAFETY: a new descriptor that nobody else has; what is done with it is
    // justified where it is done.
    match unsafe { userfaultfd(flags) } {
        Ok(fd) => Ok(fd),
        Err(errno @ Errno::PERM) => userfaultfd_from_device(flags)
            .map_err(|_| OpenError::UserfaultfdNotPermitted(errno.into())),
        Err(errno) => Err(OpenError::NoUserfaultfd(errno.into())),
    }
}

fn userfaultfd_from_device(flags: UserfaultfdFlags) -> Result<OwnedFd, Errno> {
    let device = open(
        "/dev/userfaultfd",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and returns a new
    // descriptor.
    unsafe { rustix::ioctl::ioctl(&device, NewUserfaultfd(flags)) }
}

/// `USERFAULTFD_IOC_NEW`.
struct NewUserfaultfd(UserfaultfdFlags);

// SAFETY: the opcode takes its argument by value, in place of a pointer, and
// returns a descriptor that belongs to the caller.
unsafe impl rustix::ioctl::Ioctl for NewUserfaultfd {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> rustix::ioctl::Opcode {
        opcode::none(0xaa, 0)
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.0.bits() as usize)
    }

    unsafe fn output_from_ptr(
        out: rustix::ioctl::IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> Result<OwnedFd, Errno> {
        use std::os::fd::FromRawFd;
        // SAFETY: the ioctl succeeded, so this is a new descriptor of ours.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

const _: () = assert!(raw::UFFDIO == 0xaa);
