//! A kernel of a few hundred bytes that is started as Linux is. Unlike Linux it runs
//! on any KVM, nested ones that emulate ring 0 included.
//!
//! It prints on COM1 what it was told by the boot protocol: command line, ramdisk,
//! entries of the memory map. Then it fills some pages, which are equal in all guests,
//! prints `ready`, and does as the first letter of its command line says: `r` resets by
//! the keyboard controller, `c` by the chipset, `f` faults, anything else beats for ever.

use iced_x86::code_asm::*;

/// Where it is loaded.
const BASE: u64 = 0x10_0000;
/// Pages that it fills, and where: two guests' can be one frame's (`max_page_sharing`).
pub(crate) const PAGES: u64 = 100;
const FILLED: u64 = 0x80_0000;

/// Offsets in the zero page (`Documentation/arch/x86/zero-page.rst`).
const E820_ENTRIES: i32 = 0x1e8;
const RAMDISK_IMAGE: i32 = 0x218;
const RAMDISK_SIZE: i32 = 0x21c;
const CMDLINE: i32 = 0x228;
const SERIAL: u32 = 0x3f8;

/// Prints the byte in `al`.
fn put(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    asm.mov(edx, SERIAL)?;
    asm.out(dx, al)
}

fn print(asm: &mut CodeAssembler, text: &str) -> Result<(), IcedError> {
    for byte in text.bytes() {
        asm.mov(eax, u32::from(byte))?;
        put(asm)?;
    }
    Ok(())
}

/// Prints `ecx` bytes from `rbx` on.
fn print_bytes(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut next, mut done) = (asm.create_label(), asm.create_label());
    asm.set_label(&mut next)?;
    asm.test(ecx, ecx)?;
    asm.jz(done)?;
    asm.movzx(eax, byte_ptr(rbx))?;
    put(asm)?;
    asm.inc(rbx)?;
    asm.dec(ecx)?;
    asm.jmp(next)?;
    asm.set_label(&mut done)?;
    asm.nop()
}

/// Counts into `ecx` the bytes before the zero, from `rbx` on.
fn measure(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut next, mut done) = (asm.create_label(), asm.create_label());
    asm.xor(ecx, ecx)?;
    asm.set_label(&mut next)?;
    asm.cmp(byte_ptr(rbx + rcx), 0)?;
    asm.je(done)?;
    asm.inc(ecx)?;
    asm.jmp(next)?;
    asm.set_label(&mut done)?;
    asm.nop()
}

fn say_what_it_was_told(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    print(asm, "cmdline: ")?;
    asm.mov(ebx, dword_ptr(rsi + CMDLINE))?;
    measure(asm)?;
    print_bytes(asm)?;
    print(asm, "\nramdisk: ")?;
    asm.mov(ebx, dword_ptr(rsi + RAMDISK_IMAGE))?;
    asm.mov(ecx, dword_ptr(rsi + RAMDISK_SIZE))?;
    print_bytes(asm)?;
    print(asm, "\ne820: ")?;
    asm.movzx(eax, byte_ptr(rsi + E820_ENTRIES))?;
    asm.add(eax, u32::from(b'0'))?;
    put(asm)?;
    print(asm, "\n")
}

fn do_as_told(asm: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut not = [(); 3].map(|()| asm.create_label());
    asm.mov(ebx, dword_ptr(rsi + CMDLINE))?;
    asm.movzx(ebx, byte_ptr(rbx))?;
    let resets = [(b'r', 0x64u32, 0xfeu32), (b'c', 0xcf9, 6)];
    for ((letter, port, value), not) in resets.into_iter().zip(&mut not) {
        asm.cmp(ebx, u32::from(letter))?;
        asm.jne(*not)?;
        asm.mov(edx, port)?;
        asm.mov(eax, value)?;
        asm.out(dx, al)?;
        asm.set_label(not)?;
        asm.nop()?;
    }
    asm.cmp(ebx, u32::from(b'f'))?;
    asm.jne(not[2])?;
    asm.ud2()?;
    asm.set_label(&mut not[2])?;
    asm.nop()?;

    let (mut beat, mut wait) = (asm.create_label(), asm.create_label());
    asm.set_label(&mut beat)?;
    asm.nop()?;
    print(asm, "beat\n")?;
    asm.mov(ecx, 20_000u32)?;
    asm.set_label(&mut wait)?;
    asm.dec(ecx)?;
    asm.jnz(wait)?;
    asm.jmp(beat)
}

fn code(base: u64) -> Vec<u8> {
    let mut asm = CodeAssembler::new(64).unwrap();
    let mut assemble = || {
        say_what_it_was_told(&mut asm)?;
        asm.mov(rdi, FILLED)?;
        asm.mov(ecx, u32::try_from(PAGES * 512).unwrap())?;
        asm.mov(rax, 0x5eed_5eed_5eed_5eed_u64)?;
        asm.cld()?;
        asm.rep().stosq()?;
        print(&mut asm, "ready\n")?;
        do_as_told(&mut asm)?;
        asm.assemble(base)
    };
    assemble().unwrap()
}

/// An ELF file: a header, one segment, its code.
pub(crate) fn elf() -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    let code = code(BASE);
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // An executable for x86-64, version 1.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [BASE, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0; 4]);
    for half in [64u16, 56, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // Loaded, readable and executable.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    let bytes = code.len() as u64;
    for word in [HEADERS, BASE, BASE, bytes, bytes, 4096] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// A bzImage: a setup sector and one more, with a header, and code whose 64-bit entry
/// is 0x200 bytes behind its start.
pub(crate) fn bz_image() -> Vec<u8> {
    let mut file = vec![0u8; 2 * 512];
    let mut set = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    set(0x1f1, &[1]);
    set(0x1fe, &0xaa55u16.to_le_bytes());
    set(0x202, b"HdrS");
    // Version 2.12, loaded high, where, ramdisks where.
    set(0x206, &0x20cu16.to_le_bytes());
    set(0x211, &[1]);
    set(0x214, &u32::try_from(BASE).unwrap().to_le_bytes());
    set(0x22c, &0x7fff_ffffu32.to_le_bytes());
    // There is a 64-bit entry; memory that it takes.
    set(0x236, &1u16.to_le_bytes());
    set(0x260, &0x10_0000u32.to_le_bytes());
    // Would fault: the entry is behind it.
    file.extend([0x0f, 0x0b].repeat(0x100));
    file.extend(code(BASE + 0x200));
    file
}
