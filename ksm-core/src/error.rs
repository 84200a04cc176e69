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
    /// It is mapped shared: other mappings would not follow a merge.
    #[error(
        "guest memory at {address:#x} is a shared mapping: only private anonymous memory can be merged"
    )]
    Shared {
        /// Host address of the offending mapping.
        address: u64,
    },
    /// It is a private mapping of a file.
    #[error(
        "guest memory at {address:#x} is a private mapping of a file: copy it to anonymous memory first"
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
    /// It has more pages than a region can, or there were too many regions.
    #[error("{pages} pages are more than a region can have, or 16 million regions were made")]
    TooLarge {
        /// Its length, in pages.
        pages: u64,
    },
    /// The host failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
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
    /// A piece of memory was refused.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The host failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
