//! The kernel's own KSM, driven through `/sys/kernel/mm/ksm`
//! (`Documentation/admin-guide/mm/ksm.rst`), so that it can be compared with.
//!
//! The settings are the whole host's. A [`KernelKsm`] has them to itself among the
//! programs that use this crate, and a [`keeper`] gives them back when it goes,
//! however its program ends.
#![deny(unsafe_code)]

pub mod keeper;
mod page_map;
mod sysfs;

use std::fs::{File, TryLockError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use procfs::process::{Process, all_processes};

use keeper::Keeper;
pub use page_map::{PageIs, PageMap};
pub use sysfs::{FOLDER, count, set, setting};

/// The host's ksmd, stopped until it is [started](KernelKsm::start).
#[derive(Debug)]
pub struct KernelKsm {
    /// Gives the host its settings back, before others get them.
    _keeper: Keeper,
    _lock: File,
    ksmd: Process,
}

/// Counters that only grow, since the host was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Pages looked at.
    pub pages_scanned: u64,
    /// Passes over all memory.
    pub full_scans: u64,
    /// Merged pages that were written to.
    pub cow_breaks: u64,
}

impl KernelKsm {
    /// Takes hold of ksmd, and stops it. What the files `also` hold is restored as
    /// well.
    ///
    /// # Errors
    /// When another program of this project has it, when ksmd is at work for others, whose pages would be in the figures, when
    /// the kernel has no KSM, or when this is not root.
    pub fn take(also: &[&str]) -> anyhow::Result<Self> {
        let lock =
            File::open(format!("{FOLDER}/run")).context("this kernel has no KSM (CONFIG_KSM)")?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!(
                    "the kernel merges other memory on this host, for another run of this project: wait until that has ended"
                )
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {FOLDER}/run"));
            }
        }
        for name in ["pages_shared", "pages_unshared", "ksm_zero_pages"] {
            let pages = count(name)?;
            if pages > 0 {
                bail!(
                    "the kernel merges other memory on this host ({name} is {pages}), which would be in the figures. If nobody needs that, do `echo 2 > {FOLDER}/run` as root."
                );
            }
        }
        let keeper = Keeper::start(&sysfs::to_restore(also)?)?;
        // While the advisor is on, pages_to_scan is its own.
        if setting("advisor_mode").is_ok() {
            set("advisor_mode", "none")?;
        }
        set("run", "0")?;
        Ok(Self {
            _keeper: keeper,
            _lock: lock,
            ksmd: ksmd()?,
        })
    }

    /// Lets it merge.
    ///
    /// # Errors
    /// When this is not root.
    pub fn start(&self) -> anyhow::Result<()> {
        set("run", "1")
    }

    /// Stops it. What is merged stays so. It may be in the middle of a batch
    /// (`pages_to_scan`) for as long as that takes.
    ///
    /// # Errors
    /// When this is not root.
    pub fn stop(&self) -> anyhow::Result<()> {
        set("run", "0")
    }

    /// Stops it, and gives every merged page a copy of its own.
    ///
    /// # Errors
    /// When this is not root, or memory is short.
    pub fn unmerge(&self) -> anyhow::Result<()> {
        set("run", "2")
    }

    /// Its folder in /proc.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("/proc/{}", self.ksmd.pid)
    }

    /// Its priority: `nice(2)`.
    ///
    /// # Errors
    /// When /proc does not say.
    pub fn nice(&self) -> anyhow::Result<i32> {
        let stat = self.ksmd.stat().context("/proc of ksmd")?;
        Ok(i32::try_from(stat.nice)?)
    }

    /// Processor time that it has used since the host was started.
    ///
    /// # Errors
    /// When /proc does not say.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        if let Ok(schedstat) = self.ksmd.schedstat() {
            return Ok(Duration::from_nanos(schedstat.sum_exec_runtime));
        }
        let stat = self.ksmd.stat().context("/proc of ksmd")?;
        let ticks = stat.utime + stat.stime;
        Ok(Duration::from_millis(
            ticks * 1000 / procfs::ticks_per_second(),
        ))
    }
}

impl Totals {
    /// What they stand at.
    ///
    /// # Errors
    /// When /sys or /proc do not say.
    pub fn now() -> anyhow::Result<Self> {
        Ok(Self {
            pages_scanned: count("pages_scanned")?,
            full_scans: count("full_scans")?,
            cow_breaks: procfs::vmstat()
                .context("/proc/vmstat")?
                .get("cow_ksm")
                .map_or(0, |n| n.cast_unsigned()),
        })
    }

    /// What was counted since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            pages_scanned: self.pages_scanned - earlier.pages_scanned,
            full_scans: self.full_scans - earlier.full_scans,
            cow_breaks: self.cow_breaks - earlier.cow_breaks,
        }
    }
}

/// Pages that the kernel has merged and that are not this process's: none,
/// unless somebody else merges on this host.
///
/// # Errors
/// When /sys or /proc do not say.
pub fn foreign_pages() -> anyhow::Result<u64> {
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

/// Other processes whose memory ksmd looks at when it runs, by name and number.
///
/// # Errors
/// When /proc does not say.
pub fn others() -> anyhow::Result<Vec<String>> {
    let myself = std::process::id();
    let mut others = Vec::new();
    for process in all_processes()?.flatten() {
        let path = format!("/proc/{}/ksm_stat", process.pid);
        // It may have ended meanwhile, and a kernel thread has no memory.
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let is_looked_at = text.lines().any(|line| match line.rsplit_once(' ') {
            Some(("ksm_mergeable:", says)) => says == "yes",
            // Kernels before 6.17 do not say that.
            Some(("ksm_rmap_items", count)) => count != "0",
            _ => false,
        });
        if is_looked_at && process.pid.cast_unsigned() != myself {
            let name = process.stat().map(|stat| stat.comm).unwrap_or_default();
            others.push(format!("{name} ({})", process.pid));
        }
    }
    Ok(others)
}

fn ksmd() -> anyhow::Result<Process> {
    let is_ksmd = |process: &Process| process.stat().is_ok_and(|stat| stat.comm == "ksmd");
    all_processes()?
        .flatten()
        .find(is_ksmd)
        .context("there is no ksmd: this kernel has no KSM")
}
