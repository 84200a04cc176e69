//! Kernel Samepage Merging in user space: equal pages of running guests come to
//! share one physical page, inside the VMM.
//!
//! Linux's KSM (`mm/ksm.c`) merges private anonymous memory of any process that
//! asks for it, from one kernel thread, under one policy for the whole host. This
//! crate does the same job as a library: the VMM owns the thread and the budget,
//! guests are kept apart by trust domains, counters (the kernel's names) are kept
//! per guest, and [`Ksm::explain`] tells why a page is not merged.
//!
//! # How it works
//!
//! Guest memory is registered in three levels: a trust **domain**, an address
//! **space** in it for each guest, and **regions** of memory. [`Ksm::scan`] walks
//! populated pages and looks for equal ones in the domain's *stable tree* (frames
//! that are shared already) and *unstable tree* (other pages seen in this pass). A
//! match is merged: writes to the page are stopped, its bytes are compared with
//! the frame, and the frame is mapped in its place, privately. A guest that
//! writes to it later gets a copy from the host's own copy-on-write: no handler of
//! ours is in the way of a vCPU. The next pass notices.
//!
//! The engine runs on a [`backend`]: [`backend::linux`] on live guests,
//! [`backend::sim`] on a model, for tests of this crate and of yours.
//!
//! # Example
//!
//! Two guests that hold the same page, on the simulated backend. On a Linux host
//! only the first line and the source of the memory differ.
//!
//! ```
//! use ksm_core::backend::sim::{SimBackend, SimConfig, pattern};
//! use ksm_core::{Config, Ksm, PageIndex, RegionOptions};
//!
//! let sim = SimBackend::new(SimConfig::default());
//! let ksm = Ksm::new(sim.clone(), Config::default())?;
//!
//! let domain = ksm.create_domain()?;
//! for _ in 0..2 {
//!     let memory = sim.guest(16);
//!     memory.write(PageIndex(3), &pattern(7));
//!     let guest = ksm.create_space(domain)?;
//!     ksm.register(guest, memory, RegionOptions::default())?;
//! }
//!
//! // The first pass learns what the pages look like, the second one merges
//! // those that have not changed.
//! while ksm.stats().full_scans < 2 {
//!     ksm.scan(1000)?;
//! }
//! let stats = ksm.stats();
//! assert_eq!((stats.pages_shared, stats.pages_sharing), (1, 1));
//! assert_eq!(stats.saved_bytes(), 4096);
//! # Ok::<(), ksm_core::Error>(())
//! ```
//!
//! # Threads
//!
//! A [`Ksm`] has no thread and no clock of its own. Every call is bounded. One
//! thread at a time scans; everything else may be called from any thread
//! meanwhile, and waits at most for what is under way in the region it is about.
//!
//! # When something fails
//!
//! A refusal by the host in the middle of a merge leaves the page as it was and
//! its vCPU running; it is counted as an [`Outcome`], not raised as an error. A
//! panic in a pass ends what was under way while it unwinds. For a scanning
//! thread that is killed without unwinding there is [`Ksm::recover`].
#![deny(unsafe_code)]

mod adapters;
pub mod backend;
mod budget;
pub mod census;
mod clone;
mod config;
mod domain;
mod engine;
pub mod error;
pub mod fault;
mod fingerprint;
mod frames;
mod giveback;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod layout;
mod merge;
pub mod outcome;
pub mod page;
mod region;
mod rmap;
mod scan;
#[cfg(feature = "script")]
pub mod script;
mod sharded;
mod sharing;
mod stable;
mod stats;
mod sync;
mod unshare;
mod unstable;
mod walk;

pub use backend::RegionOptions;
pub use config::{Config, LockPolicy};
pub use engine::{Explanation, Ksm, Quiesced, Sharer, SharingMatrix, Target};
pub use error::{Error, MemfdFault, RegisterError};
pub use outcome::{Outcome, OutcomeCounts};
pub use page::{PAGE_SIZE, PageIndex, PageRange};
pub use region::{DomainId, PinGuard, RegionId, SpaceId};
pub use stats::{MemoryStats, ScanReport, Stats};
