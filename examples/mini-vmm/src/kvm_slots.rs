//! Guest memory by its host address: memory slots and advice. The only unsafe
//! code of this program.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use rustix::mm::Advice;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

/// A virtual machine whose slots are the regions of a guest memory, which it
/// keeps mapped.
#[derive(Debug)]
pub(crate) struct SlottedVm {
    vm: VmFd,
    /// Held, never read: the slots point into it.
    _memory: GuestMemoryMmap,
}

/// A vCPU that keeps its machine, and so its memory, for as long as it can run.
#[derive(Debug)]
pub(crate) struct SlottedVcpu {
    fd: VcpuFd,
    _vm: Arc<SlottedVm>,
}

impl SlottedVm {
    /// Gives every region of `memory` to `vm`, which must have no slots yet.
    pub(crate) fn new(vm: VmFd, memory: GuestMemoryMmap) -> anyhow::Result<Arc<Self>> {
        for (slot, region) in (0..).zip(memory.iter()) {
            let host = region.get_host_address(MemoryRegionAddress(0))?;
            let slot = kvm_userspace_memory_region {
                slot,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: host.expose_provenance() as u64,
                flags: 0,
            };
            // SAFETY: `host` is the start of a mapping of `memory_size` bytes
            // that belongs to `region`. It stays mapped while a guest can run:
            // only `SlottedVcpu::run` runs one, each holds this machine, and
            // this machine holds `_memory`. No Rust reference to guest memory is
            // ever made, so the guest may write to it at any time. The slots of
            // `vm` are fresh, and vm-memory's regions do not overlap.
            unsafe { vm.set_user_memory_region(slot) }?;
        }
        Ok(Arc::new(Self {
            vm,
            _memory: memory,
        }))
    }

    /// Makes a vCPU.
    pub(crate) fn vcpu(self: Arc<Self>, id: u64) -> Result<SlottedVcpu, kvm_ioctls::Error> {
        let fd = self.vm.create_vcpu(id)?;
        Ok(SlottedVcpu { fd, _vm: self })
    }
}

impl SlottedVcpu {
    /// The vCPU, to be set up or looked at, but not run.
    pub(crate) const fn state(&self) -> &VcpuFd {
        &self.fd
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
