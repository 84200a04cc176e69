//! The multiprocessor table: how a kernel without ACPI finds its CPUs and
//! interrupts (Intel's MultiProcessor Specification 1.4, chapter 4).
//!
//! The kernel must be built with `CONFIG_X86_MPPARSE`; one that is not sees one CPU.

/// Where KVM has the local APICs of all CPUs.
const LOCAL_APIC: u32 = 0xfee0_0000;
/// Where KVM has its IOAPIC.
const IO_APIC: u32 = 0xfec0_0000;
const LOCAL_APIC_VERSION: u8 = 0x14;
const IO_APIC_VERSION: u8 = 0x11;
/// Version 1.4 of the specification.
const SPECIFICATION: u8 = 4;
/// Lines of an ISA bus. KVM connects each to the IOAPIC's pin of its number.
const LINES: u8 = 16;
/// Means all local APICs.
const EVERY_APIC: u8 = 0xff;
const POINTER_BYTES: u32 = 16;

/// Kinds of entries.
mod kind {
    pub(super) const PROCESSOR: u8 = 0;
    pub(super) const BUS: u8 = 1;
    pub(super) const IO_APIC: u8 = 2;
    pub(super) const LINE: u8 = 3;
    pub(super) const LOCAL_LINE: u8 = 4;
}

/// Kinds of interrupts.
mod interrupt {
    pub(super) const VECTORED: u8 = 0;
    pub(super) const NMI: u8 = 1;
    pub(super) const FROM_PIC: u8 = 3;
}

/// The most CPUs that the table has room for, within a KiB.
pub(super) const MAX_CPUS: u8 = 32;

/// The table of a machine with CPUs `0..cpus`, the pointer to it before it, as it
/// must stand at guest-physical address `at`.
pub(super) fn table(at: u32, cpus: u8) -> Vec<u8> {
    let entries = entries(cpus);
    let mut table = header(&entries);
    for entry in &entries {
        table.extend(entry);
    }
    table[7] = checksum(&table);

    let mut bytes = pointer(at + POINTER_BYTES);
    bytes.extend(table);
    bytes
}

/// The MP floating pointer structure.
fn pointer(table: u32) -> Vec<u8> {
    let mut bytes = b"_MP_".to_vec();
    bytes.extend(table.to_le_bytes());
    // One paragraph long, checksum to come, no default configuration, no IMCR.
    bytes.extend([1, SPECIFICATION, 0, 0, 0, 0, 0, 0]);
    bytes[10] = checksum(&bytes);
    bytes
}

/// The MP configuration table header.
fn header(entries: &[Vec<u8>]) -> Vec<u8> {
    const BYTES: usize = 44;
    let bytes = BYTES + entries.iter().map(Vec::len).sum::<usize>();
    let short = |number: usize| u16::try_from(number).expect("the table is within a KiB");
    let mut header = b"PCMP".to_vec();
    header.extend(short(bytes).to_le_bytes());
    header.extend([SPECIFICATION, 0]);
    header.extend(b"KSM     mini-vmm    ");
    // No table of the manufacturer's.
    header.extend([0; 6]);
    header.extend(short(entries.len()).to_le_bytes());
    header.extend(LOCAL_APIC.to_le_bytes());
    // No extended table.
    header.extend([0; 4]);
    assert_eq!(header.len(), BYTES);
    header
}

/// CPUs, buses, IOAPIC, lines: in this order.
fn entries(cpus: u8) -> Vec<Vec<u8>> {
    assert!((1..=MAX_CPUS).contains(&cpus));
    let io_apic = cpus;
    let mut entries: Vec<Vec<u8>> = (0..cpus).map(processor).collect();
    let mut bus = vec![kind::BUS, 0];
    bus.extend(b"ISA   ");
    entries.push(bus);
    let mut pins = vec![kind::IO_APIC, io_apic, IO_APIC_VERSION, 1];
    pins.extend(IO_APIC.to_le_bytes());
    entries.push(pins);
    // Polarity and trigger, the two zeros behind the kind, are as the bus has them.
    for line in 0..LINES {
        let vectored = interrupt::VECTORED;
        entries.push(vec![kind::LINE, vectored, 0, 0, 0, line, io_apic, line]);
    }
    for (pin, kind_of) in [(0, interrupt::FROM_PIC), (1, interrupt::NMI)] {
        entries.push(vec![kind::LOCAL_LINE, kind_of, 0, 0, 0, 0, EVERY_APIC, pin]);
    }
    entries
}

fn processor(id: u8) -> Vec<u8> {
    const ENABLED: u8 = 1;
    const BOOTS: u8 = 2;
    /// A Pentium Pro, as all since claim to be.
    const SIGNATURE: u32 = 0x600;
    /// Floating point, and a local APIC.
    const FEATURES: u32 = 0x201;
    let flags = if id == 0 { ENABLED | BOOTS } else { ENABLED };
    let mut entry = vec![kind::PROCESSOR, id, LOCAL_APIC_VERSION, flags];
    entry.extend(SIGNATURE.to_le_bytes());
    entry.extend(FEATURES.to_le_bytes());
    entry.extend([0; 8]);
    entry
}

/// What makes all bytes add up to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0, |sum: u8, byte| sum.wrapping_sub(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::layout::{MP_TABLE, MP_TABLE_BYTES};

    const AT: u32 = 0x9_fc00;

    /// Walks the table as `arch/x86/kernel/mpparse.c` does.
    fn count_entries(table: &[u8]) -> [usize; 5] {
        let mut counts = [0; 5];
        let mut rest = &table[44..];
        while let Some(&kind) = rest.first() {
            counts[usize::from(kind)] += 1;
            rest = &rest[if kind == kind::PROCESSOR { 20 } else { 8 }..];
        }
        counts
    }

    #[test]
    fn a_kernel_finds_all_there_is() {
        assert_eq!(u64::from(AT), MP_TABLE.0);
        for cpus in [1, 2, MAX_CPUS] {
            let bytes = table(AT, cpus);
            assert!(bytes.len() <= MP_TABLE_BYTES, "{cpus} CPUs do not fit");
            let (pointer, table) = bytes.split_at(16);
            assert_eq!(&pointer[..4], b"_MP_");
            assert_eq!(&table[..4], b"PCMP");
            for part in [pointer, table] {
                assert_eq!(
                    part.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
                    0
                );
            }
            let word = |at: usize| u32::from_le_bytes(pointer[at..at + 4].try_into().unwrap());
            assert_eq!(word(4), AT + 16);
            let half = |at: usize| u16::from_le_bytes([table[at], table[at + 1]]);
            assert_eq!(usize::from(half(4)), table.len());
            let counts = count_entries(table);
            assert_eq!(counts, [usize::from(cpus), 1, 1, 16, 2]);
            assert_eq!(usize::from(half(34)), counts.iter().sum::<usize>());
        }
    }

    #[test]
    fn the_first_cpu_boots_and_ids_are_distinct() {
        let bytes = table(AT, 3);
        let cpus = bytes[16 + 44..].chunks(20).take(3);
        let ids_and_flags: Vec<_> = cpus.map(|cpu| (cpu[1], cpu[3])).collect();
        assert_eq!(ids_and_flags, [(0, 3), (1, 1), (2, 1)]);
        let io_apic = &bytes[16 + 44 + 3 * 20 + 8..][..8];
        assert_eq!(io_apic[1], 3, "no CPU's");
    }
}
