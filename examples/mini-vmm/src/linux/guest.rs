//! [`LinuxGuest`]: a machine that runs Linux, with a thread for each vCPU.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::Context as _;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::{Killable as _, SIGRTMIN, register_signal_handler};

use super::boot;
use super::console::{Console, Watch};
use super::gate::{End, Gate, Order};
use super::options::BootOptions;
use super::ports::{Interrupt, Ports, SERIAL_IRQ};
use super::vcpu;
use crate::kvm_slots::SlottedVm;

/// Three pages that KVM needs on processors by Intel, below the BIOS.
const TSS: usize = 0xfffb_d000;

/// A guest. It is held until [`LinuxGuest::resume`].
#[derive(Debug)]
pub(super) struct LinuxGuest {
    memory: GuestMemoryMmap,
    gate: Arc<Gate>,
    watch: Arc<Watch>,
    threads: Vec<JoinHandle<()>>,
}

impl LinuxGuest {
    /// Makes the machine on `memory`, loads the kernel, starts the vCPUs' threads.
    pub(super) fn new(
        kvm: &Kvm,
        memory: GuestMemoryMmap,
        options: &BootOptions,
        console: Console,
    ) -> anyhow::Result<Self> {
        let entry = boot::load(&memory, options)?;
        let vm = kvm.create_vm().context("KVM_CREATE_VM")?;
        let interrupt = wire(&vm)?;
        let vm = SlottedVm::new(vm, &memory).context("KVM_SET_USER_MEMORY_REGION")?;
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .context("KVM_GET_SUPPORTED_CPUID")?;
        let mut vcpus = Vec::new();
        for number in 0..options.vcpus {
            let vcpu = Arc::clone(&vm)
                .vcpu(number.into())
                .context("KVM_CREATE_VCPU")?;
            vcpu::set_up(vcpu.state(), &supported, number, entry)?;
            vcpus.push(vcpu);
        }
        let watch = console.watch();
        let ports = Arc::new(Mutex::new(Ports::new(interrupt, console)));
        let mut guest = Self {
            memory,
            gate: Arc::default(),
            watch,
            threads: Vec::new(),
        };
        for (number, vcpu) in vcpus.into_iter().enumerate() {
            let (gate, ports) = (Arc::clone(&guest.gate), Arc::clone(&ports));
            let thread = thread::Builder::new()
                .name(format!("vcpu-{number}"))
                .spawn(move || vcpu::run(vcpu, &ports, &gate))
                .context("cannot start a vCPU's thread")?;
            guest.threads.push(thread);
        }
        Ok(guest)
    }

    /// Lets the guest run, unless it has ended.
    pub(super) fn resume(&self) {
        self.gate.order(Order::Go);
    }

    /// Holds the guest. On return none of its vCPUs runs.
    ///
    /// # Errors
    /// When one hangs.
    pub(super) fn pause(&self) -> anyhow::Result<()> {
        self.gate.order(Order::Wait);
        self.gate.wait_until_empty(|| self.call())
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        self.gate.ended()
    }

    /// What is seen on its console.
    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Its memory.
    pub(super) const fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Makes vCPUs come back from the guest.
    fn call(&self) {
        for thread in &self.threads {
            // One whose thread has ended hears nothing, which is no mistake.
            let _ = thread.kill(SIGRTMIN());
        }
    }
}

impl Drop for LinuxGuest {
    fn drop(&mut self) {
        self.gate.order(Order::Leave);
        match self.gate.wait_until_empty(|| self.call()) {
            Ok(()) => {
                for thread in self.threads.drain(..) {
                    // If it panicked, that is the guest's end.
                    let _ = thread.join();
                }
            }
            // It keeps its memory for itself; the process can still end.
            Err(error) => eprintln!("mini-vmm: {error:#}"),
        }
    }
}

/// KVM's own devices, and the line of the serial one. Returns its other end.
fn wire(vm: &VmFd) -> anyhow::Result<Interrupt> {
    vm.set_tss_address(TSS).context("KVM_SET_TSS_ADDR")?;
    vm.create_irq_chip().context("KVM_CREATE_IRQCHIP")?;
    let timer = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..kvm_pit_config::default()
    };
    vm.create_pit2(timer).context("KVM_CREATE_PIT2")?;
    let interrupt = EventFd::new(EFD_NONBLOCK).context("eventfd")?;
    vm.register_irqfd(&interrupt, SERIAL_IRQ)
        .context("KVM_IRQFD")?;
    Ok(Interrupt(interrupt))
}

/// Sets up what [`LinuxGuest::pause`] calls vCPUs with: a signal that does nothing
/// but interrupt. Once for the process.
pub(super) fn listen_for_calls() -> anyhow::Result<()> {
    extern "C" fn nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {}
    register_signal_handler(SIGRTMIN(), nothing).context("cannot handle a signal")
}
