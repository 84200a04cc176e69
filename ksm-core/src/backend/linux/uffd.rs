//! [`Userfaultfd`]: the ioctls of one userfaultfd, with their errors named.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general as raw;
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::span::Span;
use crate::page::pages_in;

// Not in linux-raw-sys: `_IOWR(UFFDIO, _UFFDIO_MOVE, struct uffdio_move)`.
const UFFDIO_MOVE: Opcode = opcode::read_write::<raw::uffdio_move>(0xaa, 0x05);
const _: () = assert!(raw::UFFDIO == 0xaa && raw::_UFFDIO_MOVE == 0x05);

/// Write-protection that is noticed by the kernel's own accesses too, and that
/// stops the pages of a range that are not there yet (design fact 3).
const WRITE_PROTECT: u32 = raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP | raw::UFFD_FEATURE_WP_UNPOPULATED;

/// What a registered range waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Writes to write-protected pages.
    WriteProtect,
    /// Any access to a page that is absent.
    Missing,
    /// Both.
    Both,
}

impl Mode {
    fn bits(self) -> u64 {
        u64::from(match self {
            Self::WriteProtect => raw::UFFDIO_REGISTER_MODE_WP,
            Self::Missing => raw::UFFDIO_REGISTER_MODE_MISSING,
            Self::Both => raw::UFFDIO_REGISTER_MODE_WP | raw::UFFDIO_REGISTER_MODE_MISSING,
        })
    }
}

/// Why a `UFFDIO_MOVE` went no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MoveStop {
    /// The next page is absent, or one of the ranges is not mapped.
    Hole,
    /// The next page is pinned, or shared since a fork.
    Busy,
    /// The address space was changing.
    Again,
    /// A range crosses the border of a mapping, or its mapping does not allow it.
    Unfit,
    /// The next page's place is taken.
    Occupied,
    /// No memory for page tables.
    NoMemory,
    /// Anything else.
    Other(Errno),
}

/// What a `UFFDIO_MOVE` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moved {
    /// Pages that were moved: the first ones.
    pub(super) pages: u64,
    /// Why not all, unless all were.
    pub(super) stop: Option<MoveStop>,
}

/// An initialised userfaultfd.
#[derive(Debug)]
pub(super) struct Userfaultfd {
    fd: OwnedFd,
    can_move: bool,
}

impl Userfaultfd {
    /// Agrees with the kernel on what `fd` is used for.
    ///
    /// # Errors
    /// `EINVAL` when the kernel lacks write-protection of absent pages, or the
    /// descriptor was in use already.
    pub(super) fn initialise(fd: OwnedFd) -> Result<Self, Errno> {
        let with_move = handshake(fd.as_fd(), WRITE_PROTECT | raw::UFFD_FEATURE_MOVE);
        match with_move {
            Ok(()) => Ok(Self { fd, can_move: true }),
            // A refused handshake leaves the descriptor as it was.
            Err(Errno::INVAL) => handshake(fd.as_fd(), WRITE_PROTECT).map(|()| Self {
                fd,
                can_move: false,
            }),
            Err(errno) => Err(errno),
        }
    }

    /// Whether the kernel has `UFFDIO_MOVE`.
    pub(super) fn can_move(&self) -> bool {
        self.can_move
    }

    /// The descriptor, to be polled.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Puts `span` under this userfaultfd.
    ///
    /// # Errors
    /// `ENOMEM` when mappings would have to be split and none is left, `EBUSY`
    /// when another userfaultfd has it. A part of the span may be registered.
    pub(super) fn register(&self, span: Span, mode: Mode) -> Result<(), Errno> {
        let mut arg = raw::uffdio_register {
            range: range_of(span),
            mode: mode.bits(),
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER takes this struct; it changes no memory but
        // the struct.
        unsafe { self.call::<UFFDIO_REGISTER, _>(&mut arg) }
    }

    /// Takes `span` out again, and wakes whoever waits in it. Parts that are
    /// not registered are no error.
    pub(super) fn unregister(&self, span: Span) -> Result<(), Errno> {
        let mut arg = range_of(span);
        // SAFETY: UFFDIO_UNREGISTER takes this struct and changes no memory.
        unsafe { self.call::<UFFDIO_UNREGISTER, _>(&mut arg) }
    }

    /// Wakes whoever waits in `span`, whatever is mapped there by now.
    pub(super) fn wake(&self, span: Span) {
        let mut arg = range_of(span);
        // SAFETY: UFFDIO_WAKE takes this struct and changes no memory.
        let woken = unsafe { self.call::<UFFDIO_WAKE, _>(&mut arg) };
        debug_assert_eq!(woken, Ok(()), "only a malformed range is refused");
    }

    /// Write-protects `span`, or lifts that and wakes whoever waits.
    ///
    /// # Errors
    /// `ENOENT` at the first part that is not registered: the parts before it
    /// are done, but nobody in them has been woken (design fact 5).
    pub(super) fn write_protect(&self, span: Span, on: bool) -> Result<(), Errno> {
        loop {
            let mut arg = raw::uffdio_writeprotect {
                range: range_of(span),
                mode: u64::from(on), // UFFDIO_WRITEPROTECT_MODE_WP is bit 0.
            };
            // SAFETY: UFFDIO_WRITEPROTECT takes this struct; it changes who may
            // write, not what is written.
            match unsafe { self.call::<UFFDIO_WRITEPROTECT, _>(&mut arg) } {
                Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
                done => return done,
            }
        }
    }

    /// Moves the pages of `from` to the absent pages of `to`, which is
    /// registered here, and wakes whoever waited for them there.
    pub(super) fn move_pages(&self, to: Span, from: Span) -> Moved {
        debug_assert_eq!(to.pages(), from.pages());
        let mut arg = raw::uffdio_move {
            dst: to.address(),
            src: from.address(),
            len: from.bytes(),
            mode: 0,
            move_: 0,
        };
        // SAFETY: UFFDIO_MOVE takes this struct. It takes pages away from
        // `from` and puts them at `to`; both are in our care (see `Span`).
        let called = unsafe { self.call::<UFFDIO_MOVE, _>(&mut arg) };
        // The field counts what is done, and holds an error only if nothing is.
        let pages = u64::try_from(arg.move_).map_or(0, pages_in);
        let stop = match called {
            _ if pages == from.pages() => None,
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => Some(MoveStop::Again),
            Err(Errno::NOENT) => Some(MoveStop::Hole),
            Err(Errno::BUSY) => Some(MoveStop::Busy),
            Err(Errno::INVAL) => Some(MoveStop::Unfit),
            Err(Errno::EXIST) => Some(MoveStop::Occupied),
            Err(Errno::NOMEM) => Some(MoveStop::NoMemory),
            Err(errno) => Some(MoveStop::Other(errno)),
        };
        Moved { pages, stop }
    }

    /// Copies the page `from` to the absent page `to`, which is registered
    /// here, and wakes whoever waited for it.
    pub(super) fn copy_page(&self, to: Span, from: Span) -> Result<(), Errno> {
        debug_assert_eq!((to.pages(), from.pages()), (1, 1));
        let mut arg = raw::uffdio_copy {
            dst: to.address(),
            src: from.address(),
            len: from.bytes(),
            mode: 0,
            copy: 0,
        };
        // SAFETY: UFFDIO_COPY takes this struct. It reads `from` and fills an
        // absent page at `to`; both are in our care (see `Span`).
        unsafe { self.call::<UFFDIO_COPY, _>(&mut arg) }
    }

    /// Maps the host's page of zeros at an absent page, which is registered here.
    /// Gives its mapping an `anon_vma` in any case.
    ///
    /// # Errors
    /// `EEXIST` when the page is not absent.
    pub(super) fn zero_page(&self, page: Span) -> Result<(), Errno> {
        debug_assert_eq!(page.pages(), 1);
        let mut arg = raw::uffdio_zeropage {
            range: range_of(page),
            mode: 0,
            zeropage: 0,
        };
        // SAFETY: UFFDIO_ZEROPAGE takes this struct. It fills an absent page,
        // which reads as zero anyway.
        unsafe { self.call::<UFFDIO_ZEROPAGE, _>(&mut arg) }
    }

    /// # Safety
    /// `OPCODE` takes a `T` and does nothing to memory that its caller has not
    /// accounted for.
    unsafe fn call<const OPCODE: Opcode, T>(&self, arg: &mut T) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        unsafe { ioctl(&self.fd, Updater::<OPCODE, T>::new(arg)) }
    }
}

fn handshake(fd: BorrowedFd<'_>, features: u32) -> Result<(), Errno> {
    let mut arg = raw::uffdio_api {
        api: u64::from(raw::UFFD_API),
        features: u64::from(features),
        ioctls: 0,
    };
    // SAFETY: UFFDIO_API takes this struct and changes no memory but the struct.
    unsafe { ioctl(fd, Updater::<UFFDIO_API, _>::new(&mut arg)) }
}

fn range_of(span: Span) -> raw::uffdio_range {
    raw::uffdio_range {
        start: span.address(),
        len: span.bytes(),
    }
}
