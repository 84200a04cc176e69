//! [`Host`]: both sides, ready to be used.

use anyhow::Context as _;
use kernel_ksm::{KernelKsm, set, setting};
use ksm_core::backend::linux::LinuxBackend;

/// Pages that ksmd scans, and we, before the clock is looked at.
pub(crate) const PAGES_TO_SCAN: u64 = 100_000;

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
        let ksmd = KernelKsm::take().context("the kernel's side cannot run here")?;
        set("use_zero_pages", "1")?;
        set("pages_to_scan", &PAGES_TO_SCAN.to_string())?;
        set("sleep_millisecs", "0")?;
        if setting("smart_scan").is_ok() {
            // Its default.
            set("smart_scan", "1")?;
        }
        Ok(Self { backend, ksmd })
    }
}
