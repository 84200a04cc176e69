//! Options of memory and guests that come and go.

use clap::ValueEnum;
use ksm_core::LockPolicy;
use ksm_core::page::bytes_in;

use crate::args::{Args, Engine};
use crate::layout::{Windows, control_bytes};
use crate::mem_size::MemSize;

/// What comes and goes meanwhile.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReshapeArgs {
    /// Threads that add a vCPU to a running guest each, then again and again add
    /// memory, let the vCPU fill, check and rewrite it, and withdraw it
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=16))]
    pub(crate) hotplug: u8,

    /// How much memory such a thread adds
    #[arg(long, value_name = "MEM", default_value = "256M")]
    pub(crate) hotplug_mem: MemSize,

    /// How many clones are made of running guests, of one after another, when a
    /// quarter of the time is up: they go on from where their parents stand
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=16))]
    pub(crate) fork: u8,

    /// How scanning and changes of memory keep out of one another's way
    #[arg(long, value_enum, default_value_t = Policy::PerRegion)]
    pub(crate) lock_policy: Policy,
}

/// How scanning and changes of memory keep out of one another's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    /// A lock for each region; what is busy is come back to in the same pass
    PerRegion,
    /// One lock, as the kernel has it
    Global,
    /// One lock, and what is busy is left for the next pass
    TrySkip,
}

impl From<Policy> for LockPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::PerRegion => Self::PerRegion,
            Policy::Global => Self::Global,
            Policy::TrySkip => Self::TrySkip,
        }
    }
}

impl Args {
    /// Whether what comes and goes goes with the rest.
    pub(crate) fn check_reshape(&self) -> Result<(), String> {
        let Some(asked) = self.reshape.asked() else {
            return Ok(());
        };
        if self.linux.kernel.is_some() {
            return Err(format!("{asked} is for built-in guests\n"));
        }
        if self.engine == Engine::Kernel || self.no_dedup {
            return Err(format!("{asked} is to go on beside our engine\n"));
        }
        if self.reshape.hotplug > 0 && self.host_threads {
            return Err("host threads have no memory slots: no --hotplug\n".to_owned());
        }
        Ok(())
    }
}

impl ReshapeArgs {
    /// What of this is asked for, by its name.
    pub(crate) fn asked(&self) -> Option<&'static str> {
        if self.hotplug > 0 {
            Some("--hotplug")
        } else if self.fork > 0 {
            Some("--fork")
        } else {
            None
        }
    }

    /// The windows of each of so many guests.
    pub(crate) fn windows(&self, guests: u64) -> Windows {
        Windows {
            count: u64::from(self.hotplug).div_ceil(guests),
            pages: self.hotplug_mem.pages(),
        }
    }

    /// Memory that this takes at most, beside that of guests of so many pages.
    pub(crate) fn bytes(&self, guest_pages: &[u64]) -> u64 {
        let window = self.hotplug_mem.pages();
        let window = bytes_in(window) + control_bytes(window);
        let parents = guest_pages.iter().cycle().take(self.fork.into());
        let clones: u64 = parents
            .map(|&pages| bytes_in(pages) + control_bytes(pages))
            .sum();
        u64::from(self.hotplug) * window + clones
    }
}
