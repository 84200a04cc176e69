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
//! # A tour
//!
//! Two guests that hold the same page, on the simulated backend. On a Linux host
//! only the first line and the source of the memory differ; `ksm-vmm-glue` has the
//! same beginning with a `GuestMemoryMmap`.
//!
//! ```
//! use ksm_core::backend::sim::{SimBackend, SimConfig, pattern};
//! use ksm_core::{Config, Ksm, Outcome, PageIndex, PageRange, RegionOptions};
//!
//! let sim = SimBackend::new(SimConfig::default());
//! let ksm = Ksm::new(sim.clone(), Config::default())?;
//!
//! // Who trusts whom, who they are, and what memory they have.
//! let domain = ksm.create_domain()?;
//! let mut guests = Vec::new();
//! for _ in 0..2 {
//!     let memory = sim.guest(16);
//!     memory.write(PageIndex(3), &pattern(7));
//!     let space = ksm.create_space(domain)?;
//!     let region = ksm.register(space, memory.clone(), RegionOptions::default())?;
//!     guests.push((memory, space, region));
//! }
//! let (memory, space, region) = &guests[0];
//!
//! // The first pass learns what the pages look like, the second one merges
//! // those that have not changed.
//! let passes = |wanted| -> Result<(), ksm_core::Error> {
//!     while ksm.stats().full_scans < wanted {
//!         ksm.scan(1000)?;
//!     }
//!     Ok(())
//! };
//! passes(2)?;
//! let stats = ksm.stats();
//! assert_eq!((stats.pages_shared, stats.pages_sharing), (1, 1));
//! assert_eq!(stats.saved_bytes(), 4096);
//! assert_eq!(ksm.explain(*region, PageIndex(3))?.sharers, 2);
//!
//! // A guest writes to its page. The host gives it a copy at once, and the next pass
//! // notices.
//! memory.write(PageIndex(3), &pattern(8));
//! passes(3)?;
//! assert_eq!(ksm.space_stats(*space)?.cow_breaks, 1);
//! let found = ksm.explain(*region, PageIndex(3))?;
//! assert_eq!((found.sharers, found.copied), (0, true));
//! // Not merged again: the region was not declared free of unannounced DMA.
//! assert_eq!(found.outcome, Outcome::CopiedUnguarded);
//!
//! // The guest's balloon gives the page back: never by MADV_DONTNEED, but so.
//! ksm.discard(*region, PageRange::one(PageIndex(3)))?;
//! assert!(memory.read(PageIndex(3)).is_zero());
//!
//! // Plain memory again.
//! for (_, space, _) in &guests {
//!     ksm.remove_space(*space)?;
//! }
//! ksm.remove_domain(domain)?;
//! # Ok::<(), ksm_core::Error>(())
//! ```
//!
//! # Features
//!
//! `linux` (on by default): the backend for Linux hosts. `tracing`: see
//! [below](#events). For tests, of this crate and of others: `script`, an operation
//! language with which engines are compared with a naive model, and
//! `fault-injection`, a hook at every step of a merge.
//!
//! # Threads
//!
//! A [`Ksm`] has no thread and no clock of its own. Every call is bounded, by the
//! budget that it is given or by the memory that it is about. (A scan's budget is of
//! pages that are there for the host: those merged and not touched since are gone
//! through besides, 16 bytes each, with no lock held for long.) One thread at a time
//! scans; everything else may be called from any thread meanwhile, and waits at most
//! for what is under way in the region it is about.
//!
//! # When something fails
//!
//! A refusal by the host in the middle of a merge leaves the page as it was and
//! its vCPU running; it is counted as an [`Outcome`], not raised as an error. A
//! panic in a pass ends what was under way while it unwinds. For a scanning
//! thread that is killed without unwinding there is [`Ksm::recover`].
//!
//! # Events
//!
//! With the feature `tracing` the engine tells what it does to whatever
//! subscriber of the [`tracing`](https://docs.rs/tracing) crate the VMM has.
//! Nothing is said of single pages, and no subscriber runs while a page is stopped:
//! a slow one slows the scan, never a vCPU.
//!
//! | target | level | event |
//! |---|---|---|
//! | `ksm_core::layout` | info | domains, spaces and regions that come, change and go |
//! | | warn | a region that stays registered, since it could not be unregistered |
//! | `ksm_core::pass` | debug | a pass has ended: pages looked at, merged, made zero |
//! | | debug, a span | a call of [`Ksm::scan`] |
//! | | trace | a window was looked at |
//! | `ksm_core::merge` | debug | pages of a window that the host, a budget or a device kept from being merged |
//! | | debug | pages were unmerged |
//! | | warn | pages could not be unmerged |
//! | `ksm_core::recovery` | debug | the engine is held still, and goes on |
//! | | warn | what a lost thread had under way was ended |
#![deny(unsafe_code)]

mod adapters;
pub mod backend;
mod budget;
pub mod census;
mod clone;
mod config;
mod crew;
mod domain;
mod engine;
pub mod error;
pub mod fault;
mod fingerprint;
mod frames;
mod giveback;
#[cfg(any(test, feature = "internals"))]
#[doc(hidden)]
pub mod internals;
mod layout;
mod merge;
mod nursery;
pub mod outcome;
pub mod page;
mod pledge;
mod ration;
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
mod trace;
mod unshare;
mod unstable;
mod walk;

pub use backend::RegionOptions;
pub use config::{Config, LockPolicy};
pub use engine::{Explanation, FrameMove, Ksm, Quiesced, Sharer, SharingMatrix, Target};
pub use error::{Error, MemfdFault, RegisterError};
pub use outcome::{Outcome, OutcomeCounts};
pub use page::{FrameId, PAGE_SIZE, PageIndex, PageRange};
pub use region::{DomainId, PinGuard, RegionId, SpaceId};
pub use stats::{MemoryStats, ScanReport, Stats};
