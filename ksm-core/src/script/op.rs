//! One operation.

use super::content::Content;
use crate::backend::sim::{Call, Failure};
#[cfg(feature = "fault-injection")]
use crate::fault::Step;
use crate::page::{PageIndex, PageRange};

/// What is to be unmerged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Everything.
    All,
    /// A space.
    Space(usize),
    /// Pages of a region.
    Pages(usize, PageRange),
}

/// One operation. Domains, spaces and regions are named by the order in which
/// they were made; an operation on one that is gone, or was never made, does
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Makes a trust domain.
    Domain,
    /// Makes a space in a domain.
    Space {
        /// The domain.
        domain: usize,
    },
    /// Registers fresh guest memory with a space.
    Register {
        /// The space.
        space: usize,
        /// Its length, in pages.
        pages: u64,
        /// Whether all DMA to it is guarded.
        guarded: bool,
    },
    /// Registers the memory of a region that was unregistered once more: as a
    /// new region.
    Again {
        /// The space.
        space: usize,
        /// The region whose memory it is.
        region: usize,
        /// Whether all DMA to it is guarded.
        guarded: bool,
    },
    /// Unregisters a region.
    Unregister {
        /// The region.
        region: usize,
    },
    /// Removes a space with its regions.
    Remove {
        /// The space.
        space: usize,
    },
    /// Forgets a domain, which is refused as long as a space is in it.
    Forget {
        /// The domain.
        domain: usize,
    },
    /// Cuts a region in two: as two new regions.
    Split {
        /// The region.
        region: usize,
        /// The first page of the second part.
        page: PageIndex,
    },
    /// Clones a region to fresh guest memory: as a new region.
    Clone {
        /// The clone's space.
        space: usize,
        /// The region.
        region: usize,
    },
    /// Moves a region to fresh guest memory: as a new region.
    Move {
        /// The region.
        region: usize,
    },
    /// Takes over fresh guest memory that a guest was restored to.
    TakeOver {
        /// The space.
        space: usize,
        /// Its length, in pages.
        pages: u64,
        /// What the first page holds; each further page holds the next content.
        content: Content,
        /// Whether all DMA to it is guarded.
        guarded: bool,
    },
    /// Drops a space with its regions and their contents.
    Drop {
        /// The space.
        space: usize,
    },
    /// Takes the frame of a page from all who share it.
    Unshare {
        /// The region.
        region: usize,
        /// The page.
        page: PageIndex,
    },
    /// The guest writes pages.
    Write {
        /// The region.
        region: usize,
        /// Its pages.
        range: PageRange,
        /// What the first of them gets.
        content: Content,
        /// Whether each further page gets the next content, or the same.
        counting: bool,
    },
    /// The guest reads pages.
    Read {
        /// The region.
        region: usize,
        /// Its pages.
        range: PageRange,
    },
    /// The embedder discards pages through the engine.
    Discard {
        /// The region.
        region: usize,
        /// Its pages.
        range: PageRange,
    },
    /// Scans.
    Scan {
        /// Pages to look at.
        budget: u64,
    },
    /// Scans until nothing changes any more. In calm weather the counters must
    /// then be those that follow from the guests' contents.
    Settle,
    /// Unmerges.
    Unmerge(Reach),
    /// Quiesces the engine, sees that it keeps still, and resumes it.
    Quiesce,
    /// Takes a pin guard: the embedder announces DMA.
    PinGuard {
        /// The region.
        region: usize,
        /// Its pages.
        range: PageRange,
    },
    /// Gives up the guards that hold any of these pages, once no device uses
    /// their pages any more.
    UnpinGuard {
        /// The region.
        region: usize,
        /// The pages.
        range: PageRange,
    },
    /// A device pins a page for DMA. In regions that are declared guarded, only
    /// where a guard announces it.
    Pin {
        /// The region.
        region: usize,
        /// The page.
        page: PageIndex,
    },
    /// Ends a pin.
    Unpin {
        /// The region.
        region: usize,
        /// The page.
        page: PageIndex,
    },
    /// The host swaps pages out.
    Swap {
        /// The region.
        region: usize,
        /// Its pages.
        range: PageRange,
    },
    /// A child comes to share pages by `fork()`.
    Fork {
        /// The region.
        region: usize,
        /// Its pages.
        range: PageRange,
    },
    /// The host makes the aligned pages around one a huge page.
    Huge {
        /// The region.
        region: usize,
        /// One of the pages.
        page: PageIndex,
    },
    /// Later calls to the host fail.
    Fail {
        /// Which kind of call.
        call: Call,
        /// How.
        failure: Failure,
        /// The first that does, 1 being the next.
        nth: u64,
        /// How many in a row.
        times: u64,
    },
    /// Limits the VMAs.
    MaxVmas {
        /// To how many.
        max: u64,
    },
    /// vCPUs write, and the host swaps and drops pages, in the middle of calls.
    Storm,
    /// Ends the storm, the failures to come, and the limit on VMAs.
    Calm,
    /// Scans everything, and panics at a step of it.
    #[cfg(feature = "fault-injection")]
    Panic {
        /// Which.
        step: Step,
    },
}
