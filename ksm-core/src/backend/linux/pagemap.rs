//! [`Pagemap`]: what the kernel's page tables say (`/proc/self/pagemap`).

use std::os::fd::OwnedFd;

use linux_raw_sys::general as raw;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};

use super::span::Span;
use crate::page::{PAGE_SHIFT, pages_in};

// Not in linux-raw-sys: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<raw::pm_scan_arg>(b'f', 16);

/// Runs that one call of the kernel can report.
const RUNS_PER_CALL: usize = 128;

/// Bit 56 of a pagemap entry: the page is mapped here and nowhere else.
const PM_MMAP_EXCLUSIVE: u64 = 1 << 56;
/// Bit 63 of a pagemap entry: the page is present.
const PM_PRESENT: u64 = 1 << 63;

/// What PAGEMAP_SCAN says of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Categories(u64);

impl Categories {
    const ASKED: u32 = raw::PAGE_IS_PRESENT
        | raw::PAGE_IS_SWAPPED
        | raw::PAGE_IS_FILE
        | raw::PAGE_IS_PFNZERO
        | raw::PAGE_IS_HUGE
        | raw::PAGE_IS_WRITTEN;

    const fn has(self, bit: u32) -> bool {
        self.0 & (bit as u64) != 0
    }

    /// Swapped out, or moving, or nothing but a write-protect marker.
    pub(super) const fn swapped(self) -> bool {
        self.has(raw::PAGE_IS_SWAPPED)
    }

    /// A page of a file, not a copy of one.
    pub(super) const fn file(self) -> bool {
        self.has(raw::PAGE_IS_FILE)
    }

    /// The host's page of zeros.
    pub(super) const fn zero(self) -> bool {
        self.has(raw::PAGE_IS_PFNZERO)
    }

    /// Part of a huge page.
    pub(super) const fn huge(self) -> bool {
        self.has(raw::PAGE_IS_HUGE)
    }

    /// Not write-protected.
    pub(super) const fn written(self) -> bool {
        self.has(raw::PAGE_IS_WRITTEN)
    }
}

/// Neighbouring populated pages of the same categories.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The first page, counted from the start of the span that was scanned.
    pub(super) first: u64,
    /// How many.
    pub(super) pages: u64,
    /// What they are.
    pub(super) is: Categories,
}

/// The open page map of this process.
#[derive(Debug)]
pub(super) struct Pagemap {
    fd: OwnedFd,
}

impl Pagemap {
    /// Takes a descriptor of `/proc/self/pagemap` and tries it.
    ///
    /// # Errors
    /// `ENOTTY` when the kernel has no PAGEMAP_SCAN.
    pub(super) fn new(fd: OwnedFd) -> Result<Self, Errno> {
        let pagemap = Self { fd };
        let mut arg = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: 0,
            start: 0,
            end: 0,
            walk_end: 0,
            vec: 0,
            vec_len: 0,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: 0,
            return_mask: 0,
        };
        pagemap.call(&mut arg).map(|_| pagemap)
    }

    /// Calls `each` for the populated runs of `span`, in order, until
    /// `max_pages` pages were seen. Returns how many pages of the span have
    /// been looked at: all of them, unless the limit was met.
    pub(super) fn populated(
        &self,
        span: Span,
        max_pages: u64,
        mut each: impl FnMut(Run),
    ) -> Result<u64, Errno> {
        let end = span.address() + span.bytes();
        let mut at = span.address();
        let mut left = max_pages;
        while at < end && left > 0 {
            let mut runs = [raw::page_region {
                start: 0,
                end: 0,
                categories: 0,
            }; RUNS_PER_CALL];
            let mut arg = raw::pm_scan_arg {
                size: size_of::<raw::pm_scan_arg>() as u64,
                flags: 0,
                start: at,
                end,
                walk_end: 0,
                vec: runs.as_mut_ptr().expose_provenance() as u64,
                vec_len: RUNS_PER_CALL as u64,
                max_pages: left,
                category_inverted: 0,
                category_mask: 0,
                category_anyof_mask: u64::from(raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED),
                return_mask: u64::from(Categories::ASKED),
            };
            let count = self.call(&mut arg)?;
            for run in &runs[..count] {
                let pages = pages_in(run.end - run.start);
                left -= pages.min(left);
                each(Run {
                    first: pages_in(run.start - span.address()),
                    pages,
                    is: Categories(run.categories),
                });
            }
            at = arg.walk_end;
        }
        Ok(pages_in(at - span.address()))
    }

    /// Whether the first page of `span` is present and mapped by this process
    /// alone.
    pub(super) fn exclusive(&self, span: Span) -> Result<bool, Errno> {
        let mut entry = [0; 8];
        let offset = (span.address() >> PAGE_SHIFT) * 8;
        let read = rustix::io::pread(&self.fd, &mut entry, offset)?;
        let entry = u64::from_ne_bytes(entry);
        Ok(read == 8 && entry & PM_PRESENT != 0 && entry & PM_MMAP_EXCLUSIVE != 0)
    }

    fn call(&self, arg: &mut raw::pm_scan_arg) -> Result<usize, Errno> {
        // SAFETY: PAGEMAP_SCAN takes this struct and writes at most `vec_len`
        // regions at `vec`, which is an array of that many in `populated` and
        // of none in `new`. Without flags it changes nothing else.
        unsafe { rustix::ioctl::ioctl(&self.fd, Scan(arg)) }
    }
}

/// PAGEMAP_SCAN, whose result is a count.
struct Scan<'a>(&'a mut raw::pm_scan_arg);

// SAFETY: the opcode is the one that takes a `pm_scan_arg`, `as_ptr` points to
// one that outlives the call, and the kernel writes to it (`IS_MUTATING`).
unsafe impl rustix::ioctl::Ioctl for Scan<'_> {
    type Output = usize;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        PAGEMAP_SCAN
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(
        out: rustix::ioctl::IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> Result<usize, Errno> {
        usize::try_from(out).map_err(|_| Errno::OVERFLOW)
    }
}
