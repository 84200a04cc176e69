//! [`Engine`]: ours, with one guest.

use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::{Config, Ksm, PageIndex, RegionId, RegionOptions, SpaceId};

use crate::memory::Memory;

/// An engine with one guest.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) ksm: Ksm<LinuxBackend>,
    pub(crate) space: SpaceId,
}

/// No copies are merged again.
pub(crate) const OPTIONS: RegionOptions = RegionOptions { dma_guarded: false };

impl Engine {
    pub(crate) fn new(backend: &LinuxBackend, config: Config) -> anyhow::Result<Self> {
        let ksm = Ksm::new(backend.clone(), config)?;
        let space = ksm.create_space(ksm.create_domain()?)?;
        Ok(Self { ksm, space })
    }

    pub(crate) fn register(&self, memory: &Memory) -> anyhow::Result<RegionId> {
        let source = HostRegion::new(memory.region());
        Ok(self.ksm.register(self.space, source, OPTIONS)?)
    }

    /// Makes `memory`, which is empty, a clone.
    pub(crate) fn fork(&self, parent: RegionId, memory: &Memory) -> anyhow::Result<RegionId> {
        let source = HostRegion::new(memory.region());
        Ok(self.ksm.fork_region(parent, self.space, source, OPTIONS)?)
    }

    /// Scans until a page is merged.
    pub(crate) fn merge(&self, region: RegionId, page: PageIndex) -> anyhow::Result<()> {
        /// A page must be seen twice.
        const PASSES: u32 = 4;
        for _ in 0..PASSES {
            self.ksm.scan(u64::MAX)?;
            if self.ksm.explain(region, page)?.sharers > 0 {
                return Ok(());
            }
        }
        anyhow::bail!("page {page} is not merged after {PASSES} passes")
    }
}
