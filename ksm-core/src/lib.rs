//! Kernel Samepage Merging in user space.
#![deny(unsafe_code)]

mod adapters;
pub mod backend;
mod config;
mod domain;
mod engine;
pub mod error;
#[cfg(feature = "fault-injection")]
pub mod fault;
#[cfg(not(feature = "fault-injection"))]
mod fault;
mod fingerprint;
mod frames;
mod layout;
mod merge;
pub mod outcome;
pub mod page;
mod region;
mod rmap;
mod scan;
mod sharded;
mod stable;
mod stats;
mod sync;
mod unshare;
mod unstable;

pub use backend::RegionOptions;
pub use config::Config;
pub use engine::{Explanation, Ksm, Quiesced, Target};
pub use error::{Error, RegisterError};
pub use outcome::{Outcome, OutcomeCounts};
pub use page::{PAGE_SIZE, PageIndex, PageRange};
pub use region::{DomainId, RegionId, SpaceId};
pub use stats::{MemoryStats, ScanReport, Stats};
