//! A kernel in guest memory, with its ramdisk and all that it is told: the x86
//! boot protocol (`Documentation/arch/x86/boot.rst`).

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use linux_loader::cmdline::Cmdline;
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator as _, BootParams};
use linux_loader::loader::bootparam::{boot_params, setup_header};
use linux_loader::loader::{BzImage, Elf, KernelLoader as _, load_cmdline};
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemoryMmap};

use super::acpi;
use super::layout::{
    ACPI, ACPI_BYTES, CMDLINE, CMDLINE_BYTES, DESCRIPTORS, HIGH_MEMORY, PAGE_TABLES, ZERO_PAGE,
    e820, highest_place,
};
use super::options::BootOptions;
use crate::long_mode::map_one_to_one;

/// What the file of an ELF kernel begins with.
const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
/// The 64-bit entry of a bzImage, from where its protected-mode part is loaded.
const ENTRY_64: u64 = 0x200;
/// `xloadflags`: there is such an entry.
const XLF_KERNEL_64: u16 = 1;
/// First version of the protocol that has `xloadflags`.
const WITH_XLOADFLAGS: u16 = 0x20c;
/// Ramdisks end below this, unless the kernel says otherwise.
const RAMDISK_LIMIT: u64 = 0x8000_0000;
/// Of memory that the first page tables map.
const MAPPED: u64 = 1 << 30;

/// Null, unused, 64-bit code, data, task: flat, in ring 0.
const FLAT: [u64; 5] = [
    0,
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x008f_8b00_0000_ffff,
];
/// Bytes of the descriptors less one, as a limit is given.
pub(super) const DESCRIPTORS_LIMIT: u16 = 5 * 8 - 1;

/// A loaded kernel.
struct Kernel {
    entry: GuestAddress,
    /// One past its last byte of memory.
    end: u64,
    header: setup_header,
}

/// Puts everything into `memory`. Returns where the first CPU is to begin.
pub(super) fn load(
    memory: &GuestMemoryMmap,
    options: &BootOptions,
) -> anyhow::Result<GuestAddress> {
    let kernel = load_kernel(memory, &options.kernel)
        .with_context(|| format!("cannot load {}", options.kernel.display()))?;
    let mut params = boot_params {
        hdr: kernel.header,
        ..boot_params::default()
    };
    write_cmdline(memory, &options.cmdline, &mut params.hdr)?;
    if let Some(ramdisk) = &options.initrd {
        load_ramdisk(memory, ramdisk, kernel.end, &mut params.hdr)
            .with_context(|| format!("cannot load {}", ramdisk.display()))?;
    }
    for entry in e820(memory) {
        params.e820_table[usize::from(params.e820_entries)] = entry;
        params.e820_entries += 1;
    }
    params.acpi_rsdp_addr = ACPI.0;
    LinuxBootConfigurator::write_bootparams(&BootParams::new(&params, ZERO_PAGE), memory)?;

    for (at, descriptor) in (0..).zip(FLAT) {
        memory.write_obj(descriptor, DESCRIPTORS.unchecked_add(at * 8))?;
    }
    map_one_to_one(memory, PAGE_TABLES, MAPPED)?;
    let tables = acpi::tables(ACPI.0, options.vcpus);
    assert!(tables.len() <= ACPI_BYTES, "there are not too many CPUs");
    memory.write_slice(&tables, ACPI)?;
    Ok(kernel.entry)
}

fn load_kernel(memory: &GuestMemoryMmap, path: &Path) -> anyhow::Result<Kernel> {
    let mut file = File::open(path)?;
    let mut magic = [0; 4];
    file.read_exact(&mut magic)?;
    if magic == ELF_MAGIC {
        let loaded = Elf::load(memory, None, &mut file, Some(HIGH_MEMORY))?;
        return Ok(Kernel {
            entry: loaded.kernel_load,
            end: loaded.kernel_end,
            header: elf_header(),
        });
    }
    let loaded = BzImage::load(memory, None, &mut file, Some(HIGH_MEMORY))?;
    let header = loaded.setup_header.context("no setup header")?;
    if header.version < WITH_XLOADFLAGS || header.xloadflags & XLF_KERNEL_64 == 0 {
        bail!("it is no 64-bit kernel, or older than Linux 3.8");
    }
    // It unpacks itself, and says how much memory that takes.
    let needs = loaded.kernel_load.0 + u64::from(header.init_size);
    Ok(Kernel {
        entry: loaded.kernel_load.unchecked_add(ENTRY_64),
        end: loaded.kernel_end.max(needs),
        header,
    })
}

/// What stands in a bzImage's own header otherwise.
fn elf_header() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(*b"HdrS"),
        kernel_alignment: 0x20_0000,
        loadflags: 1,
        ..setup_header::default()
    }
}

fn write_cmdline(
    memory: &GuestMemoryMmap,
    text: &str,
    header: &mut setup_header,
) -> anyhow::Result<()> {
    let cmdline = Cmdline::try_from(text, CMDLINE_BYTES)
        .with_context(|| format!("--cmdline: {CMDLINE_BYTES} bytes of ASCII are the most"))?;
    load_cmdline(memory, CMDLINE, &cmdline)?;
    // No loader that was given a number.
    header.type_of_loader = 0xff;
    header.cmd_line_ptr = u32::try_from(CMDLINE.0).expect("in the first MiB");
    header.cmdline_size = u32::try_from(CMDLINE_BYTES).expect("a page at most");
    Ok(())
}

/// Loads the ramdisk as high as the kernel takes it.
fn load_ramdisk(
    memory: &GuestMemoryMmap,
    path: &Path,
    floor: u64,
    header: &mut setup_header,
) -> anyhow::Result<()> {
    let mut file = File::open(path)?;
    let bytes = file.seek(std::io::SeekFrom::End(0))?;
    file.rewind()?;
    let limit = match header.initrd_addr_max {
        0 => RAMDISK_LIMIT,
        last => u64::from(last) + 1,
    };
    let at = highest_place(memory, floor, limit, bytes).with_context(|| {
        format!(
            "{} MiB do not fit behind the kernel, which ends at {} MiB: give the guest more (--mem)",
            bytes.div_ceil(1 << 20),
            floor.div_ceil(1 << 20)
        )
    })?;
    memory.read_exact_volatile_from(at, &mut file, usize::try_from(bytes)?)?;
    header.ramdisk_image = u32::try_from(at.0)?;
    header.ramdisk_size = u32::try_from(bytes)?;
    Ok(())
}
