//! Errors: what the embedder must act on. Normal results are in
//! [`outcome`](crate::outcome).

use std::io;

use thiserror::Error;

use crate::page::PageRange;
use crate::region::{DomainId, RegionId, SpaceId};

/// A call to the host that failed, as the engine sees it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The process has no virtual memory area left to spend.
    #[error("no virtual memory areas left: raise vm.max_map_count")]
    NoVmas,
    /// The host has no memory, or the limit of this process is reached.
    #[error("out of memory")]
    OutOfMemory,
    /// The address space is being changed by somebody else: try again.
    #[error("the address space is busy, try again")]
    Again,
    /// Anything else.
    #[error("{call} failed")]
    Host {
        /// The call that failed.
        call: &'static str,
        /// What it said.
        #[source]
        source: io::Error,
    },
}

/// Why a piece of memory cannot be registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The memory does not start or end at a page boundary, or is empty.
    #[error("guest memory at {address:#x}, {bytes} bytes, is not made of whole pages")]
    NotWholePages {
        /// Host address of its first byte.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// It is mapped shared, and not declared to be a memfd of this process
    /// alone: other mappings would not follow a merge.
    #[error(
        "guest memory at {address:#x} is a shared mapping, which others may have as well: if it is a memfd that is mapped here and nowhere else, say so (HostRegion::memfd_owned)"
    )]
    Shared {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// It is declared to be a memfd of this process alone, and cannot be merged
    /// as such.
    #[error("guest memory at {address:#x} is declared to be a memfd of this process alone: {why}")]
    Memfd {
        /// Host address of the offending part.
        address: u64,
        /// What is wrong with it.
        why: MemfdFault,
    },
    /// It is a private mapping of a file.
    #[error(
        "guest memory at {address:#x} is a private mapping of a file: take it over (Ksm::take_over), or copy it to anonymous memory first"
    )]
    PrivateFile {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// It is made of hugetlb pages, which cannot be split.
    #[error("guest memory at {address:#x} is hugetlb memory, whose pages cannot be merged")]
    HugeTlb {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// It is locked, so that a merged page would be copied at once.
    #[error(
        "guest memory at {address:#x} is locked (mlock, MCL_FUTURE), so that a merged page would be copied at once: unlock it"
    )]
    Locked {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// The kernel's own KSM works on it, and would lift write-protection.
    #[error(
        "guest memory at {address:#x} is MADV_MERGEABLE, or the process has PR_SET_MEMORY_MERGE: one engine at a time"
    )]
    Mergeable {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// Somebody else's userfaultfd watches it.
    #[error("guest memory at {address:#x} is registered with another userfaultfd")]
    OtherUserfaultfd {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// A part of it is not mapped, or not readable and writable.
    #[error("guest memory at {address:#x} is not mapped readable and writable")]
    NotMapped {
        /// Host address of the offending part.
        address: u64,
    },
    /// It is registered already.
    #[error("guest memory at {address:#x} overlaps memory that is registered already")]
    Overlaps {
        /// Host address of the overlap.
        address: u64,
    },
    /// It has more pages than a region can.
    #[error("{pages} pages are more than a region can have")]
    TooLarge {
        /// Its length, in pages.
        pages: u64,
    },
    /// It is to become a clone, and differs in length, or holds pages already.
    #[error(
        "memory of {pages} pages cannot become a clone of {parent}: it must be as long, and hold no page yet"
    )]
    NotLikeParent {
        /// Its length, in pages.
        pages: u64,
        /// The length of the region to be cloned.
        parent: u64,
    },
    /// Its trust domain has as many regions as it can.
    #[error("16 million regions are registered in the trust domain")]
    TooManyRegions,
    /// The host failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Why a memfd cannot be merged that is declared to be this process's alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemfdFault {
    /// The region does not say which file it is (`file_offset` of vm-memory).
    #[error("the region names no file")]
    NoFile,
    /// The file is on a disk, or has a name by which others can open it.
    #[error("its file is no memfd")]
    NotMemfd,
    /// The file ends before the region does.
    #[error("the memfd is shorter than the region")]
    Short,
    /// `F_SEAL_WRITE` or `F_SEAL_FUTURE_WRITE`, which forbid punching as well.
    #[error("the memfd is sealed against writing, so that no page of it can be freed")]
    Sealed,
    /// The descriptor cannot be written to.
    #[error("the descriptor of the memfd is not open for reading and writing")]
    ReadOnly,
    /// The region shows another file, or another part of it, or is private.
    #[error("what is mapped there is not that part of the memfd, MAP_SHARED")]
    NotMappedThere,
    /// This process maps a part of it a second time.
    #[error("a part of it is mapped at {address:#x} as well")]
    MappedTwice {
        /// Host address of the other mapping.
        address: u64,
    },
    /// The region is not declared `dma_guarded`. Pages of a memfd cannot be moved
    /// out, and nothing else finds out that a device uses one.
    #[error("it must be declared dma_guarded as well, since no host call finds DMA to it")]
    Unguarded,
}

/// An error of an engine call.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such domain, or it is gone.
    #[error("no domain {0}")]
    NoDomain(DomainId),
    /// The domain still has address spaces: remove those first.
    #[error("domain {0} still has address spaces")]
    DomainInUse(DomainId),
    /// The address space is of another trust domain.
    #[error("address space {0} is of another trust domain")]
    OtherDomain(SpaceId),
    /// There is no such address space, or it is gone.
    #[error("no address space {0}")]
    NoSpace(SpaceId),
    /// There is no such region, or it is gone.
    #[error("no region {0}")]
    NoRegion(RegionId),
    /// The range reaches past the end of its region.
    #[error("pages {range} reach past the end of region {region}, {pages} pages")]
    OutOfRange {
        /// The region.
        region: RegionId,
        /// What was asked for.
        range: PageRange,
        /// What there is.
        pages: u64,
    },
    /// Pin guards hold pages of the region ([`Ksm::pin`](crate::Ksm::pin)): a
    /// device may be using them. Drop the guards first.
    #[error("region {region} has pages in use by devices: drop its pin guards first")]
    Pinned {
        /// The region.
        region: RegionId,
    },
    /// The calling thread holds the engine still ([`Ksm::quiesce`](crate::Ksm::quiesce)).
    #[error("the engine is quiesced by this thread")]
    Quiesced,
    /// A configuration value makes no sense.
    #[error("bad configuration: {0}")]
    Config(String),
    /// Some pages are still shared, since the host refused to copy them. The
    /// call can be repeated.
    #[error("{pages} pages are still shared")]
    StillShared {
        /// How many.
        pages: u64,
        /// What the host said last.
        #[source]
        source: BackendError,
    },
    /// What was asked for takes more virtual memory areas than
    /// [`Config::max_vmas`](crate::Config::max_vmas) leaves.
    #[error(
        "{needed} more virtual memory areas are needed at the least, and of those that merging may cost {left} are left (Config::max_vmas, vm.max_map_count)"
    )]
    VmaBudget {
        /// How many it takes, as far as it was done.
        needed: u64,
        /// How many are left.
        left: u64,
    },
    /// A piece of memory was refused.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The host failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
