//! Guest memory by its host address: memory slots and advice. The only unsafe
//! code of this program.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use ksm_vmm_glue::Slots;
use kvm_bindings::{kvm_userspace_memory_region, kvm_xsave};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use rustix::mm::Advice;
use vm_memory::{
    GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
};

/// A virtual machine whose slots are regions of guest memory, which it keeps
/// mapped.
#[derive(Debug)]
pub(crate) struct SlottedVm {
    vm: VmFd,
    /// By number. A slot points into its region.
    slots: Mutex<BTreeMap<u32, Arc<GuestRegionMmap>>>,
}

/// A vCPU that keeps its machine, and so its memory, for as long as it can run.
#[derive(Debug)]
pub(crate) struct SlottedVcpu {
    fd: VcpuFd,
    vm: Arc<SlottedVm>,
}

impl SlottedVm {
    /// Gives every region of `memory` to `vm`, which must have no slots yet.
    pub(crate) fn new(vm: VmFd, memory: &GuestMemoryMmap) -> anyhow::Result<Arc<Self>> {
        let machine = Self {
            vm,
            slots: Mutex::default(),
        };
        for region in memory.iter() {
            let (_, region) = memory.remove_region(region.start_addr(), region.len())?;
            machine.set(&region).context("a memory slot")?;
        }
        Ok(Arc::new(machine))
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<GuestRegionMmap>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a vCPU.
    pub(crate) fn vcpu(self: Arc<Self>, id: u64) -> Result<SlottedVcpu, kvm_ioctls::Error> {
        let fd = self.vm.create_vcpu(id)?;
        Ok(SlottedVcpu { fd, vm: self })
    }
}

impl Slots<GuestRegionMmap> for SlottedVm {
    type Error = io::Error;

    fn set(&self, region: &Arc<GuestRegionMmap>) -> io::Result<()> {
        let mut slots = self.slots();
        let free = (0..).find(|number| !slots.contains_key(number));
        let number = free.ok_or_else(|| io::Error::other("no slot is free"))?;
        let host = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(io::Error::other)?;
        let slot = kvm_userspace_memory_region {
            slot: number,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: host.expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: `host` is the start of a mapping of `memory_size` bytes that
        // belongs to `region`. It stays mapped while a guest can reach it: only
        // `SlottedVcpu::run` runs one, each holds this machine, and `slots`
        // holds the region until the slot is gone. No Rust reference to guest
        // memory is ever made, so the guest may write to it at any time. The
        // number is free, and KVM refuses slots that overlap.
        unsafe { self.vm.set_user_memory_region(slot) }?;
        slots.insert(number, Arc::clone(region));
        Ok(())
    }

    fn remove(&self, region: &Arc<GuestRegionMmap>) -> io::Result<()> {
        let mut slots = self.slots();
        let mut of_region = slots.iter().filter(|(_, set)| Arc::ptr_eq(set, region));
        let number = *of_region
            .next()
            .ok_or_else(|| io::Error::other("the region has no slot"))?
            .0;
        let nothing = kvm_userspace_memory_region {
            slot: number,
            ..kvm_userspace_memory_region::default()
        };
        // SAFETY: a slot of no bytes gives no memory; it takes a slot away.
        unsafe { self.vm.set_user_memory_region(nothing) }?;
        slots.remove(&number);
        Ok(())
    }
}

impl SlottedVcpu {
    /// The vCPU, to be set up or looked at, but not run.
    pub(crate) const fn state(&self) -> &VcpuFd {
        &self.fd
    }

    /// Its machine.
    pub(crate) const fn machine(&self) -> &Arc<SlottedVm> {
        &self.vm
    }

    /// Carries out what is left of the last exit, an `out` say, so that its state is
    /// complete. No instruction is run.
    pub(crate) fn complete(&mut self) -> anyhow::Result<()> {
        self.fd.set_kvm_immediate_exit(1);
        let ran = self.fd.run().map(|exit| format!("{exit:?}"));
        self.fd.set_kvm_immediate_exit(0);
        match ran {
            Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => Ok(()),
            other => anyhow::bail!("the exit is not completed: {other:?}"),
        }
    }

    /// `KVM_SET_XSAVE`.
    pub(crate) fn set_xsave(&self, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
        // SAFETY: KVM reads no more than `kvm_xsave` has unless the process was
        // granted features whose state is larger (ARCH_REQ_XCOMP_GUEST_PERM), for
        // which this program never asks.
        unsafe { self.fd.set_xsave(xsave) }
    }

    /// Runs the guest until its next exit.
    pub(crate) fn run(&mut self) -> Result<VcpuExit<'_>, kvm_ioctls::Error> {
        self.fd.run()
    }
}

/// Advises the kernel on the huge pages of every region of `memory`.
pub(crate) fn advise_huge(memory: &GuestMemoryMmap, huge: bool) -> io::Result<()> {
    let advice = if huge {
        Advice::LinuxHugepage
    } else {
        Advice::LinuxNoHugepage
    };
    advise(memory, advice)
}

/// Lets the kernel's KSM merge every region of `memory`.
pub(crate) fn advise_mergeable(memory: &GuestMemoryMmap) -> io::Result<()> {
    advise(memory, Advice::LinuxMergeable)
}

/// Takes every region of `memory` back from the kernel's KSM, which copies what it
/// has merged.
pub(crate) fn advise_unmergeable(memory: &GuestMemoryMmap) -> io::Result<()> {
    advise(memory, Advice::LinuxUnmergeable)
}

/// Only for advice that changes no contents.
fn advise(memory: &GuestMemoryMmap, advice: Advice) -> io::Result<()> {
    for region in memory.iter() {
        let host = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(io::Error::other)?;
        // SAFETY: the range is exactly the mapping that belongs to `region`,
        // which is alive. Advice on huge pages and on merging changes neither
        // contents nor where they are mapped, only which physical pages the
        // kernel uses below, and how large they are.
        unsafe { rustix::mm::madvise(host.cast(), region.size(), advice) }?;
    }
    Ok(())
}
