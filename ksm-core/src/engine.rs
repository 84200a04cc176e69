//! [`Ksm`]: the engine, and all control flow.

use std::thread::ThreadId;

use crate::backend::{Backend, RegionOptions};
use crate::config::Config;
use crate::error::Error;
use crate::outcome::Outcome;
use crate::page::{PageIndex, PageRange};
use crate::region::{DomainId, RegionId, SpaceId};
use crate::stats::{MemoryStats, ScanReport, Stats};

/// What an unmerge is to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Everything.
    All,
    /// One guest.
    Space(SpaceId),
    /// Some pages of one region.
    Pages(RegionId, PageRange),
}

/// What is known of one page: see [`Ksm::explain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// What became of the page when a pass last looked at it.
    pub outcome: Outcome,
    /// How many pages, this one among them, share its frame; 0 if it is not merged.
    pub sharers: u64,
    /// Whether it was merged, was written to since, and stands over a frame's mapping.
    pub copied: bool,
}

/// The engine.
#[derive(Debug)]
pub struct Ksm<B: Backend> {
    backend: B,
}

/// Nothing is stopped or out, and nothing will be, while this lives.
#[derive(Debug)]
pub struct Quiesced<'a, B: Backend> {
    ksm: &'a Ksm<B>,
}

#[allow(unused_variables, missing_docs, clippy::missing_errors_doc)]
impl<B: Backend> Ksm<B> {
    pub fn new(backend: B, config: Config) -> Result<Self, Error> {
        todo!()
    }
    pub fn create_domain(&self) -> Result<DomainId, Error> {
        todo!()
    }
    pub fn create_space(&self, domain: DomainId) -> Result<SpaceId, Error> {
        todo!()
    }
    pub fn register(
        &self,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<RegionId, Error> {
        todo!()
    }
    /// Unmerges, gives the mappings back, and forgets the region.
    pub fn unregister(&self, region: RegionId) -> Result<(), Error> {
        todo!()
    }
    pub fn remove_space(&self, space: SpaceId) -> Result<(), Error> {
        todo!()
    }
    pub fn scan(&self, budget: u64) -> Result<ScanReport, Error> {
        todo!()
    }
    /// Returns how many pages stopped being shared.
    pub fn unmerge(&self, target: Target) -> Result<u64, Error> {
        todo!()
    }
    pub fn discard(&self, region: RegionId, range: PageRange) -> Result<(), Error> {
        todo!()
    }
    pub fn quiesce(&self) -> Result<Quiesced<'_, B>, Error> {
        todo!()
    }
    /// Ends what a thread that is gone (killed, not unwound) had under way.
    /// Returns how many leases it held.
    pub fn recover(&self, dead: ThreadId) -> u64 {
        todo!()
    }
    pub fn stats(&self) -> Stats {
        todo!()
    }
    pub fn domain_stats(&self, domain: DomainId) -> Result<Stats, Error> {
        todo!()
    }
    pub fn space_stats(&self, space: SpaceId) -> Result<MemoryStats, Error> {
        todo!()
    }
    pub fn region_stats(&self, region: RegionId) -> Result<MemoryStats, Error> {
        todo!()
    }
    /// Bytes that the stores of all domains hold.
    pub fn store_bytes(&self) -> Result<u64, Error> {
        todo!()
    }
    pub fn explain(&self, region: RegionId, page: PageIndex) -> Result<Explanation, Error> {
        todo!()
    }
    /// Checks that trees, records and store agree with one another: for tests.
    pub fn check(&self) -> Result<(), String> {
        todo!()
    }
}
