//! Vetting: which memory can never be merged, and what its mappings carry.

use std::io;
use std::ops::ControlFlow;

use rustix::io::Errno;
use rustix::mm::Advice;

use super::caps::Host;
use super::host_error;
use super::mapping::{self, Attributes};
use super::memfd::Memfd;
use super::smaps::Mapping;
use super::span::Span;
use crate::error::{BackendError, RegisterError};
use crate::page::{PageIndex, PageRange, pages_in};

/// A part of a region whose mappings carry the same, in the region's pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) range: PageRange,
    pub(super) attributes: Attributes,
    /// It is a mapping of a file.
    pub(super) of_file: bool,
}

/// What becomes of the pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// They are stopped and merged, as they are.
    Live,
    /// All are replaced before anybody uses them.
    Unused,
}

/// What the mapping of `span` carries, which is fresh: see
/// [`HostRegion::map`](super::HostRegion::map).
pub(super) fn vet_fresh(span: Span) -> Result<Vec<Part>, RegisterError> {
    let address = span.address();
    if memory_merge_enabled()? {
        return Err(RegisterError::Mergeable { address });
    }
    // Only if MCL_FUTURE was on when it was mapped: otherwise it is not locked.
    if is_locked(span.part(0, 1))? {
        return Err(RegisterError::Locked { address });
    }
    let attributes = Attributes {
        no_reserve: true,
        ..Attributes::default()
    };
    Ok(vec![Part {
        range: PageRange::new(PageIndex(0), span.pages()),
        attributes,
        of_file: false,
    }])
}

/// Checks every mapping of `span` and lists what each carries.
///
/// `memfd` is what the region is declared to be made of; without it, it is
/// private anonymous memory.
pub(super) fn vet(
    host: &Host,
    span: Span,
    memfd: Option<&Memfd>,
    content: Content,
) -> Result<Vec<Part>, RegisterError> {
    let (start, end) = (span.address(), span.address() + span.bytes());
    if memory_merge_enabled()? {
        return Err(RegisterError::Mergeable { address: start });
    }
    if locks_new_mappings(host)? {
        return Err(RegisterError::Locked { address: start });
    }
    let mut parts = Vec::new();
    let mut at = start;
    let mut verdict = Ok(());
    let read = host.smaps.each(|map| {
        if map.end > start && map.start < end && verdict.is_ok() {
            verdict = vet_one(map, at, start, memfd, content).map(|attributes| {
                let upto = map.end.min(end);
                parts.push(Part {
                    range: PageRange::new(PageIndex(pages_in(at - start)), pages_in(upto - at)),
                    attributes,
                    of_file: map.inode != 0,
                });
                at = upto;
            });
        }
        if let (Ok(()), Some(memfd)) = (&verdict, memfd) {
            verdict = memfd.vet_other(map, span);
        }
        // A memfd may be mapped anywhere else.
        if verdict.is_err() || (map.end >= end && memfd.is_none()) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    read.map_err(read_error)?;
    verdict?;
    if at < end {
        return Err(RegisterError::NotMapped { address: at });
    }
    Ok(parts)
}

/// Checks the mapping in which `at` should lie, of a region that starts at
/// `start`.
fn vet_one(
    map: &Mapping,
    at: u64,
    start: u64,
    memfd: Option<&Memfd>,
    content: Content,
) -> Result<Attributes, RegisterError> {
    if map.start > at {
        return Err(RegisterError::NotMapped { address: at });
    }
    if map.has("ht") {
        return Err(RegisterError::HugeTlb { address: at });
    }
    match memfd {
        None => vet_private(map, at, content)?,
        Some(memfd) => memfd.vet(map, at, at - start)?,
    }
    vet_mapping(map, at)?;
    Ok(attributes_of(map))
}

fn vet_mapping(map: &Mapping, address: u64) -> Result<(), RegisterError> {
    // Of a device, or without pages of its own.
    let special = ["io", "pf", "mm"].iter().any(|flag| map.has(flag));
    if special || !map.readable || !map.writable {
        return Err(RegisterError::NotMapped { address });
    }
    if map.has("lo") {
        return Err(RegisterError::Locked { address });
    }
    if map.has("mg") {
        return Err(RegisterError::Mergeable { address });
    }
    if map.has("um") || map.has("uw") {
        return Err(RegisterError::OtherUserfaultfd { address });
    }
    Ok(())
}

fn vet_private(map: &Mapping, address: u64, content: Content) -> Result<(), RegisterError> {
    if map.shared {
        return Err(RegisterError::Shared { address });
    }
    // Writes to such a page cannot be stopped (design fact 16).
    if map.inode != 0 && content == Content::Live {
        return Err(RegisterError::PrivateFile { address });
    }
    Ok(())
}

fn attributes_of(map: &Mapping) -> Attributes {
    Attributes {
        exec: map.executable,
        no_reserve: map.has("nr"),
        dont_fork: map.has("dc"),
        dont_dump: map.has("dd"),
        huge: map.has("hg"),
        no_huge: map.has("nh"),
    }
}

/// How many mappings the process has; `None` if that cannot be read.
pub(super) fn count_mappings(host: &Host) -> Option<u64> {
    let mut count = 0;
    let read = host.smaps.each(|_| {
        count += 1;
        ControlFlow::Continue(())
    });
    read.ok().map(|()| count)
}

fn read_error(errno: Errno) -> BackendError {
    host_error("read of /proc/self/smaps", errno)
}

/// Whether the process has MCL_FUTURE, so that a mapping made now is locked.
fn locks_new_mappings(host: &Host) -> Result<bool, RegisterError> {
    let canary = host.canary.span();
    mapping::map_anonymous_over(canary, Attributes::default())
        .map_err(|errno| host_error("mmap", errno))?;
    is_locked(canary)
}

/// Whether memory is locked: the kernel does not hear of such that it is cold.
fn is_locked(span: Span) -> Result<bool, RegisterError> {
    match mapping::advise(span, Advice::LinuxCold) {
        Ok(()) => Ok(false),
        Err(Errno::INVAL) => Ok(true),
        Err(errno) => Err(host_error("madvise(MADV_COLD)", errno).into()),
    }
}

/// Whether the process has PR_SET_MEMORY_MERGE, by which the kernel's KSM works
/// on every mapping to come.
fn memory_merge_enabled() -> Result<bool, RegisterError> {
    // SAFETY: PR_GET_MEMORY_MERGE takes no pointer and changes nothing.
    match unsafe { libc::prctl(libc::PR_GET_MEMORY_MERGE, 0, 0, 0, 0) } {
        -1 => match Errno::from_io_error(&io::Error::last_os_error()) {
            // A kernel without it (before 6.4, or without KSM) cannot merge.
            Some(Errno::INVAL) | None => Ok(false),
            Some(errno) => Err(host_error("prctl(PR_GET_MEMORY_MERGE)", errno).into()),
        },
        enabled => Ok(enabled != 0),
    }
}
