//! A vCPU of a Linux guest: as the boot protocol wants it, and what its thread
//! does.

use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use kvm_bindings::{CpuId, kvm_lapic_state, kvm_regs};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::io::Errno;
use vm_memory::GuestAddress;

use super::boot::DESCRIPTORS_LIMIT;
use super::gate::{End, Gate};
use super::layout::{DESCRIPTORS, PAGE_TABLES, STACK, ZERO_PAGE};
use super::ports::Ports;
use crate::kvm_slots::SlottedVcpu;
use crate::long_mode::{self, Selectors};

/// `__BOOT_CS` and `__BOOT_DS` of the boot protocol: ring 0.
const SELECTORS: Selectors = Selectors {
    code: 0x10,
    data: 0x18,
};
/// The task's: nothing switches tasks, but a processor wants one.
const TASK_SELECTOR: u16 = 0x20;
/// The flag that is always set.
const RFLAGS: u64 = 2;

/// Local APIC registers, by offset: what comes in at its two pins.
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
/// Delivery modes: the interrupt controller says which vector; non-maskable.
const FROM_PIC: u32 = 7 << 8;
const NMI: u32 = 4 << 8;

/// Makes a vCPU know its number, and its local APIC what is wired to it. The first
/// begins at `entry`; the others wait to be started by it.
pub(super) fn set_up(
    vcpu: &VcpuFd,
    supported: &CpuId,
    number: u8,
    entry: GuestAddress,
) -> anyhow::Result<()> {
    vcpu.set_cpuid2(&cpuid(supported, number))
        .context("KVM_SET_CPUID2")?;
    let mut lapic = vcpu.get_lapic().context("KVM_GET_LAPIC")?;
    set_register(&mut lapic, LVT_LINT0, FROM_PIC);
    set_register(&mut lapic, LVT_LINT1, NMI);
    vcpu.set_lapic(&lapic).context("KVM_SET_LAPIC")?;
    if number > 0 {
        return Ok(());
    }
    let mut sregs = vcpu.get_sregs().context("KVM_GET_SREGS")?;
    long_mode::enter(&mut sregs, SELECTORS, PAGE_TABLES);
    sregs.gdt.base = DESCRIPTORS.0;
    sregs.gdt.limit = DESCRIPTORS_LIMIT;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.tr.selector = TASK_SELECTOR;
    sregs.tr.base = 0;
    sregs.tr.limit = 0xf_ffff;
    sregs.tr.type_ = 11;
    sregs.tr.present = 1;
    sregs.tr.g = 1;
    vcpu.set_sregs(&sregs).context("KVM_SET_SREGS")?;
    let regs = kvm_regs {
        rip: entry.0,
        rsi: ZERO_PAGE.0,
        rsp: STACK,
        rbp: STACK,
        rflags: RFLAGS,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).context("KVM_SET_REGS")
}

/// What this CPU says of itself: what KVM can, its number, and that it is virtual.
/// KVM does not count in what its local APIC can: time by the clock of the CPU.
fn cpuid(supported: &CpuId, number: u8) -> CpuId {
    const HYPERVISOR: u32 = 1 << 31;
    const TSC_DEADLINE: u32 = 1 << 24;
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                entry.ebx = entry.ebx & 0x00ff_ffff | u32::from(number) << 24;
                entry.ecx |= HYPERVISOR | TSC_DEADLINE;
            }
            0xb | 0x1f => entry.edx = number.into(),
            _ => {}
        }
    }
    cpuid
}

fn set_register(lapic: &mut kvm_lapic_state, offset: usize, value: u32) {
    for (register, byte) in lapic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
        *register = byte.cast_signed();
    }
}

/// Runs a vCPU whenever the gate lets it, until the guest or somebody else ends
/// that.
pub(super) fn run(mut vcpu: SlottedVcpu, ports: &Mutex<Ports>, gate: &Gate) {
    let mut pass = gate.pass();
    loop {
        let state = vcpu.state();
        // A guest with KVM's clock is told, so that its watchdogs do not bark. Others
        // have no such clock to tell.
        let go = pass.go(|| {
            let _ = state.kvmclock_ctrl();
        });
        if !go {
            return;
        }
        if let Some(end) = run_once(&mut vcpu, ports) {
            gate.end(end);
        }
    }
}

/// Runs the guest to its next exit.
fn run_once(vcpu: &mut SlottedVcpu, ports: &Mutex<Ports>) -> Option<End> {
    let ports = || ports.lock().unwrap_or_else(PoisonError::into_inner);
    let why = match vcpu.run() {
        Ok(VcpuExit::IoOut(port, bytes)) => match ports().write(port, bytes) {
            Ok(reset) => return reset.then_some(End::Reset),
            Err(error) => format!("{error:#}"),
        },
        Ok(VcpuExit::IoIn(port, bytes)) => {
            ports().read(port, bytes);
            return None;
        }
        // Nothing is there.
        Ok(VcpuExit::MmioRead(_, bytes)) => {
            bytes.fill(u8::MAX);
            return None;
        }
        Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr) => return None,
        // Three faults in one, which is a way to reset as well (`reboot=t`).
        Ok(VcpuExit::Shutdown) => "a triple fault".to_owned(),
        Ok(VcpuExit::InternalError) => {
            "KVM_EXIT_INTERNAL_ERROR (an instruction that this KVM does not emulate?)".to_owned()
        }
        Ok(exit) => format!("{exit:?}"),
        Err(error) => match Errno::from_raw_os_error(error.errno()) {
            // Called back, or (one that waits to be started) woken.
            Errno::INTR | Errno::AGAIN => return None,
            _ => format!("KVM_RUN: {error}"),
        },
    };
    let at = vcpu.state().get_regs().map(|regs| regs.rip);
    let at = at.map_or_else(|error| error.to_string(), |rip| format!("{rip:#x}"));
    Some(End::Failed(format!("{why} at {at}")))
}
