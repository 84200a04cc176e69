//! Devices that read a file into guest memory, past the page tables.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use io_uring::{IoUring, opcode, types};
use ksm_core::page::{PAGE_SIZE, PAGE_SIZE_U64, PageRange};

use super::{Guest, full_of};

/// A file that is read by DMA, not through the page cache.
pub(crate) struct DirectFile(OwnedFd);

impl DirectFile {
    /// Each page of it is full of one byte.
    pub(crate) fn new(bytes: impl IntoIterator<Item = u8>) -> Self {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let nth = FILES.fetch_add(1, Ordering::Relaxed);
        let contents: Vec<u8> = bytes
            .into_iter()
            .flat_map(|b| *full_of(b).bytes())
            .collect();
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let path = dir.join(format!("dma-{}-{nth}", std::process::id()));
        std::fs::write(&path, &contents).unwrap();
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path);
        std::fs::remove_file(&path).unwrap();
        let fs = dir.display();
        let file = opened.unwrap_or_else(|error| panic!("{fs} must have O_DIRECT: {error}"));
        rustix::fs::fsync(&file).unwrap();
        let odd = rustix::io::pread(&file, &mut [0; 1], 1);
        assert!(
            odd.is_err(),
            "{fs} takes O_DIRECT and goes through the page cache: build on a disk"
        );
        Self(file.into())
    }

    /// Reads pages from `first` on into guest pages, in one call.
    pub(crate) fn read_into(&self, first: u64, guest: &Guest, range: PageRange) {
        let len = range.byte_len() as usize;
        let offset = (first * PAGE_SIZE_U64).cast_signed();
        // SAFETY: guest memory, which is never behind a Rust reference and is
        // kept mapped by `guest`.
        let read = unsafe {
            let to = guest.pointer(range.start.0).cast();
            libc::pread(self.0.as_raw_fd(), to, len, offset)
        };
        assert_eq!(
            read,
            len.cast_signed(),
            "{}",
            std::io::Error::last_os_error()
        );
    }
}

/// An io_uring that reads files into guest pages registered as its fixed
/// buffers: one a page.
pub(crate) struct Ring {
    ring: IoUring,
    guest: Guest,
    buffers: PageRange,
}

impl Ring {
    /// Pins `buffers`, until this is dropped.
    pub(crate) fn new(guest: &Guest, buffers: PageRange) -> Self {
        let depth = u32::try_from(buffers.len()).unwrap().next_power_of_two();
        let ring = IoUring::new(depth)
            .unwrap_or_else(|error| panic!("these tests need io_uring: {error}"));
        let pages: Vec<_> = buffers
            .iter()
            .map(|page| libc::iovec {
                iov_base: guest.pointer(page.0).cast(),
                iov_len: PAGE_SIZE,
            })
            .collect();
        // SAFETY: guest memory, which is never behind a Rust reference and is
        // kept mapped by the guest that is kept here.
        unsafe { ring.submitter().register_buffers(&pages) }.unwrap();
        Self {
            ring,
            guest: guest.clone(),
            buffers,
        }
    }

    /// Reads pages of the file from `first` on into the buffers, a request each,
    /// and waits for all.
    pub(crate) fn read(&mut self, file: &DirectFile, first: u64) {
        for (nth, page) in (0..).zip(self.buffers.iter()) {
            let to = self.guest.pointer(page.0);
            let read = opcode::ReadFixed::new(
                types::Fd(file.0.as_raw_fd()),
                to,
                PAGE_SIZE as u32,
                u16::try_from(nth).unwrap(),
            );
            let read = read.offset((first + nth) * PAGE_SIZE_U64).build();
            // SAFETY: the buffer is registered, and the file is open until the
            // request is through, for which this waits.
            unsafe { self.ring.submission().push(&read) }.unwrap();
        }
        let count = self.buffers.len() as usize;
        self.ring.submit_and_wait(count).unwrap();
        let results: Vec<_> = self.ring.completion().map(|done| done.result()).collect();
        assert_eq!(results, vec![4096; count]);
    }
}

impl Drop for Ring {
    /// Nothing is under way; the pins go now.
    fn drop(&mut self) {
        self.ring.submitter().unregister_buffers().unwrap();
    }
}
