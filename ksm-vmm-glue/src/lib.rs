//! From a rust-vmm guest memory to merged pages.
//!
//! [`ksm_core`] knows regions and pages; a VMM has a `GuestMemoryMmap` and
//! guest-physical addresses. This crate is what lies between:
//!
//! - [`GuestKsm`] registers every region of a guest memory, follows it when it
//!   changes (behind a `GuestMemoryAtomic`), and takes guest-physical addresses.
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
//! ```no_run
//! use std::sync::Arc;
//!
//! use ksm_core::backend::linux::LinuxBackend;
//! use ksm_core::{Config, Ksm, RegionOptions};
//! use ksm_vmm_glue::{GuestKsm, ScannerOptions, ScannerThread};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 128 << 20)])?;
//!
//! let ksm = Arc::new(Ksm::new(LinuxBackend::open()?, Config::default())?);
//! let domain = ksm.create_domain()?;
//! let guest = GuestKsm::register(&ksm, domain, &memory, RegionOptions::default())?;
//! let scanner = ScannerThread::start(Arc::clone(&ksm), ScannerOptions::default())?;
//!
//! // ... run vCPUs ...
//!
//! println!("{}", ksm_vmm_glue::counters::engine(&ksm.stats()));
//! scanner.stop();
//! guest.unregister()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod counters;
mod guest;
mod linux;
#[cfg(feature = "prometheus")]
pub mod prometheus;
mod scanner;
mod trace;

pub use guest::{GuestError, GuestKsm, Mapped, StillRegistered};
pub use scanner::{Pacing, ScannerOptions, ScannerThread, Status, Tally, Watch};

/// README's example, compiled with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
