//! The two sides of `peer unmerge`.

use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kernel_ksm::{KernelKsm, count};
use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::{Config, Ksm, RegionId, RegionOptions, SpaceId, Target};

use crate::host::{Host, PAGES_TO_SCAN};
use crate::memory::Memory;

/// How often ksmd's counters are looked at.
const GLANCE: Duration = Duration::from_millis(5);

/// Merges, and unmerges.
pub(super) trait Side {
    /// Merges the pages `filled` of `memory`, with one another or with `twin`,
    /// until `merged` pages are: those of both. Then all of `memory` may be
    /// merged, and nothing is any more.
    fn merge(
        &mut self,
        memory: &Memory,
        twin: &Memory,
        filled: Range<usize>,
        merged: usize,
        limit: Duration,
    ) -> anyhow::Result<()>;

    /// Unmerges all of `memory`, and says how long that took.
    fn unmerge(&self, memory: &Memory) -> anyhow::Result<Duration>;

    /// Leaves nothing merged.
    fn end(&self) -> anyhow::Result<()>;
}

/// An engine with one guest.
pub(super) struct Ours {
    ksm: Ksm<LinuxBackend>,
    space: SpaceId,
    region: Option<RegionId>,
}

impl Ours {
    pub(super) fn new(host: &Host) -> anyhow::Result<Self> {
        let ksm = Ksm::new(host.backend.clone(), Config::default())?;
        let space = ksm.create_space(ksm.create_domain()?)?;
        Ok(Self {
            ksm,
            space,
            region: None,
        })
    }

    fn register(&self, memory: &Memory) -> anyhow::Result<RegionId> {
        let source = HostRegion::new(memory.region());
        let options = RegionOptions::default();
        Ok(self.ksm.register(self.space, source, options)?)
    }
}

impl Side for Ours {
    fn merge(
        &mut self,
        memory: &Memory,
        twin: &Memory,
        _: Range<usize>,
        merged: usize,
        limit: Duration,
    ) -> anyhow::Result<()> {
        self.region = Some(self.register(memory)?);
        if twin.first_page() != memory.first_page() {
            self.register(twin)?;
        }
        let began = Instant::now();
        while self.ksm.space_stats(self.space)?.ksm_merging_pages < merged as u64 {
            if began.elapsed() > limit {
                bail!("not merged within {} s", limit.as_secs());
            }
            self.ksm.scan(PAGES_TO_SCAN)?;
        }
        Ok(())
    }

    fn unmerge(&self, memory: &Memory) -> anyhow::Result<Duration> {
        let region = self.region.context("merged before it is unmerged")?;
        let pages = memory.pages() as u64;
        let all = ksm_core::PageRange::new(ksm_core::PageIndex(0), pages);
        let began = Instant::now();
        self.ksm.unmerge(Target::Pages(region, all))?;
        Ok(began.elapsed())
    }

    fn end(&self) -> anyhow::Result<()> {
        Ok(self.ksm.remove_space(self.space)?)
    }
}

/// ksmd, with this process as its only guest.
pub(super) struct Kernel<'h> {
    ksmd: &'h KernelKsm,
}

impl<'h> Kernel<'h> {
    pub(super) fn new(host: &'h Host) -> anyhow::Result<Self> {
        Host::wait_for_ksmd()?;
        Ok(Self { ksmd: &host.ksmd })
    }
}

impl Side for Kernel<'_> {
    fn merge(
        &mut self,
        memory: &Memory,
        twin: &Memory,
        filled: Range<usize>,
        merged: usize,
        limit: Duration,
    ) -> anyhow::Result<()> {
        // Were all of it mergeable, ksmd would have to find its way through it.
        memory.mergeable(filled.start, filled.len())?;
        if twin.first_page() != memory.first_page() {
            twin.mergeable(0, twin.pages())?;
        }
        let began = Instant::now();
        self.ksmd.start()?;
        while count("pages_sharing")? + count("pages_shared")? < merged as u64 {
            if began.elapsed() > limit {
                bail!("ksmd has not merged it within {} s", limit.as_secs());
            }
            sleep(GLANCE);
        }
        self.ksmd.stop()?;
        memory.mergeable(0, memory.pages())
    }

    fn unmerge(&self, memory: &Memory) -> anyhow::Result<Duration> {
        let began = Instant::now();
        memory.unmergeable()?;
        Ok(began.elapsed())
    }

    fn end(&self) -> anyhow::Result<()> {
        self.ksmd.unmerge()
    }
}
