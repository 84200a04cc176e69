//! Kernel Samepage Merging in user space.
#![deny(unsafe_code)]

#[allow(dead_code)]
mod adapters;
pub mod backend;
mod config;
mod engine;
pub mod error;
#[cfg(feature = "fault-injection")]
pub mod fault;
#[cfg(not(feature = "fault-injection"))]
mod fault;
#[allow(dead_code)]
mod fingerprint;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
pub mod outcome;
pub mod page;
mod region;
#[allow(dead_code)]
mod sharded;
#[allow(dead_code)]
mod stable;
mod stats;
#[allow(dead_code)]
mod sync;
#[allow(dead_code)]
mod unstable;

pub use backend::RegionOptions;
pub use config::Config;
pub use engine::{Explanation, Ksm, Quiesced, Target};
pub use error::{Error, RegisterError};
pub use outcome::{Outcome, OutcomeCounts};
pub use page::{PAGE_SIZE, PageIndex, PageRange};
pub use region::{DomainId, RegionId, SpaceId};
pub use stats::{MemoryStats, ScanReport, Stats};
