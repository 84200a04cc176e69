//! Vetting: which memory can never be merged, and what its mappings carry.

use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use procfs::FromBufRead;
use procfs::process::{MMPermissions, MemoryMap, MemoryMaps, VmFlags};
use rustix::io::Errno;

use super::host_error;
use super::mapping::Attributes;
use super::memfd::Memfd;
use super::span::Span;
use crate::error::RegisterError;
use crate::page::{PageIndex, PageRange, pages_in};
use crate::sync::Mutex;

/// A part of a region whose mappings carry the same, in the region's pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) range: PageRange,
    pub(super) attributes: Attributes,
}

/// What becomes of the pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// They are stopped and merged, as they are.
    Live,
    /// All are replaced before anybody uses them.
    Unused,
}

/// Checks every mapping of `span` and lists what each carries.
///
/// `staging` is a mapping made a moment ago: what it carries unasked, all later
/// mappings of the process will. `memfd` is what the region is declared to be
/// made of; without it, it is private anonymous memory.
pub(super) fn vet(
    smaps: &Mutex<OwnedFd>,
    span: Span,
    staging: Span,
    memfd: Option<&Memfd>,
    content: Content,
) -> Result<Vec<Part>, RegisterError> {
    let maps = read_maps(smaps)?;
    let (start, end) = (span.address(), span.address() + span.bytes());
    if memory_merge_enabled()? {
        return Err(RegisterError::Mergeable { address: start });
    }
    let future = find(&maps, staging.address());
    if future.is_some_and(|map| map.extension.vm_flags.contains(VmFlags::LO)) {
        return Err(RegisterError::Locked { address: start });
    }
    let mut parts = Vec::new();
    let mut at = start;
    while at < end {
        let map = find(&maps, at).ok_or(RegisterError::NotMapped { address: at })?;
        if map.extension.vm_flags.contains(VmFlags::HT) {
            return Err(RegisterError::HugeTlb { address: at });
        }
        match memfd {
            None => vet_private(map, at, content)?,
            Some(memfd) => memfd.vet(map, at, at - start)?,
        }
        vet_mapping(map, at)?;
        let upto = map.address.1.min(end);
        parts.push(Part {
            range: PageRange::new(PageIndex(pages_in(at - start)), pages_in(upto - at)),
            attributes: attributes_of(map),
        });
        at = upto;
    }
    if let Some(memfd) = memfd {
        memfd.vet_others(&maps, span)?;
    }
    Ok(parts)
}

fn vet_mapping(map: &MemoryMap, address: u64) -> Result<(), RegisterError> {
    let flags = map.extension.vm_flags;
    let plain = !flags.intersects(VmFlags::IO | VmFlags::PF | VmFlags::MM);
    if !plain
        || !map
            .perms
            .contains(MMPermissions::READ | MMPermissions::WRITE)
    {
        return Err(RegisterError::NotMapped { address });
    }
    if flags.contains(VmFlags::LO) {
        return Err(RegisterError::Locked { address });
    }
    if flags.contains(VmFlags::MG) {
        return Err(RegisterError::Mergeable { address });
    }
    if flags.intersects(VmFlags::UM | VmFlags::UW) {
        return Err(RegisterError::OtherUserfaultfd { address });
    }
    Ok(())
}

fn vet_private(map: &MemoryMap, address: u64, content: Content) -> Result<(), RegisterError> {
    if map.perms.contains(MMPermissions::SHARED) {
        return Err(RegisterError::Shared { address });
    }
    // Writes to such a page cannot be stopped (design fact 16).
    if map.inode != 0 && content == Content::Live {
        return Err(RegisterError::PrivateFile { address });
    }
    Ok(())
}

fn attributes_of(map: &MemoryMap) -> Attributes {
    let flags = map.extension.vm_flags;
    Attributes {
        exec: map.perms.contains(MMPermissions::EXECUTE),
        no_reserve: flags.contains(VmFlags::NR),
        dont_fork: flags.contains(VmFlags::DC),
        dont_dump: flags.contains(VmFlags::DD),
        huge: flags.contains(VmFlags::HG),
        no_huge: flags.contains(VmFlags::NH),
    }
}

/// The mapping that `address` is in. `maps` is in the order of addresses.
fn find(maps: &[MemoryMap], address: u64) -> Option<&MemoryMap> {
    let after = maps.partition_point(|map| map.address.1 <= address);
    maps.get(after).filter(|map| map.address.0 <= address)
}

/// How many mappings the process has; `None` if that cannot be read.
pub(super) fn count_mappings(smaps: &Mutex<OwnedFd>) -> Option<u64> {
    Some(read_maps(smaps).ok()?.len() as u64)
}

fn read_maps(smaps: &Mutex<OwnedFd>) -> Result<Vec<MemoryMap>, RegisterError> {
    let smaps = smaps.lock();
    let fd = smaps.as_fd();
    let reader = BufReader::with_capacity(64 << 10, FromStart { fd, at: 0 });
    let maps = MemoryMaps::from_buf_read(reader).map_err(|error| {
        host_error(
            "read of /proc/self/smaps",
            io::Error::other(error.to_string()),
        )
    })?;
    Ok(maps.0)
}

/// Reads a descriptor from its start, whatever its own position.
struct FromStart<'fd> {
    fd: BorrowedFd<'fd>,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = rustix::io::pread(self.fd, buf, self.at)?;
        self.at += read as u64;
        Ok(read)
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
