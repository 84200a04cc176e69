//! [`LinuxStore`]: frames in a memfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals, fstat,
    memfd_create, open,
};
use rustix::io::{Errno, pread, pwrite};

use super::host_error;
use super::window::Windows;
use crate::backend::FrameStore;
use crate::error::BackendError;
use crate::page::{FrameId, FrameRange, PAGE_SIZE, PageBuf};

/// The frames of one domain, in a memfd that grows as they are filled.
///
/// Frames are written by `pwrite`, not through a mapping: that there is no memory
/// for one is an error then, not a SIGBUS (design fact 14). To reserve them by
/// `fallocate` before would be to clear each page that is written next.
#[derive(Debug)]
pub struct LinuxStore {
    fd: OwnedFd,
    windows: Windows,
}

impl LinuxStore {
    /// Makes an empty store.
    pub(super) fn create() -> Result<Self, BackendError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = match memfd_create("ksm-store", flags | MemfdFlags::NOEXEC_SEAL) {
            // Before Linux 6.3.
            Err(Errno::INVAL) => memfd_create("ksm-store", flags),
            made => made,
        };
        Self::from_fd(fd.map_err(|errno| host_error("memfd_create", errno))?)
    }

    /// Makes a store of an empty memfd that allows sealing. What others put in
    /// it is not seen; nobody else may keep a descriptor that can be written to:
    /// guests read from it.
    ///
    /// # Errors
    /// When it cannot be sealed: it is another kind of file, or was made
    /// without `MFD_ALLOW_SEALING`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, BackendError> {
        // Not FUTURE_WRITE, which would forbid punching as well (design fact 1).
        // Not GROW: the store does.
        fcntl_add_seals(&fd, SealFlags::SHRINK)
            .map_err(|errno| host_error("fcntl(F_ADD_SEALS)", errno))?;
        // Others may have it, but only to read: see `open_read_only`.
        fchmod(&fd, Mode::RUSR).map_err(|errno| host_error("fchmod", errno))?;
        let windows = Windows::new(fd.as_fd());
        Ok(Self { fd, windows })
    }

    /// A descriptor for another process: it can map frames privately and read
    /// them, but neither write nor punch them. Nor can it open the file anew to do
    /// so, unless it is the same user's, or has `CAP_DAC_OVERRIDE`.
    ///
    /// The one call that opens something under /proc: a jailed process makes
    /// its descriptors before it goes in.
    ///
    /// # Errors
    /// When `/proc/self/fd` is not to be had.
    pub fn open_read_only(&self) -> Result<OwnedFd, BackendError> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| host_error("open of /proc/self/fd", errno))
    }

    /// The descriptor to map frames from.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl FrameStore for LinuxStore {
    fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        transfer("pwrite", PAGE_SIZE, |done| {
            let offset = frame.byte_offset() + done as u64;
            pwrite(&self.fd, &content.bytes()[done..], offset)
        })?;
        self.windows.note(self.fd(), FrameRange::one(frame), true);
        Ok(())
    }

    fn read(&self, frame: FrameId, buf: &mut PageBuf) -> Result<(), BackendError> {
        if self.windows.read(frame, buf) {
            return Ok(());
        }
        transfer("pread", PAGE_SIZE, |done| {
            let offset = frame.byte_offset() + done as u64;
            pread(&self.fd, &mut buf.bytes_mut()[done..], offset)
        })
    }

    fn punch(&self, frames: FrameRange) -> Result<(), BackendError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.windows.note(self.fd(), frames, false);
        loop {
            match fallocate(
                &self.fd,
                flags,
                frames.start.byte_offset(),
                frames.byte_len(),
            ) {
                Err(Errno::INTR) => {}
                done => return done.map_err(|errno| host_error("fallocate(PUNCH_HOLE)", errno)),
            }
        }
    }

    fn allocated_bytes(&self) -> Result<u64, BackendError> {
        /// `st_blocks` counts in these, whatever the file system's own.
        const SECTOR: u64 = 512;
        let stat = fstat(&self.fd).map_err(|errno| host_error("fstat", errno))?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * SECTOR)
    }
}

/// Repeats a short read or write until `len` bytes are through.
pub(super) fn transfer(
    call: &'static str,
    len: usize,
    mut step: impl FnMut(usize) -> Result<usize, Errno>,
) -> Result<(), BackendError> {
    let mut done = 0;
    while done < len {
        match step(done) {
            Ok(0) => {
                return Err(host_error(
                    call,
                    io::Error::from(io::ErrorKind::UnexpectedEof),
                ));
            }
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(Errno::NOMEM | Errno::NOSPC) => return Err(BackendError::OutOfMemory),
            Err(errno) => return Err(host_error(call, errno)),
        }
    }
    Ok(())
}
