//! [`Dedup`]: the engine, its guests and its scanner, as this program uses them.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::Context as _;
use ksm_core::backend::linux::LinuxBackend;
use ksm_core::{Config, DomainId, Ksm, MemoryStats, Outcome, RegionOptions, SpaceId, Stats};
use ksm_vmm_glue::{GuestKsm, Pacing, ScannerOptions, ScannerThread, Status};
use vm_memory::GuestMemoryMmap;

use crate::ram::{Ram, page_address};

/// The engine of this program.
pub(crate) type Engine = Ksm<LinuxBackend>;

/// This VMM has no devices, so nothing writes to guest memory but vCPUs: copied
/// pages may be merged again.
const OPTIONS: RegionOptions = RegionOptions { dma_guarded: true };

/// Guests that rest are merged in far fewer passes than this.
const MAX_PASSES: u64 = 100;

/// Guests that are registered with one engine.
#[derive(Debug)]
pub(crate) struct Dedup {
    ksm: Arc<Engine>,
    /// Clones that are not born yet have a place at the end.
    guests: Vec<OnceLock<Mutex<GuestKsm<LinuxBackend>>>>,
    pacing: Pacing,
}

impl Dedup {
    /// Registers this memory of all guests. They share a trust domain, or have one
    /// each; so many `clones` of them may come.
    pub(crate) fn new(
        backend: LinuxBackend,
        config: Config,
        pacing: Pacing,
        isolate: bool,
        memories: &[GuestMemoryMmap],
        clones: usize,
    ) -> anyhow::Result<Self> {
        let ksm = Arc::new(Ksm::new(backend, config)?);
        let mut shared: Option<DomainId> = None;
        let mut guests = Vec::new();
        for memory in memories {
            let domain = match shared {
                Some(domain) if !isolate => domain,
                _ => *shared.insert(ksm.create_domain()?),
            };
            let guest = GuestKsm::register_with(&ksm, domain, memory, OPTIONS, Ram::source)
                .context("cannot register guest memory")?;
            guests.push(OnceLock::from(Mutex::new(guest)));
        }
        guests.extend((0..clones).map(|_| OnceLock::new()));
        Ok(Self {
            ksm,
            guests,
            pacing,
        })
    }

    /// The engine.
    pub(crate) const fn ksm(&self) -> &Arc<Engine> {
        &self.ksm
    }

    /// The engine's names of all guests, in their order.
    pub(crate) fn spaces(&self) -> Vec<SpaceId> {
        let all = 0..self.guests.len();
        all.map(|index| self.guest(index).space()).collect()
    }

    /// One guest's registration. Held for as long as it is being changed.
    pub(crate) fn guest(&self, index: usize) -> MutexGuard<'_, GuestKsm<LinuxBackend>> {
        let guest = self.guests[index].get();
        guest
            .expect("only clones that are born are asked for")
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers `memory` as clone number `clone` of a guest that is paused.
    pub(crate) fn fork(
        &self,
        parent: usize,
        clone: usize,
        memory: &GuestMemoryMmap,
    ) -> anyhow::Result<()> {
        // Not what was added to the parent: that has vCPUs of its own.
        let guest = self.guest(parent).fork_part_with(memory, Ram::source)?;
        let set = self.guests[clone].set(Mutex::new(guest));
        set.map_err(|_| anyhow::anyhow!("clone {clone} is there already"))
    }

    /// Starts to scan.
    pub(crate) fn start_scanner(&self) -> anyhow::Result<ScannerThread> {
        let options = ScannerOptions {
            pacing: self.pacing,
            restarts: 0,
        };
        ScannerThread::start(Arc::clone(&self.ksm), options).context("cannot start the scanner")
    }

    /// Stops the scanner. What ended it otherwise is an error of this program.
    pub(crate) fn stop_scanner(scanner: ScannerThread) -> anyhow::Result<()> {
        let tally = scanner.tally();
        match scanner.stop() {
            Status::Stopped => {}
            other => anyhow::bail!("the scanner has ended early: {other:?}"),
        }
        if let Some(error) = tally.last_error {
            eprintln!("{} scans failed, the last with: {error}", tally.errors);
        }
        Ok(())
    }

    /// Makes as many passes as it takes to merge what is equal and rests: the
    /// one under way, those in which a page must prove stable, one in which it
    /// meets its equal.
    pub(crate) fn settle(&self, settle_passes: u8) -> anyhow::Result<()> {
        let mut passes = 0;
        while passes < 2 + u64::from(settle_passes) {
            let report = self.ksm.scan(u64::from(self.pacing.pages_to_scan))?;
            passes += report.passes;
        }
        Ok(())
    }

    /// Makes passes until so many in a row have merged nothing.
    pub(crate) fn settle_until_quiet(&self, quiet_passes: u64) -> anyhow::Result<()> {
        let (mut quiet, mut passes) = (0, 0);
        while quiet < quiet_passes {
            if passes > MAX_PASSES {
                anyhow::bail!("after {MAX_PASSES} passes there is still something to merge");
            }
            let report = self.ksm.scan(u64::MAX)?;
            let merged = report.outcomes[Outcome::Merged] + report.outcomes[Outcome::Zeroed];
            passes += report.passes;
            quiet = if merged == 0 {
                quiet + report.passes
            } else {
                0
            };
        }
        Ok(())
    }

    /// Counters of the engine.
    pub(crate) fn stats(&self) -> Stats {
        self.ksm.stats()
    }

    /// Counters of one guest.
    pub(crate) fn guest_stats(&self, index: usize) -> anyhow::Result<MemoryStats> {
        Ok(self.guest(index).stats()?)
    }

    /// How many of a guest's `pages` are merged now.
    pub(crate) fn merged_among(&self, index: usize, pages: &[u64]) -> anyhow::Result<u64> {
        let guest = self.guest(index);
        let mut merged = 0;
        for page in pages {
            merged += u64::from(guest.explain(page_address(*page))?.sharers > 0);
        }
        Ok(merged)
    }

    /// Checks the engine's records against one another.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.ksm.check().map_err(anyhow::Error::msg)
    }
}
