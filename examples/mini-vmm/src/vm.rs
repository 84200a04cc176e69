//! [`KvmCpu`]: a vCPU under KVM, in 64-bit mode from its first instruction.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress};

use crate::cpu::Cpu;
use crate::kvm_slots::{SlottedVcpu, SlottedVm};
use crate::layout::{
    CODE, CODE_BYTES, Command, DESCRIPTORS, MAILBOX, MAX_ADDRESS, PAGE_TABLES, REPORT_PORT,
    WORK_BASE, lockstep_list,
};
use crate::long_mode::{self, Selectors};
use crate::payload;
use crate::ram::Ram;
use crate::vcpu_state::VcpuState;

/// In ring 3. Nothing is ever loaded from them, so there is no descriptor table.
const SELECTORS: Selectors = Selectors {
    code: 0x1b,
    data: 0x23,
};
/// I/O privilege level 3, and the bit that is always set.
const RFLAGS: u64 = 0x3002;

/// A vCPU, and the memory in which it is told what to do.
#[derive(Debug)]
pub(crate) struct KvmCpu {
    vcpu: SlottedVcpu,
    ram: Ram,
}

impl KvmCpu {
    /// Makes a machine on `ram`, whose page tables reach `end`, and runs it up to its
    /// first report.
    pub(crate) fn new(kvm: &Kvm, ram: Ram, end: u64) -> anyhow::Result<Self> {
        let code = payload::assemble().context("cannot assemble the payload")?;
        if code.len() as u64 > CODE_BYTES {
            bail!("the payload's {} bytes do not fit", code.len());
        }
        if end > MAX_ADDRESS {
            bail!("memory up to {end:#x} is more than the page tables can map");
        }
        ram.all.write_slice(&code, GuestAddress(CODE))?;
        long_mode::map_one_to_one(&ram.all, PAGE_TABLES, end)?;
        let vm = kvm.create_vm().context("KVM_CREATE_VM")?;
        let vm = SlottedVm::new(vm, &ram.all).context("KVM_SET_USER_MEMORY_REGION")?;
        let list = lockstep_list(ram.pages());
        Self::start(kvm, vm, 0, ram, Place { base: 0, list })
    }

    /// Adds a vCPU to a running machine, and runs it up to its first report: it works
    /// at the window at `base`, which is to have `pages` pages, and hears of commands
    /// in the mailbox of `ram`.
    pub(crate) fn add_to(
        machine: Arc<SlottedVm>,
        number: u64,
        ram: Ram,
        base: u64,
        pages: u64,
    ) -> anyhow::Result<Self> {
        let kvm = Kvm::new().context("/dev/kvm")?;
        let list = base + lockstep_list(pages);
        Self::start(&kvm, machine, number, ram, Place { base, list })
    }

    fn start(
        kvm: &Kvm,
        machine: Arc<SlottedVm>,
        number: u64,
        ram: Ram,
        place: Place,
    ) -> anyhow::Result<Self> {
        let vcpu = new_vcpu(kvm, machine, number)?;
        let mut sregs = vcpu.state().get_sregs()?;
        long_mode::enter(&mut sregs, SELECTORS, PAGE_TABLES);
        vcpu.state().set_sregs(&sregs).context("KVM_SET_SREGS")?;
        vcpu.state().set_regs(&kvm_regs {
            rip: CODE,
            rbx: place.base + MAILBOX,
            r15: place.base + DESCRIPTORS,
            r14: place.base + WORK_BASE,
            r13: place.list,
            rflags: RFLAGS,
            ..kvm_regs::default()
        })?;
        let mut cpu = Self { vcpu, ram };
        cpu.run_to_report()?;
        Ok(cpu)
    }

    fn run_to_report(&mut self) -> anyhow::Result<()> {
        loop {
            let exit = match self.vcpu.run() {
                Ok(VcpuExit::IoOut(REPORT_PORT, _)) => return Ok(()),
                Ok(VcpuExit::Intr) => continue,
                Ok(exit) => format!("{exit:?}"),
                Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => continue,
                Err(error) => format!("KVM_RUN: {error}"),
            };
            let at = self.vcpu.state().get_regs().map(|regs| regs.rip);
            bail!("the guest ended with {exit} at {at:#x?}");
        }
    }
}

/// What a vCPU works at.
#[derive(Clone, Copy, Debug)]
struct Place {
    base: u64,
    /// Address of the lockstep list.
    list: u64,
}

fn new_vcpu(kvm: &Kvm, machine: Arc<SlottedVm>, number: u64) -> anyhow::Result<SlottedVcpu> {
    let vcpu = machine.vcpu(number).context("KVM_CREATE_VCPU")?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    vcpu.state().set_cpuid2(&cpuid)?;
    Ok(vcpu)
}

impl Cpu for KvmCpu {
    fn fork(&mut self, ram: Ram) -> anyhow::Result<Box<dyn Cpu>> {
        let kvm = Kvm::new().context("/dev/kvm")?;
        let vm = kvm.create_vm().context("KVM_CREATE_VM")?;
        let vm = SlottedVm::new(vm, &ram.all).context("KVM_SET_USER_MEMORY_REGION")?;
        let vcpu = new_vcpu(&kvm, vm, 0)?;
        VcpuState::of(&mut self.vcpu)?.give_to(&vcpu)?;
        Ok(Box::new(Self { vcpu, ram }))
    }

    fn machine(&self) -> Option<Arc<SlottedVm>> {
        Some(Arc::clone(self.vcpu.machine()))
    }

    fn run(&mut self, command: Command) -> anyhow::Result<()> {
        self.ram.post(command)?;
        self.run_to_report()
    }
}

#[cfg(test)]
mod tests {
    use ksm_core::page::{PAGE_SIZE_U64, bytes_in};
    use ksm_vmm_glue::Slots as _;
    use vm_memory::GuestRegionMmap;

    use super::*;
    use crate::args::MemoryKind;
    use crate::content::PageSpec;
    use crate::host_cpu::HostCpu;
    use crate::layout::{Windows, control_bytes, mail};
    use crate::plan::Plan;
    use crate::ram::page_address;
    use crate::verify::wrong_pages;

    const PAGES: u64 = 600;

    fn plan() -> Plan {
        let recipe =
            "common=30,unique=10,zero=20,rewritten=40,stretch=20,lastbyte=20,order=scattered";
        Plan::new(&recipe.parse().unwrap(), PAGES, 1, 3)
    }

    fn ram(plan: &Plan) -> Ram {
        let ram = Ram::new(PAGES, MemoryKind::Anonymous).unwrap();
        ram.write_plan(plan).unwrap();
        ram
    }

    fn kvm_cpu(ram: &Ram) -> KvmCpu {
        let kvm =
            Kvm::new().expect("this test runs a guest: it needs /dev/kvm, readable and writable");
        let end = Windows::default().end(ram.pages());
        KvmCpu::new(&kvm, ram.clone(), end).unwrap()
    }

    /// What the guest writes and counts is what the VMM expects of it.
    fn fills_rewrites_and_checks(ram: &Ram, cpu: &mut dyn Cpu) {
        let plan = plan();
        cpu.run(Command::Fill {
            first: 0,
            end: PAGES,
        })
        .unwrap();
        assert_eq!(wrong_pages(ram, |page| plan.page(page)).unwrap(), [0u64; 0]);

        let (first, end, times) = (10, 50, 3);
        cpu.run(Command::Rewrite { first, end, times }).unwrap();
        let rewritten: Vec<u64> = plan.lockstep[10..50].to_vec();
        let expected = |page| PageSpec {
            counter: if rewritten.contains(&page) { times } else { 0 },
            ..plan.page(page)
        };
        assert_eq!(wrong_pages(ram, expected).unwrap(), [0u64; 0]);
        assert_eq!(ram.mail(mail::STORES_CHECKED).unwrap(), 40 * 3 * 8);

        cpu.run(Command::Check {
            first: 0,
            end: PAGES,
        })
        .unwrap();
        assert_eq!(ram.mail(mail::PAGES_CHECKED).unwrap(), PAGES);
        assert_eq!(ram.mail(mail::LOST_PAGES).unwrap(), 0);
    }

    /// One wrong byte anywhere is found, by the guest and by the VMM.
    fn finds_damage(ram: &Ram, cpu: &mut dyn Cpu) {
        let plan = plan();
        cpu.run(Command::Fill {
            first: 0,
            end: PAGES,
        })
        .unwrap();
        let damaged: Vec<u64> = (0..PAGES).step_by(7).collect();
        for &page in &damaged {
            let mut byte = [0u8];
            let at = GuestAddress(page_address(page).0 + (page * 97) % PAGE_SIZE_U64);
            ram.all.read_slice(&mut byte, at).unwrap();
            ram.all.write_slice(&[byte[0] ^ 1], at).unwrap();
        }
        assert_eq!(wrong_pages(ram, |page| plan.page(page)).unwrap(), damaged);
        for _ in 0..2 {
            cpu.run(Command::Check {
                first: 0,
                end: PAGES,
            })
            .unwrap();
            let lost = ram.mail(mail::LOST_PAGES).unwrap();
            assert_eq!(lost, damaged.len() as u64, "each is counted once");
        }
        assert_eq!(ram.mail(mail::LAST_LOST).unwrap(), *damaged.last().unwrap());
    }

    /// A counter that stands wrong is found by the store that comes next.
    fn finds_lost_stores(ram: &Ram, cpu: &mut dyn Cpu) {
        let plan = plan();
        let list = plan.lockstep.len() as u64;
        cpu.run(Command::Fill {
            first: 0,
            end: PAGES,
        })
        .unwrap();
        let rewrite = Command::Rewrite {
            first: 0,
            end: list,
            times: 2,
        };
        cpu.run(rewrite).unwrap();
        let last_word = PAGE_SIZE_U64 - 8;
        let at = GuestAddress(page_address(plan.lockstep[5]).0 + last_word);
        ram.all.write_obj(1u64, at).unwrap();
        cpu.run(rewrite).unwrap();
        assert_eq!(ram.mail(mail::LOST_PAGES).unwrap(), 1);
        assert_eq!(ram.mail(mail::LAST_LOST).unwrap(), plan.lockstep[5]);
    }

    /// A page in flux is neither written nor checked.
    fn skips(ram: &Ram, cpu: &mut dyn Cpu) {
        ram.set_spec(3, crate::layout::SKIPPED).unwrap();
        cpu.run(Command::Fill { first: 0, end: 6 }).unwrap();
        cpu.run(Command::Check { first: 0, end: 6 }).unwrap();
        assert_eq!(ram.mail(mail::PAGES_CHECKED).unwrap(), 5);
        let mut page = [1; ksm_core::PAGE_SIZE];
        ram.read_page(3, &mut page).unwrap();
        assert_eq!(page, [0; ksm_core::PAGE_SIZE]);
    }

    const SCENARIOS: [fn(&Ram, &mut dyn Cpu); 5] = [
        is_cloned,
        fills_rewrites_and_checks,
        finds_damage,
        finds_lost_stores,
        skips,
    ];

    #[test]
    fn a_guest_under_kvm_does_as_told() {
        for scenario in SCENARIOS {
            let ram = ram(&plan());
            scenario(&ram, &mut kvm_cpu(&ram));
        }
    }

    /// The clone goes on where its parent stood, and neither sees the other's stores.
    fn is_cloned(ram: &Ram, cpu: &mut dyn Cpu) {
        let (first, end, times) = (0, PAGES, 2);
        cpu.run(Command::Fill { first, end }).unwrap();
        let list = plan().lockstep.len() as u64;
        let rewrite = Command::Rewrite {
            first: 0,
            end: list,
            times,
        };
        cpu.run(rewrite).unwrap();
        let clone = ram.clone_control().unwrap();
        let mut page = [0; ksm_core::PAGE_SIZE];
        for at in 0..PAGES {
            ram.read_page(at, &mut page).unwrap();
            clone.all.write_slice(&page, page_address(at)).unwrap();
        }
        let mut cpu_of_clone = cpu.fork(clone.clone()).unwrap();
        cpu_of_clone.run(rewrite).unwrap();
        for (ram, cpu) in [(ram, cpu), (&clone, cpu_of_clone.as_mut())] {
            cpu.run(Command::Check { first, end }).unwrap();
            assert_eq!(ram.mail(mail::PAGES_CHECKED).unwrap(), PAGES);
            assert_eq!(ram.mail(mail::STORES_CHECKED).unwrap(), list * times * 8);
            assert_eq!(ram.mail(mail::LOST_PAGES).unwrap(), 0);
        }
        let at = plan().lockstep[3];
        let counter = |ram: &Ram| -> u64 { ram.all.read_obj(page_address(at)).unwrap() };
        assert_eq!((counter(ram), counter(&clone)), (times, 2 * times));
    }

    /// A vCPU that is added works at memory that is added, and the first goes on.
    #[test]
    fn a_vcpu_is_added_with_memory() {
        let plan = plan();
        let ram = ram(&plan);
        let windows = Windows {
            count: 2,
            pages: PAGES,
        };
        let kvm = Kvm::new().expect("this test runs a guest");
        let mut first = KvmCpu::new(&kvm, ram.clone(), windows.end(PAGES)).unwrap();
        for number in 0..windows.count {
            let base = windows.base(PAGES, number);
            let [control, work] =
                [(0, control_bytes(PAGES)), (WORK_BASE, bytes_in(PAGES))].map(|(at, bytes)| {
                    let bytes = usize::try_from(bytes).unwrap();
                    let region = GuestRegionMmap::from_range(GuestAddress(base + at), bytes, None);
                    let region = Arc::new(region.unwrap());
                    first.vcpu.machine().set(&region).unwrap();
                    region
                });
            let window = Ram::window(base, control, Some(Arc::clone(&work))).unwrap();
            window.write_plan(&plan).unwrap();
            let machine = Arc::clone(first.vcpu.machine());
            let mut added =
                KvmCpu::add_to(machine, 1 + number, window.clone(), base, PAGES).unwrap();
            fills_rewrites_and_checks(&window, &mut added);
            first.vcpu.machine().remove(&work).unwrap();
            assert!(first.vcpu.machine().remove(&work).is_err());
        }
        fills_rewrites_and_checks(&ram, &mut first);
    }

    #[test]
    fn a_host_thread_does_as_told() {
        for scenario in SCENARIOS {
            let ram = ram(&plan());
            scenario(&ram, &mut HostCpu::new(ram.clone()));
        }
    }
}
