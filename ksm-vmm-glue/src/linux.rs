//! Guests on the Linux backend, which takes vm-memory's regions as they are.

use std::sync::Arc;

use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::{DomainId, Ksm, RegionOptions};
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::Bitmap;

use crate::guest::{GuestError, GuestKsm};

impl GuestKsm<LinuxBackend> {
    /// Registers every region of `memory` as a guest of `domain`.
    ///
    /// With a `GuestMemoryAtomic`, give what its `memory()` returns, and call
    /// [`GuestKsm::sync`] with that again when the memory has changed:
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use ksm_core::backend::linux::LinuxBackend;
    /// # use ksm_core::{Config, Ksm, RegionOptions};
    /// # use ksm_vmm_glue::GuestKsm;
    /// # use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap};
    /// # let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 128 << 20)])?;
    /// # let ksm = Arc::new(Ksm::new(LinuxBackend::open()?, Config::default())?);
    /// # let domain = ksm.create_domain()?;
    /// let memory = GuestMemoryAtomic::new(memory);
    /// let mut guest = GuestKsm::register(&ksm, domain, &memory.memory(), RegionOptions::default())?;
    ///
    /// // Memory is plugged in.
    /// let more = GuestRegionMmap::from_range(GuestAddress(1 << 32), 64 << 20, None)?;
    /// let grown = memory.memory().insert_region(Arc::new(more))?;
    /// memory.lock().unwrap().replace(grown);
    /// guest.sync(&memory.memory())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Where regions are of different kinds, use [`GuestKsm::register_with`] and
    /// [`GuestKsm::sync_with`], with a closure that declares each as what it is
    /// ([`HostRegion::memfd_owned`]), and leave those out of `memory` that other
    /// processes map.
    ///
    /// # Errors
    /// [`GuestError::Engine`] when the engine refuses a region; none is
    /// registered then.
    pub fn register<B>(
        ksm: &Arc<Ksm<LinuxBackend>>,
        domain: DomainId,
        memory: &GuestMemoryMmap<B>,
        options: RegionOptions,
    ) -> Result<Self, GuestError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        Self::register_with(ksm, domain, memory, options, HostRegion::new)
    }

    /// Brings the registration in line with `memory`: registers regions that
    /// are new, unregisters those that are gone. A region is the same if start,
    /// length and host address are.
    ///
    /// # Errors
    /// As [`GuestKsm::register`] and [`GuestKsm::unregister`], at the first
    /// region that fails. The call can be repeated.
    pub fn sync<B>(&mut self, memory: &GuestMemoryMmap<B>) -> Result<(), GuestError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        self.sync_with(memory, HostRegion::new)
    }

    /// Makes a guest that reads the same as this one: see [`GuestKsm::fork_with`].
    ///
    /// # Errors
    /// As [`GuestKsm::fork_with`].
    pub fn fork<B>(&self, memory: &GuestMemoryMmap<B>) -> Result<Self, GuestError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        self.fork_with(memory, HostRegion::new)
    }

    /// Registers the regions of `memory`, to which a guest has just been restored and
    /// which nobody uses yet: private mappings of a snapshot's file, or anonymous
    /// memory that it was read into. See [`GuestKsm::take_over_with`].
    ///
    /// # Errors
    /// As [`GuestKsm::take_over_with`].
    pub fn take_over<B>(
        ksm: &Arc<Ksm<LinuxBackend>>,
        domain: DomainId,
        memory: &GuestMemoryMmap<B>,
        options: RegionOptions,
    ) -> Result<Self, GuestError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        Self::take_over_with(ksm, domain, memory, options, HostRegion::new)
    }
}
