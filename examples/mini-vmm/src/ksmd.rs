//! [`Ksmd`]: the kernel's own KSM in the engine's place.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kernel_ksm::{KernelKsm, PageIs, PageMap, Totals, count, set, setting};
use ksm_core::page::{PAGE_SIZE, bytes_in, pages_in};
use ksm_core::{MemoryStats, Stats};
use ksm_vmm_glue::Pacing;
use vm_memory::{
    GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, MemoryRegionAddress,
};

use crate::kvm_slots::{advise_mergeable, advise_unmergeable};

/// A page must be seen twice, and its equal in the same pass.
const QUIET_PASSES: u64 = 4;
/// How long ksmd may take to come to rest.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often it is looked at meanwhile.
const GLANCE: Duration = Duration::from_millis(20);

/// The host's ksmd, at work for this process alone.
#[derive(Debug)]
pub(crate) struct Ksmd {
    host: KernelKsm,
    guests: Vec<GuestMemoryMmap>,
    pacing: Pacing,
    /// What the counters that only grow stood at.
    at_start: Totals,
}

impl Ksmd {
    /// Makes this memory of all guests mergeable, and sets ksmd up. It does not
    /// run yet.
    pub(crate) fn new(guests: Vec<GuestMemoryMmap>, pacing: Pacing) -> anyhow::Result<Self> {
        let host = KernelKsm::take(&[])?;
        set("use_zero_pages", "1")?;
        set("pages_to_scan", &pacing.pages_to_scan.to_string())?;
        set("sleep_millisecs", &pacing.sleep_millisecs.to_string())?;
        for memory in &guests {
            advise_mergeable(memory).context("MADV_MERGEABLE")?;
        }
        Ok(Self {
            host,
            guests,
            pacing,
            at_start: Totals::now()?,
        })
    }

    /// Lets ksmd run.
    pub(crate) fn start(&self) -> anyhow::Result<()> {
        self.host.start()
    }

    /// Waits until ksmd finds nothing more to merge, at its full speed, then
    /// stops it. What is merged stays so.
    pub(crate) fn settle(&self) -> anyhow::Result<()> {
        let eager = self.pacing.pages_to_scan.max(1 << 16);
        set("pages_to_scan", &eager.to_string())?;
        set("sleep_millisecs", "0")?;
        // It leaves pages out of up to eight passes, so that two equal ones need
        // never be looked at in the same.
        if setting("smart_scan").is_ok() {
            set("smart_scan", "0")?;
        }
        let begin = Instant::now();
        let (mut seen, mut since) = (None, count("full_scans")?);
        while count("full_scans")? < since + QUIET_PASSES {
            if begin.elapsed() > PATIENCE {
                bail!(
                    "ksmd still finds pages to merge after {} s",
                    PATIENCE.as_secs()
                );
            }
            let now = Some((count("pages_sharing")?, count("ksm_zero_pages")?));
            if now != seen {
                (seen, since) = (now, count("full_scans")?);
            }
            sleep(GLANCE);
        }
        self.host.stop()
    }

    /// Takes back what was merged, and gives the host its settings back: the guests'
    /// memory is their own then, and another engine may have it.
    pub(crate) fn undo(self) -> anyhow::Result<()> {
        for memory in &self.guests {
            advise_unmergeable(memory).context("MADV_UNMERGEABLE")?;
        }
        Ok(())
    }

    /// Its counters, under the engine's names, which are the kernel's.
    pub(crate) fn stats(&self) -> anyhow::Result<Stats> {
        let totals = Totals::now()?.since(self.at_start);
        let mut stats = Stats::default();
        stats.pages_shared = count("pages_shared")?;
        stats.pages_sharing = count("pages_sharing")?;
        stats.pages_unshared = count("pages_unshared")?;
        stats.pages_volatile = count("pages_volatile")?;
        // The kernel counts the first page of a chain as well.
        let dups = count("stable_node_dups")?;
        stats.stable_node_dups = dups.saturating_sub(count("stable_node_chains")?);
        stats.ksm_zero_pages = count("ksm_zero_pages")?;
        stats.pages_scanned = totals.pages_scanned;
        stats.full_scans = totals.full_scans;
        stats.cow_breaks = totals.cow_breaks;
        let profit: i64 = setting("general_profit")?.parse()?;
        let spent = stats.saved_bytes().cast_signed() - profit;
        stats.metadata_bytes = u64::try_from(spent).unwrap_or(0);
        Ok(stats)
    }

    /// Counters of one guest, page by page as the page map has them (mappings of
    /// neighbouring guests are one in `/proc/self/smaps`).
    pub(crate) fn guest_stats(&self, index: usize) -> anyhow::Result<MemoryStats> {
        let memory = &self.guests[index];
        let page_map = PageMap::open()?;
        let mut stats = MemoryStats::default();
        stats.pages = memory.iter().map(|region| pages_in(region.len())).sum();
        for region in memory.iter() {
            let start = region.get_host_address(MemoryRegionAddress(0))?.addr();
            for page in page_map.look(start / PAGE_SIZE, region.size() / PAGE_SIZE)? {
                // Nothing but ksmd makes zero pages of what guests have filled.
                stats.ksm_zero_pages += u64::from(page == PageIs::Zero);
                stats.ksm_merging_pages += u64::from(page == PageIs::Ksm);
            }
        }
        Ok(stats)
    }

    /// What `RssAnon` counts too much: a merged page counts in it once for each
    /// of its mappings.
    pub(crate) fn counted_twice_bytes() -> anyhow::Result<u64> {
        Ok(bytes_in(count("pages_sharing")?))
    }

    /// Processor time that ksmd has used since the host was started.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        self.host.cpu_time()
    }
}
