//! 64-bit mode from a vCPU's first instruction: segments, control registers,
//! page tables.

use ksm_core::page::PAGE_SIZE_U64;
use kvm_bindings::{kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Present, writable, user, accessed: what every level of the page tables has.
const TABLE: u64 = 0x27;
/// The same for a page of 2 MiB, dirty too.
const HUGE_PAGE: u64 = 0xe7;
const ENTRIES: u64 = 512;
const GIB: u64 = 1 << 30;

/// Protection, numeric error, extension type, write-protect, alignment mask, paging.
const CR0: u64 = 0x8005_0033;
/// Physical address extension.
const CR4: u64 = 0x20;
/// Long mode, enabled and active.
const EFER: u64 = 0x500;

/// Selectors of flat segments; their requested privilege level is the guest's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selectors {
    pub(crate) code: u16,
    pub(crate) data: u16,
}

/// Maps addresses from 0 up to `end`, at least, one to one, with pages of 2 MiB.
/// `top` is where the tables begin: one page for each of the upper two levels,
/// then one for each GiB.
pub(crate) fn map_one_to_one(memory: &GuestMemoryMmap, top: u64, end: u64) -> anyhow::Result<()> {
    let pointers = top + PAGE_SIZE_U64;
    let directories = pointers + PAGE_SIZE_U64;
    memory.write_obj(pointers | TABLE, GuestAddress(top))?;
    for gib in 0..end.div_ceil(GIB) {
        let directory = directories + gib * PAGE_SIZE_U64;
        memory.write_obj(directory | TABLE, GuestAddress(pointers + gib * 8))?;
        for entry in 0..ENTRIES {
            let page = gib * GIB + entry * (GIB / ENTRIES);
            memory.write_obj(page | HUGE_PAGE, GuestAddress(directory + entry * 8))?;
        }
    }
    Ok(())
}

/// Long mode with flat segments, on the page tables at `top`. In ring 3 if the
/// selectors say so: the user bits in the page tables allow it.
pub(crate) fn enter(sregs: &mut kvm_sregs, selectors: Selectors, top: u64) {
    let code = kvm_segment {
        limit: u32::MAX,
        selector: selectors.code,
        type_: 11,
        present: 1,
        dpl: (selectors.code & 3) as u8,
        s: 1,
        l: 1,
        g: 1,
        ..kvm_segment::default()
    };
    let data = kvm_segment {
        selector: selectors.data,
        type_: 3,
        l: 0,
        db: 1,
        ..code
    };
    sregs.cs = code;
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = data;
    }
    sregs.cr0 = CR0;
    sregs.cr3 = top;
    sregs.cr4 = CR4;
    sregs.efer = EFER;
}
