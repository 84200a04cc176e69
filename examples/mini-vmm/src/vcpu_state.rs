//! [`VcpuState`]: what a vCPU holds, to be given to that of a clone.

use anyhow::{Context as _, ensure};
use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};

use crate::kvm_slots::SlottedVcpu;

/// Model-specific registers that 64-bit code sees: time stamp, system calls, memory
/// types, the segment base that is kept for the kernel.
const MSRS: [u32; 10] = [
    0x10,
    0x174,
    0x175,
    0x176,
    0x277,
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    0xc000_0102,
];

/// The state of a vCPU that does not run, without interrupt controller.
pub(crate) struct VcpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    xcrs: kvm_xcrs,
    xsave: kvm_xsave,
    debug: kvm_debugregs,
    msrs: Msrs,
    events: kvm_vcpu_events,
    mp_state: kvm_mp_state,
}

impl VcpuState {
    /// What `vcpu` holds, after its last exit.
    pub(crate) fn of(vcpu: &mut SlottedVcpu) -> anyhow::Result<Self> {
        vcpu.complete()?;
        let fd = vcpu.state();
        let entry = |index| kvm_msr_entry {
            index,
            ..kvm_msr_entry::default()
        };
        let mut msrs = Msrs::from_entries(&MSRS.map(entry)).context("a list of MSRs")?;
        let read = fd.get_msrs(&mut msrs).context("KVM_GET_MSRS")?;
        ensure!(read == MSRS.len(), "KVM has only {read} of the MSRs");
        Ok(Self {
            regs: fd.get_regs().context("KVM_GET_REGS")?,
            sregs: fd.get_sregs().context("KVM_GET_SREGS")?,
            xcrs: fd.get_xcrs().context("KVM_GET_XCRS")?,
            xsave: fd.get_xsave().context("KVM_GET_XSAVE")?,
            debug: fd.get_debug_regs().context("KVM_GET_DEBUGREGS")?,
            msrs,
            events: fd.get_vcpu_events().context("KVM_GET_VCPU_EVENTS")?,
            mp_state: fd.get_mp_state().context("KVM_GET_MP_STATE")?,
        })
    }

    /// Lets `vcpu`, which knows its CPUID, hold the same.
    pub(crate) fn give_to(&self, vcpu: &SlottedVcpu) -> anyhow::Result<()> {
        let fd = vcpu.state();
        fd.set_sregs(&self.sregs).context("KVM_SET_SREGS")?;
        fd.set_regs(&self.regs).context("KVM_SET_REGS")?;
        fd.set_xcrs(&self.xcrs).context("KVM_SET_XCRS")?;
        vcpu.set_xsave(&self.xsave).context("KVM_SET_XSAVE")?;
        fd.set_debug_regs(&self.debug)
            .context("KVM_SET_DEBUGREGS")?;
        let set = fd.set_msrs(&self.msrs).context("KVM_SET_MSRS")?;
        ensure!(set == MSRS.len(), "KVM takes only {set} of the MSRs");
        fd.set_vcpu_events(&self.events)
            .context("KVM_SET_VCPU_EVENTS")?;
        fd.set_mp_state(self.mp_state).context("KVM_SET_MP_STATE")
    }
}
