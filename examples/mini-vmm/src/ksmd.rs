//! [`Ksmd`]: the kernel's own KSM in the engine's place, driven through
//! `/sys/kernel/mm/ksm`
//! (`Documentation/admin-guide/mm/ksm.rst`).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ksm_core::page::{PAGE_SIZE, bytes_in, pages_in};
use ksm_core::{MemoryStats, Stats};
use ksm_vmm_glue::Pacing;
use procfs::PhysicalPageFlags;
use procfs::process::{MemoryPageFlags, PageInfo, Process, all_processes};
use vm_memory::{
    GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, MemoryRegionAddress,
};

use crate::keeper::Keeper;
use crate::kvm_slots::{advise_mergeable, advise_unmergeable};

const SYSFS: &str = "/sys/kernel/mm/ksm";
/// A page must be seen twice, and its equal in the same pass.
const QUIET_PASSES: u64 = 4;
/// How long ksmd may take to come to rest.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often it is looked at meanwhile.
const GLANCE: Duration = Duration::from_millis(20);

/// The host's ksmd, at work for this process alone.
#[derive(Debug)]
pub(crate) struct Ksmd {
    /// Gives the host its settings back.
    _keeper: Keeper,
    guests: Vec<GuestMemoryMmap>,
    pacing: Pacing,
    /// What the counters that only grow stood at.
    at_start: Totals,
}

/// Counters that only grow.
#[derive(Clone, Copy, Debug)]
struct Totals {
    pages_scanned: u64,
    full_scans: u64,
    cow_breaks: u64,
}

impl Totals {
    fn now() -> anyhow::Result<Self> {
        Ok(Self {
            pages_scanned: count("pages_scanned")?,
            full_scans: count("full_scans")?,
            cow_breaks: procfs::vmstat()
                .context("/proc/vmstat")?
                .get("cow_ksm")
                .map_or(0, |n| n.cast_unsigned()),
        })
    }
}

impl Ksmd {
    /// Makes this memory of all guests mergeable, and sets ksmd up. It does not
    /// run yet.
    pub(crate) fn new(guests: Vec<GuestMemoryMmap>, pacing: Pacing) -> anyhow::Result<Self> {
        for name in ["pages_shared", "pages_unshared", "ksm_zero_pages"] {
            let pages = count(name)?;
            if pages > 0 {
                bail!(
                    "the kernel merges other memory on this host ({name} is {pages}), which would be in the figures. If nobody needs that, do `echo 2 > {SYSFS}/run` as root."
                );
            }
        }
        let keeper = Keeper::start(&to_restore()?)?;
        // While the advisor is on, pages_to_scan is its own.
        if setting("advisor_mode").is_ok() {
            set("advisor_mode", "none")?;
        }
        set("use_zero_pages", "1")?;
        set("pages_to_scan", &pacing.pages_to_scan.to_string())?;
        set("sleep_millisecs", &pacing.sleep_millisecs.to_string())?;
        for memory in &guests {
            advise_mergeable(memory).context("MADV_MERGEABLE")?;
        }
        Ok(Self {
            _keeper: keeper,
            guests,
            pacing,
            at_start: Totals::now()?,
        })
    }

    /// Lets ksmd run.
    pub(crate) fn start(&self) -> anyhow::Result<()> {
        set("run", "1")
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
        set("run", "0")
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
        let totals = Totals::now()?;
        let mut stats = Stats::default();
        stats.pages_shared = count("pages_shared")?;
        stats.pages_sharing = count("pages_sharing")?;
        stats.pages_unshared = count("pages_unshared")?;
        stats.pages_volatile = count("pages_volatile")?;
        // The kernel counts the first page of a chain as well.
        let dups = count("stable_node_dups")?;
        stats.stable_node_dups = dups.saturating_sub(count("stable_node_chains")?);
        stats.ksm_zero_pages = count("ksm_zero_pages")?;
        stats.pages_scanned = totals.pages_scanned - self.at_start.pages_scanned;
        stats.full_scans = totals.full_scans - self.at_start.full_scans;
        stats.cow_breaks = totals.cow_breaks - self.at_start.cow_breaks;
        let profit: i64 = setting("general_profit")?.parse()?;
        let spent = stats.saved_bytes().cast_signed() - profit;
        stats.metadata_bytes = u64::try_from(spent).unwrap_or(0);
        Ok(stats)
    }

    /// Counters of one guest, page by page as `/proc/self/pagemap` and
    /// `/proc/kpageflags` have them (mappings of neighbouring guests are one in
    /// `/proc/self/smaps`).
    pub(crate) fn guest_stats(&self, index: usize) -> anyhow::Result<MemoryStats> {
        let memory = &self.guests[index];
        let mut pagemap = Process::myself()?.pagemap().context("/proc/self/pagemap")?;
        let all_flags = File::open("/proc/kpageflags").context("/proc/kpageflags")?;
        let mut stats = MemoryStats::default();
        stats.pages = memory.iter().map(|region| pages_in(region.len())).sum();
        for region in memory.iter() {
            let start = region.get_host_address(MemoryRegionAddress(0))?.addr();
            let first = start / PAGE_SIZE;
            for page in pagemap.get_range_info(first..first + region.size() / PAGE_SIZE)? {
                let PageInfo::MemoryPage(page) = page else {
                    continue; // Swapped out.
                };
                if !page.contains(MemoryPageFlags::PRESENT) {
                    continue;
                }
                let flags = flags_of(&all_flags, page.get_page_frame_number().0)?;
                // Nothing but ksmd makes zero pages of what guests have filled.
                stats.ksm_zero_pages += u64::from(flags.contains(PhysicalPageFlags::ZERO_PAGE));
                stats.ksm_merging_pages += u64::from(flags.contains(PhysicalPageFlags::KSM));
            }
        }
        Ok(stats)
    }

    /// What `RssAnon` counts too much: a merged page counts in it once for each
    /// of its mappings.
    pub(crate) fn counted_twice_bytes() -> anyhow::Result<u64> {
        Ok(bytes_in(count("pages_sharing")?))
    }

    /// Pages in the figures that are not this process's: none, unless somebody
    /// else has begun to merge on this host meanwhile.
    pub(crate) fn foreign_pages() -> anyhow::Result<u64> {
        let text = std::fs::read_to_string("/proc/self/ksm_stat").context("/proc/self/ksm_stat")?;
        let mine = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
                .with_context(|| format!("/proc/self/ksm_stat has no {name}"))
        };
        let all = count("pages_shared")? + count("pages_sharing")? + count("ksm_zero_pages")?;
        let mine = mine("ksm_merging_pages ")? + mine("ksm_zero_pages ")?;
        Ok(all.saturating_sub(mine))
    }

    /// Processor time that ksmd has used since the host was started.
    pub(crate) fn cpu_time() -> anyhow::Result<Duration> {
        let stat = all_processes()?
            .flatten()
            .filter_map(|process| process.stat().ok())
            .find(|stat| stat.comm == "ksmd")
            .context("there is no ksmd: this kernel has no KSM")?;
        let ticks = stat.utime + stat.stime;
        Ok(Duration::from_millis(
            ticks * 1000 / procfs::ticks_per_second(),
        ))
    }
}

/// The flags of a physical page. (A buffered reader would read thousands.)
fn flags_of(all: &File, frame: u64) -> anyhow::Result<PhysicalPageFlags> {
    let mut flags = [0; 8];
    all.read_exact_at(&mut flags, frame * 8)
        .context("/proc/kpageflags")?;
    let flags = u64::from_ne_bytes(flags);
    Ok(PhysicalPageFlags::from_bits_truncate(flags))
}

/// What a keeper must write so that the host is as it is now.
fn to_restore() -> anyhow::Result<Vec<(String, String)>> {
    let mut settings = Vec::new();
    let mut keep = |name: &str, value: String| settings.push((format!("{SYSFS}/{name}"), value));
    let run = setting("run")?;
    if run == "0" {
        // Nothing may stay merged that was not.
        keep("run", "2".to_owned());
    }
    keep("run", run);
    for name in ["pages_to_scan", "sleep_millisecs", "use_zero_pages"] {
        keep(name, setting(name)?);
    }
    for name in ["smart_scan", "advisor_mode"] {
        if let Ok(value) = setting(name) {
            keep(name, value);
        }
    }
    Ok(settings)
}

/// A setting as it is to be written: of several the chosen one.
fn setting(name: &str) -> anyhow::Result<String> {
    let path = format!("{SYSFS}/{name}");
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!("cannot read {path}: --engine kernel needs a kernel with KSM, 6.8 or later")
    })?;
    let chosen = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    Ok(chosen.map_or(text.trim(), |(chosen, _)| chosen).to_owned())
}

fn count(name: &str) -> anyhow::Result<u64> {
    setting(name)?
        .parse()
        .with_context(|| format!("{SYSFS}/{name} is not a number"))
}

fn set(name: &str, value: &str) -> anyhow::Result<()> {
    let path = format!("{SYSFS}/{name}");
    std::fs::write(&path, value)
        .with_context(|| format!("cannot write {value} to {path}: --engine kernel needs root"))
}
