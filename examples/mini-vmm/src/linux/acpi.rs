//! ACPI tables: how a kernel finds its CPUs, the IOAPIC and the serial line's
//! interrupt. A machine without ACPI's own hardware ("hardware-reduced").

use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};

use super::layout::{IO_APIC, LOCAL_APIC};
use super::ports::{SERIAL, SERIAL_IRQ};

/// The most CPUs: numbers of CPUs and of the IOAPIC are below those of xAPICs that mean
/// all.
pub(super) const MAX_CPUS: u8 = 64;

const OEM: [u8; 6] = *b"KSM   ";
const MACHINE: [u8; 8] = *b"mini-vmm";
const REVISION: u32 = 1;
/// Of the DSDT: numbers are of 64 bits.
const DSDT_REVISION: u8 = 6;
/// Bytes of a table's header.
const HEADER: u32 = 36;
/// `IAPC_BOOT_ARCH`: there is no screen, and no clock of a PC's.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 5;

/// The tables of a machine with CPUs `0..cpus`, as they must stand from
/// guest-physical address `at` on: first what points to all others.
pub(super) fn tables(at: u64, cpus: u8) -> Vec<u8> {
    let mut bytes = vec![0; Rsdp::len()];
    let mut place = |table: Vec<u8>| {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let start = at + bytes.len() as u64;
        bytes.extend(table);
        start
    };
    let dsdt = place(dsdt());
    let mut fadt = FADTBuilder::new(OEM, MACHINE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    let mut root = XSDT::new(OEM, MACHINE, REVISION);
    root.add_entry(place(encoded(&fadt.finalize())));
    root.add_entry(place(encoded(&madt(cpus))));
    let pointer = Rsdp::new(OEM, place(encoded(&root)));
    bytes[..Rsdp::len()].copy_from_slice(&encoded(&pointer));
    bytes
}

/// CPUs and the IOAPIC.
fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM,
        MACHINE,
        REVISION,
        LocalInterruptController::Address(LOCAL_APIC),
    );
    for cpu in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(cpus, IO_APIC, 0));
    madt
}

/// Devices that a kernel does not find otherwise: with hardware-reduced ACPI the
/// serial line's interrupt is one.
fn dsdt() -> Vec<u8> {
    let interrupt = aml::Interrupt::new(true, true, false, false, SERIAL_IRQ);
    let ports = aml::IO::new(SERIAL, SERIAL, 0, 8);
    let serial = encoded(&aml::Device::new(
        "_SB_.COM1".into(),
        vec![
            // A 16550A.
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&interrupt, &ports]),
            ),
        ],
    ));
    let mut table = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM, MACHINE, REVISION);
    table.append_slice(&serial);
    table.as_slice().to_vec()
}

fn encoded(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::layout::{ACPI, ACPI_BYTES};

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn number<const N: usize>(bytes: &[u8], at: usize) -> usize {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&bytes[at..at + N]);
        usize::try_from(u64::from_le_bytes(wide)).unwrap()
    }

    /// The table at a guest-physical address, which must be sound.
    fn table(all: &[u8], address: usize) -> &[u8] {
        let start = address - usize::try_from(ACPI.0).unwrap();
        let table = &all[start..start + number::<4>(all, start + 4)];
        assert_eq!(sum(table), 0, "checksum of {:?}", &table[..4]);
        table
    }

    /// Walks from the first pointer to every table, as a kernel does.
    #[test]
    fn a_kernel_finds_all_tables() {
        for cpus in [1, 2, MAX_CPUS] {
            let all = tables(ACPI.0, cpus);
            assert!(all.len() <= ACPI_BYTES, "{cpus} CPUs do not fit");
            assert_eq!(&all[..8], b"RSD PTR ");
            assert_eq!((sum(&all[..20]), sum(&all[..36])), (0, 0));
            let root = table(&all, number::<8>(&all, 24));
            assert_eq!(&root[..4], b"XSDT");
            let [fadt, madt] = [36, 44].map(|at| table(&all, number::<8>(root, at)));
            assert_eq!((&fadt[..4], &madt[..4]), (&b"FACP"[..], &b"APIC"[..]));
            let dsdt = table(&all, number::<8>(fadt, 140));
            assert_eq!(&dsdt[..4], b"DSDT");

            let mut found = [0; 2];
            let mut rest = &madt[44..];
            while let [kind, bytes, ..] = *rest {
                found[usize::from(kind)] += 1;
                rest = &rest[usize::from(bytes)..];
            }
            assert_eq!(found, [usize::from(cpus), 1], "CPUs, IOAPICs");
        }
    }
}
