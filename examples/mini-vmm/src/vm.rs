//! [`KvmCpu`]: a guest under KVM with one vCPU, in 64-bit mode from its first
//! instruction.

use anyhow::{Context as _, bail};
use ksm_core::page::bytes_in;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress};

use crate::cpu::Cpu;
use crate::kvm_slots::{SlottedVcpu, SlottedVm};
use crate::layout::{
    CODE, CODE_BYTES, Command, PAGE_TABLES, REPORT_PORT, WORK_BASE, lockstep_list,
};
use crate::long_mode::{self, Selectors};
use crate::payload;
use crate::ram::Ram;

/// In ring 3. Nothing is ever loaded from them, so there is no descriptor table.
const SELECTORS: Selectors = Selectors {
    code: 0x1b,
    data: 0x23,
};
/// I/O privilege level 3, and the bit that is always set.
const RFLAGS: u64 = 0x3002;

/// A guest's vCPU.
#[derive(Debug)]
pub(crate) struct KvmCpu {
    vcpu: SlottedVcpu,
    ram: Ram,
}

impl KvmCpu {
    /// Makes a machine on `ram`, and runs it up to its first report.
    pub(crate) fn new(kvm: &Kvm, ram: Ram) -> anyhow::Result<Self> {
        let code = payload::assemble().context("cannot assemble the payload")?;
        if code.len() as u64 > CODE_BYTES {
            bail!("the payload's {} bytes do not fit", code.len());
        }
        ram.all.write_slice(&code, GuestAddress(CODE))?;
        let end = WORK_BASE + bytes_in(ram.pages());
        long_mode::map_one_to_one(&ram.all, PAGE_TABLES, end)?;

        let vm = kvm.create_vm().context("KVM_CREATE_VM")?;
        let vm = SlottedVm::new(vm, ram.all.clone()).context("KVM_SET_USER_MEMORY_REGION")?;
        let vcpu = vm.vcpu(0).context("KVM_CREATE_VCPU")?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        vcpu.state().set_cpuid2(&cpuid)?;
        let mut sregs = vcpu.state().get_sregs()?;
        long_mode::enter(&mut sregs, SELECTORS, PAGE_TABLES);
        vcpu.state().set_sregs(&sregs).context("KVM_SET_SREGS")?;
        vcpu.state().set_regs(&kvm_regs {
            rip: CODE,
            r13: lockstep_list(ram.pages()),
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

impl Cpu for KvmCpu {
    fn run(&mut self, command: Command) -> anyhow::Result<()> {
        self.ram.post(command)?;
        self.run_to_report()
    }
}

#[cfg(test)]
mod tests {
    use ksm_core::page::PAGE_SIZE_U64;

    use super::*;
    use crate::args::MemoryKind;
    use crate::content::PageSpec;
    use crate::host_cpu::HostCpu;
    use crate::layout::mail;
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
        KvmCpu::new(&kvm, ram.clone()).unwrap()
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

    const SCENARIOS: [fn(&Ram, &mut dyn Cpu); 4] = [
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

    #[test]
    fn a_host_thread_does_as_told() {
        for scenario in SCENARIOS {
            let ram = ram(&plan());
            scenario(&ram, &mut HostCpu::new(ram.clone()));
        }
    }
}
