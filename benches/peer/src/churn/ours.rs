//! Our side of `peer churn`.

use std::time::{Duration, Instant};

use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::page::{PageIndex, PageRange};
use ksm_core::{Config, Ksm, LockPolicy, PAGE_SIZE, RegionId, RegionOptions, SpaceId};
use vm_memory::{Bytes as _, GuestAddress, MemoryRegionAddress};

use super::load::Hotplug;
use super::{CHURN_PAGES, Merging, Progress};
use crate::cpu::{self, Share};
use crate::figures::Figures;
use crate::host::{Host, PAGES_TO_SCAN};
use crate::memory::Memory;

/// What churners map.
const ALL_CHURN: PageRange = PageRange {
    start: PageIndex(0),
    end: PageIndex(CHURN_PAGES as u64),
};
/// The calling thread.
const MYSELF: &str = "/proc/thread-self";

/// An engine with one guest.
pub(super) struct Ours {
    ksm: Ksm<LinuxBackend>,
    space: SpaceId,
    region: RegionId,
    pages: u64,
    /// The scanner's priority is ksmd's.
    nice: i32,
}

impl Ours {
    pub(super) fn new(host: &Host, policy: LockPolicy, memory: &Memory) -> anyhow::Result<Self> {
        let config = Config {
            lock_policy: policy,
            // ksmd has one thread.
            parallel_pages: u32::MAX,
            ..Config::default()
        };
        let ksm = Ksm::new(host.backend.clone(), config)?;
        let space = ksm.create_space(ksm.create_domain()?)?;
        let source = HostRegion::new(memory.region());
        let region = ksm.register(space, source, RegionOptions::default())?;
        Ok(Self {
            ksm,
            space,
            region,
            pages: memory.pages() as u64,
            nice: host.ksmd.nice()?,
        })
    }
}

impl Hotplug for Ours {
    fn change(&self, word: u64) -> anyhow::Result<()> {
        let (memory, source) = HostRegion::map::<()>(GuestAddress(0), CHURN_PAGES * PAGE_SIZE)?;
        let region = self
            .ksm
            .register(self.space, source, RegionOptions::default())?;
        memory.write_obj(word, MemoryRegionAddress(0))?;
        // As ksm-vmm-glue's hotplug does with memory whose content nobody wants. Its
        // pages go without the lock of the address space, where `munmap` flushes
        // their translations under it.
        self.ksm.discard(region, ALL_CHURN)?;
        Ok(self.ksm.unregister(region)?)
    }
}

impl Merging for Ours {
    fn merge(&self, limit: Duration) -> anyhow::Result<Figures> {
        cpu::set_nice(self.nice)?;
        let (share, process) = (Share::of(MYSELF)?, cpu::of_process());
        let began = Instant::now();
        let mut progress = Progress::default();
        loop {
            let report = self.ksm.scan(PAGES_TO_SCAN)?;
            progress.pages_scanned += report.pages_scanned;
            progress.deferred += report.regions_deferred + report.regions_skipped;
            progress.merged = self.ksm.region_stats(self.region)?.ksm_merging_pages;
            if progress.merged == self.pages || began.elapsed() > limit {
                break;
            }
            progress.passes += report.passes;
        }
        progress.seconds = began.elapsed();
        progress.scanner = Share::of(MYSELF)?.since(share);
        progress.cpu = cpu::of_process() - process;
        Ok(progress.figures())
    }

    fn end(&self) -> anyhow::Result<()> {
        Ok(self.ksm.unregister(self.region)?)
    }
}
