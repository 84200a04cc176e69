//! From a rust-vmm guest memory to merged pages.
//!
//! [`ksm_core`] knows regions and pages; a VMM has a `GuestMemoryMmap` and
//! guest-physical addresses. This crate is what lies between:
//!
//! - [`GuestKsm`] registers every region of a guest memory, follows it when it
//!   changes (behind a `GuestMemoryAtomic`), and takes guest-physical addresses.
//! - [`Hotplug`] adds memory to a running guest, and withdraws it, so that engine,
//!   memory slots and map change together; [`GuestKsm::fork`] clones a guest.
//! - [`ScannerThread`] calls [`Ksm::scan`](ksm_core::Ksm::scan) at the pace of
//!   the kernel's `pages_to_scan` and `sleep_millisecs`, and is watched.
//! - [`counters`] prints counters as the kernel prints its own.
//!
//! Each can be used without the others.
//!
//! # Features
//!
//! - `prometheus`: the module of that name, counters for the VMM's registry.
//! - `tracing`: events for its subscriber, from here and from [`ksm_core`]:
//!
//! | target | level | event |
//! |---|---|---|
//! | `ksm_vmm_glue::guest` | info | a guest was registered, or unregistered |
//! | | warn | a guest was dropped, but could not be unregistered |
//! | `ksm_vmm_glue::scanner` | info | the scanner was started, or has stopped |
//! | | warn | a scan failed (debug: in the same way as the one before) |
//! | | error | the scanner panicked, was killed, or could not be replaced |
//!
//! # From `GuestMemoryMmap` to the first merge
//!
//! Two guests that hold the same page, on a Linux host. Of a VMM's own code only the
//! lines about `ksm` and `guests` are new.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use ksm_core::backend::linux::LinuxBackend;
//! use ksm_core::{Config, Ksm, RegionOptions};
//! use ksm_vmm_glue::{GuestKsm, counters};
//! use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
//!
//! let new_memory = || GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 128 << 20)]);
//! let memories = [new_memory()?, new_memory()?];
//! for memory in &memories {
//!     memory.write_slice(&[0xcc; 4096], GuestAddress(0x1000))?;
//! }
//!
//! let ksm = Arc::new(Ksm::new(LinuxBackend::open()?, Config::default())?);
//! let domain = ksm.create_domain()?; // who trusts whom
//! let mut guests = Vec::new();
//! for memory in &memories {
//!     guests.push(GuestKsm::register(&ksm, domain, memory, RegionOptions::default())?);
//! }
//! // The first pass learns what pages look like, the second merges those that have not
//! // changed. For good: ScannerThread::start(Arc::clone(&ksm), ScannerOptions::default())
//! while ksm.stats().full_scans < 2 {
//!     ksm.scan(4096)?;
//! }
//! assert_eq!(guests[0].explain(GuestAddress(0x1000))?.sharers, 2);
//! println!("{}", counters::engine(&ksm.stats()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where a VMM calls what (boot, hotplug, balloon, DMA, snapshot, jail) is in
//! `docs/vmm-authors.md`, what counters mean in `docs/operators.md`.
#![forbid(unsafe_code)]

pub mod counters;
mod fork;
mod guest;
mod hotplug;
mod linux;
#[cfg(feature = "prometheus")]
pub mod prometheus;
mod regions;
mod scanner;
mod trace;

pub use guest::{GuestError, GuestKsm, Mapped, StillRegistered};
pub use hotplug::{Content, Hotplug, HotplugError, Slots};
pub use scanner::{Pacing, ScannerOptions, ScannerThread, Status, Tally, Watch};

/// The examples of README and of the pages in `docs`, compiled with the
/// documentation tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../README.md")]
    struct Readme;

    #[doc = include_str!("../../docs/vmm-authors.md")]
    struct VmmAuthors;

    #[doc = include_str!("../../docs/operators.md")]
    struct Operators;
}
