//! The simulated backend: a host made of plain data, on which the real engine
//! runs.
//!
//! [`SimBackend`] is a host with guests ([`SimGuest`]), a limit on VMAs, and
//! calls that fail when told to. Everything that happens on it follows from
//! one seed: there is no clock and no thread of its own. What the kernel does
//! to memory it does too: holes, swapped pages, huge pages, pages pinned for
//! DMA or shared since a fork, moves that fall short, populates that stop
//! half-way, write-protection that outlives a dropped copy.
//!
//! Between any two steps of the engine the world goes on: with a [`Storm`] set,
//! vCPUs write to the very pages that a call is about, before and after it. A
//! vCPU that writes to a stopped page waits, and so does one that touches a
//! page that is out; [`SimBackend::busy`] tells whether anything is left so.
//!
//! Each call checks what the contract of [`Memory`](super::Memory) and
//! [`FrameStore`](super::FrameStore) demands, and panics with a text that
//! begins with `contract broken` if the engine broke it, above all when bytes
//! of a guest would have been lost. [`SimBackend::violation`] keeps the text in
//! case somebody caught the panic.
//!
//! # Example
//!
//! ```
//! use ksm_core::backend::sim::{SimBackend, SimConfig, pattern};
//! use ksm_core::backend::{Backend, FrameStore, Memory, Backing, RegionOptions};
//! use ksm_core::page::{FrameId, FrameRange, PageIndex, PageRange};
//!
//! let sim = SimBackend::new(SimConfig::default());
//! let guest = sim.guest(16);
//! guest.write(PageIndex(3), &pattern(7));
//!
//! // What an engine would do with it.
//! let store = sim.open_store()?;
//! let memory = sim.attach(guest.clone(), RegionOptions::default())?;
//! store.fill(FrameId(0), &pattern(7))?;
//! let page = PageRange::one(PageIndex(3));
//! let held = memory.stop(page, Backing::Own)?.held;
//! assert_eq!(held, [page]);
//! guest.write(PageIndex(3), &pattern(8)); // a vCPU waits
//! memory.share(page, Backing::Own, &store, FrameId(0))?;
//! memory.lift(page, Backing::Own); // its write goes on, to a copy
//!
//! assert_eq!(guest.read(PageIndex(3)), *pattern(8));
//! assert!(sim.busy().is_idle());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod call;
mod config;
mod guest;
mod memory;
mod page;
mod plain;
mod region;
mod rng;
mod stop;
mod store;
mod storm;
#[cfg(test)]
mod tests;
mod world;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

pub use call::{Call, Failure};
pub use config::{SimConfig, Stop, Storm};
pub use guest::{Access, SimGuest};
pub use memory::SimMemory;
pub use page::{SimPageState, pattern};
pub use store::SimStore;
pub use world::Busy;

use super::{Backend, RegionOptions};
use crate::error::{BackendError, RegisterError};
use world::World;

/// A simulated host. Clones are handles on the same host: give one to the
/// engine, keep one to look and to meddle.
#[derive(Clone, Debug)]
pub struct SimBackend {
    host: Arc<Host>,
}

/// The world, and where threads wait for a page to come back or a call to wake.
#[derive(Debug)]
struct Host {
    world: Mutex<World>,
    lifted: Condvar,
}

impl Host {
    /// The world. A panic in the middle of a call is a verdict, not a broken
    /// world: tests look at it afterwards.
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to change.
    fn wait<'a>(&self, world: MutexGuard<'a, World>) -> MutexGuard<'a, World> {
        let waited = self.lifted.wait(world);
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimBackend {
    /// A host without guests.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        Self {
            host: Arc::new(Host {
                world: Mutex::new(World::new(config)),
                lifted: Condvar::new(),
            }),
        }
    }

    /// A piece of guest memory of `pages` pages, all of them absent: one VMA.
    ///
    /// # Panics
    /// If `pages` is 0.
    #[must_use]
    pub fn guest(&self, pages: u64) -> SimGuest {
        assert!(pages > 0, "a guest without memory");
        let region = self.host.lock().add_region(pages);
        SimGuest::new(Arc::clone(&self.host), region)
    }

    /// What vCPUs and the host do between the steps of the engine from now on.
    pub fn set_storm(&self, storm: Storm) {
        self.host.lock().storm = storm;
    }

    /// Lets the `nth` call of this kind from now on fail, 1 being the next.
    ///
    /// # Panics
    /// If `nth` is 0.
    pub fn fail_nth(&self, call: Call, failure: Failure, nth: u64) {
        assert!(nth > 0, "calls are counted from 1");
        self.host.lock().plan.fail_nth(call, failure, nth);
    }

    /// Lets calls of this kind fail at random, `per_mille` of a thousand.
    pub fn fail_often(&self, call: Call, failure: Failure, per_mille: u32) {
        self.host.lock().plan.fail_often(call, failure, per_mille);
    }

    /// Forgets every failure that was asked for.
    pub fn no_failures(&self) {
        self.host.lock().plan.clear();
    }

    /// Holds the world still: until it goes on, there is no storm and no call
    /// fails. For checks that make calls of their own.
    pub fn hold_still(&self, still: bool) {
        self.host.lock().still = still;
    }

    /// Lets calls of this kind that a [`FrameStore`](super::FrameStore) gets sleep once
    /// they are counted, as where the host is short of memory, or wakes them.
    /// Other calls go on beside them.
    pub fn sleep(&self, call: Call, asleep: bool) {
        let mut world = self.host.lock();
        world.asleep.retain(|other| *other != call);
        world.asleep.extend(asleep.then_some(call));
        drop(world);
        self.host.lifted.notify_all();
    }

    /// How many calls of this kind were made.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.host.lock().plan.calls(call)
    }

    /// VMAs in use.
    #[must_use]
    pub fn vmas(&self) -> u64 {
        self.host.lock().vmas
    }

    /// Sets the limit on VMAs (`vm.max_map_count`). VMAs in use beyond it stay.
    pub fn set_max_vmas(&self, max: u64) {
        self.host.lock().config.max_vmas = max;
    }

    /// What is stopped, out, or waiting on the whole host.
    #[must_use]
    pub fn busy(&self) -> Busy {
        self.host.lock().busy()
    }

    /// How the engine broke the contract, if it did.
    #[must_use]
    pub fn violation(&self) -> Option<String> {
        self.host.lock().violation.clone()
    }
}

impl Backend for SimBackend {
    type Source = SimGuest;
    type Memory = SimMemory;
    type Store = SimStore;

    fn free_vmas(&self) -> Option<u64> {
        let world = self.host.lock();
        Some(world.config.max_vmas.saturating_sub(world.vmas))
    }

    fn open_store(&self) -> Result<SimStore, BackendError> {
        let mut world = self.host.lock();
        world.may_fail(Call::OpenStore)?;
        Ok(SimStore::new(Arc::clone(&self.host), world.add_store()))
    }

    /// Refuses a guest's memory that is registered already (as a userfaultfd
    /// is), and one that still stands over frames (a private file mapping).
    fn attach(&self, source: SimGuest, options: RegionOptions) -> Result<SimMemory, RegisterError> {
        let mut world = self.host.lock();
        world.may_fail(Call::Attach)?;
        let len = world.attach(source.region(), options)?;
        let host = Arc::clone(&self.host);
        Ok(SimMemory::new(host, source.region(), 0, len))
    }
}
