//! The kernel's side of `peer churn`.

use std::thread::sleep;
use std::time::{Duration, Instant};

use kernel_ksm::{KernelKsm, Totals, count};

use super::load::Hotplug;
use super::{CHURN_PAGES, Merging, Progress};
use crate::cpu::{self, Share};
use crate::figures::Figures;
use crate::host::Host;
use crate::memory::Memory;

/// How often ksmd's counters are looked at.
const GLANCE: Duration = Duration::from_millis(1);

/// ksmd, with this process as its only guest.
pub(super) struct Kernel<'h> {
    ksmd: &'h KernelKsm,
    /// How many pages ksmd is to save.
    target: u64,
    /// Frames of the saved pages.
    frames: u64,
    mergeable_churn: bool,
}

impl<'h> Kernel<'h> {
    /// For `memory` of `unique` contents.
    pub(super) fn new(
        host: &'h Host,
        memory: &Memory,
        unique: u64,
        mergeable_churn: bool,
    ) -> anyhow::Result<Self> {
        Host::wait_for_ksmd()?;
        memory.mergeable(0, memory.pages())?;
        Ok(Self {
            ksmd: &host.ksmd,
            target: memory.pages() as u64 - unique,
            frames: unique,
            mergeable_churn,
        })
    }

    /// Everything is merged, or the time is up.
    fn wait(&self, limit: Duration) -> anyhow::Result<Progress> {
        cpu::as_watcher()?;
        let ksmd = self.ksmd.folder();
        let (share, process) = (Share::of(&ksmd)?, cpu::of_process());
        let (began, totals) = (Instant::now(), Totals::now()?);
        self.ksmd.start()?;
        let mut progress = Progress::default();
        loop {
            // Of the passes that were finished when it was last asked.
            let passes = count("full_scans")? - totals.full_scans;
            let sharing = count("pages_sharing")?;
            progress.seconds = began.elapsed();
            if sharing >= self.target {
                progress.merged = self.target + self.frames;
                break;
            }
            if progress.seconds > limit {
                progress.merged = sharing + count("pages_shared")?;
                break;
            }
            progress.passes = passes;
            sleep(GLANCE);
        }
        let totals = Totals::now()?.since(totals);
        progress.pages_scanned = totals.pages_scanned;
        progress.scanner = Share::of(&ksmd)?.since(share);
        progress.cpu = cpu::of_process() - process + progress.scanner.ran;
        self.ksmd.stop()?;
        Ok(progress)
    }
}

impl Hotplug for Kernel<'_> {
    fn change(&self, word: u64) -> anyhow::Result<()> {
        let memory = Memory::map(CHURN_PAGES)?;
        if self.mergeable_churn {
            memory.mergeable(0, CHURN_PAGES)?;
        }
        memory.touch(0, word)
    }
}

impl Merging for Kernel<'_> {
    fn merge(&self, limit: Duration) -> anyhow::Result<Figures> {
        Ok(self.wait(limit)?.figures())
    }

    fn end(&self) -> anyhow::Result<()> {
        self.ksmd.unmerge()
    }
}
