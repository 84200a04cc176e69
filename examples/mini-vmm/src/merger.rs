//! [`Merger`]: what merges the guests' memory.

use ksm_core::{MemoryStats, Stats};
use ksm_vmm_glue::ScannerThread;

use crate::dedup::Dedup;
use crate::ksmd::Ksmd;

/// An engine at work on all guests.
#[derive(Debug)]
pub(crate) enum Merger {
    /// `ksm-core`.
    Ours(Dedup),
    /// The kernel's KSM.
    Kernel(Ksmd),
}

impl Merger {
    /// Our engine, for what the kernel cannot do.
    pub(crate) const fn ours(&self) -> Option<&Dedup> {
        match self {
            Self::Ours(dedup) => Some(dedup),
            Self::Kernel(_) => None,
        }
    }

    /// Starts to scan: in a thread of this process, or in ksmd.
    pub(crate) fn start(&self) -> anyhow::Result<Option<ScannerThread>> {
        match self {
            Self::Ours(dedup) => dedup.start_scanner().map(Some),
            Self::Kernel(ksmd) => ksmd.start().map(|()| None),
        }
    }

    /// Counters of all guests.
    pub(crate) fn stats(&self) -> anyhow::Result<Stats> {
        match self {
            Self::Ours(dedup) => Ok(dedup.stats()),
            Self::Kernel(ksmd) => ksmd.stats(),
        }
    }

    /// Counters of one guest.
    pub(crate) fn guest_stats(&self, index: usize) -> anyhow::Result<MemoryStats> {
        match self {
            Self::Ours(dedup) => dedup.guest_stats(index),
            Self::Kernel(ksmd) => ksmd.guest_stats(index),
        }
    }
}
