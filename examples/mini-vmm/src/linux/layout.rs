//! Where things stand in a Linux guest's physical memory, and what it is told of
//! it.

use anyhow::Context as _;
use ksm_core::page::PAGE_SIZE_U64;
use linux_loader::loader::bootparam::boot_e820_entry;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _};

/// Segment descriptors, as the boot protocol wants them.
pub(super) const DESCRIPTORS: GuestAddress = GuestAddress(0x500);
/// The zero page: `boot_params` of the boot protocol.
pub(super) const ZERO_PAGE: GuestAddress = GuestAddress(0x7000);
/// Where the first stack begins, downwards.
pub(super) const STACK: u64 = 0x8ff0;
/// The first page tables: three pages.
pub(super) const PAGE_TABLES: u64 = 0x9000;
/// The command line.
pub(super) const CMDLINE: GuestAddress = GuestAddress(0x2_0000);
/// Room for the command line, with the zero behind it, in bytes: what Linux reads
/// on x86 (`COMMAND_LINE_SIZE`).
pub(super) const CMDLINE_BYTES: usize = 2048;
/// Memory ends here: what follows, up to [`HIGH_MEMORY`], is firmware's.
const BASE_MEMORY_END: u64 = 0x9_fc00;
/// ACPI's tables: Linux looks for the first of them from here on.
pub(super) const ACPI: GuestAddress = GuestAddress(0xe_0000);
/// Room for them, in bytes.
pub(super) const ACPI_BYTES: usize = 0x2_0000;
/// Memory from here on is a kernel's.
pub(super) const HIGH_MEMORY: GuestAddress = GuestAddress(0x10_0000);
/// Memory ends here, and goes on at [`AFTER_HOLE`]: between are the addresses of
/// devices, the interrupt controllers' among them.
const HOLE: u64 = 0xc000_0000;
const AFTER_HOLE: u64 = 1 << 32;
/// Where KVM has the local APICs of all CPUs.
pub(super) const LOCAL_APIC: u32 = 0xfee0_0000;
/// Where KVM has its IOAPIC.
pub(super) const IO_APIC: u32 = 0xfec0_0000;

/// What BIOS calls memory that can be used.
const E820_RAM: u32 = 1;

/// Maps a guest's memory.
pub(super) fn map(bytes: u64) -> anyhow::Result<GuestMemoryMmap> {
    let mut ranges = Vec::new();
    for (start, bytes) in ranges_of(bytes) {
        ranges.push((GuestAddress(start), usize::try_from(bytes)?));
    }
    GuestMemoryMmap::from_ranges(&ranges).context("cannot map guest memory")
}

/// Start and length of each piece of memory.
fn ranges_of(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let below = bytes.min(HOLE);
    [(0, below), (AFTER_HOLE, bytes - below)]
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
}

/// The memory map that the guest is given.
pub(super) fn e820(memory: &GuestMemoryMmap) -> Vec<boot_e820_entry> {
    let entry = |start: u64, end: u64| boot_e820_entry {
        addr: start,
        size: end - start,
        r#type: E820_RAM,
    };
    let mut map = vec![entry(0, BASE_MEMORY_END)];
    for region in memory.iter() {
        let start = region.start_addr().0.max(HIGH_MEMORY.0);
        let end = region.start_addr().0 + region.len();
        if start < end {
            map.push(entry(start, end));
        }
    }
    map
}

/// The highest place for `bytes` bytes below `limit`, in the memory below the hole
/// and not before `floor`.
pub(super) fn highest_place(
    memory: &GuestMemoryMmap,
    floor: u64,
    limit: u64,
    bytes: u64,
) -> Option<GuestAddress> {
    let region = memory.find_region(HIGH_MEMORY)?;
    let end = limit.min(region.len());
    let start = end.checked_sub(bytes)? & !(PAGE_SIZE_U64 - 1);
    (start >= floor).then_some(GuestAddress(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn spans(memory: &GuestMemoryMmap) -> Vec<(u64, u64)> {
        let span = |entry: boot_e820_entry| {
            assert_eq!({ entry.r#type }, E820_RAM);
            (entry.addr, entry.addr + entry.size)
        };
        e820(memory).into_iter().map(span).collect()
    }

    #[test]
    fn the_map_leaves_out_what_is_not_memory() {
        let small = map(128 * MIB).unwrap();
        assert_eq!(spans(&small), [(0, 0x9_fc00), (0x10_0000, 128 * MIB)]);
        let large = map(5 * GIB).unwrap();
        let expected = [(0, 0x9_fc00), (0x10_0000, 0xc000_0000), (4 * GIB, 6 * GIB)];
        assert_eq!(spans(&large), expected);
        assert_eq!(
            large.iter().map(|region| region.len()).sum::<u64>(),
            5 * GIB
        );
    }

    #[test]
    fn a_place_is_the_highest_that_is_allowed() {
        let memory = map(64 * MIB).unwrap();
        let place = |floor, limit, bytes| highest_place(&memory, floor, limit, bytes);
        let at = |address| Some(GuestAddress(address));
        assert_eq!(place(MIB, u64::MAX, 1), at(64 * MIB - 4096));
        assert_eq!(place(MIB, u64::MAX, 4097), at(64 * MIB - 8192));
        assert_eq!(place(MIB, 32 * MIB, 4096), at(32 * MIB - 4096));
        assert_eq!(place(60 * MIB, u64::MAX, 4 * MIB), at(60 * MIB));
        assert_eq!(place(60 * MIB, u64::MAX, 4 * MIB + 1), None);
        assert_eq!(place(0, u64::MAX, 65 * MIB), None);
    }
}
