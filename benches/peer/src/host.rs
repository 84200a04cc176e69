//! [`Host`]: both sides, ready to be used.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kernel_ksm::{KernelKsm, set, setting};
use ksm_core::backend::linux::LinuxBackend;

/// Pages that ksmd scans, and we, before the clock is looked at.
pub(crate) const PAGES_TO_SCAN: u64 = 100_000;

/// Whether the threads of a session share what one thread gets. ksmd is in no
/// session.
const AUTOGROUP: &str = "/proc/sys/kernel/sched_autogroup_enabled";
/// How long others may have memory that ksmd would look at as well.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often they are looked for meanwhile.
const GLANCE: Duration = Duration::from_millis(200);

/// What the sides work with.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) backend: LinuxBackend,
    pub(crate) ksmd: KernelKsm,
}

impl Host {
    /// Takes ksmd, stopped and set to its full speed, and opens the engine's host.
    pub(crate) fn take() -> anyhow::Result<Self> {
        let backend = LinuxBackend::open().context("our side cannot run here")?;
        let ksmd = KernelKsm::take(&[AUTOGROUP]).context("the kernel's side cannot run here")?;
        if Path::new(AUTOGROUP).exists() {
            // From now on each thread that is made has a share of its own.
            std::fs::write(AUTOGROUP, "0").context(AUTOGROUP)?;
        }
        set("use_zero_pages", "1")?;
        set("pages_to_scan", &PAGES_TO_SCAN.to_string())?;
        set("sleep_millisecs", "0")?;
        if setting("smart_scan").is_ok() {
            // Its default.
            set("smart_scan", "1")?;
        }
        Ok(Self { backend, ksmd })
    }

    /// Waits until ksmd has this process alone to look at, and says so.
    pub(crate) fn wait_for_ksmd() -> anyhow::Result<()> {
        let began = Instant::now();
        let mut told = false;
        loop {
            let others = kernel_ksm::others()?;
            if others.is_empty() {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                bail!("ksmd is at work for others: {}", others.join(", "));
            }
            if !told {
                eprintln!("peer: waiting for {}", others.join(", "));
                told = true;
            }
            sleep(GLANCE);
        }
    }
}
