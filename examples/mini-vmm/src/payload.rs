//! The program that runs in every guest, assembled at run time.
//!
//! It reports at a port, reads the next command from the mailbox, carries it
//! out, and reports again. It runs in ring 3 with I/O privilege level 3, since
//! some nested hosts emulate ring 0; it needs no stack, takes no interrupt and
//! makes no call.
//!
//! Registers: `rbx` mailbox, `r15` descriptors, `r14` work memory, `r13`
//! lockstep list, which the VMM sets, for each vCPU its own; `rsi` the page's
//! number, `rdi` the page, `rbp` its descriptor.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmMemoryOperand, CodeAssembler, CodeLabel, al, dword_ptr, dx, ecx, qword_ptr, r8, r8d, r9,
    r9d, r10d, r11, r11d, r12, r13, r14, r15, rax, rbp, rbx, rcx, rdi, rsi,
};

use crate::content::{COUNTER_STRIDE, COUNTERS, HASH_FACTOR, HASH_ROTATE, Kind, WORDS};
use crate::layout::{CODE, REPORT_PORT, descriptor, mail, number};

type Emitted = Result<(), IcedError>;

/// The payload's machine code, to be placed at [`CODE`] and started at its
/// first byte.
pub(crate) fn assemble() -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let mut report = a.create_label();
    let mut fill = a.create_label();
    let mut check = a.create_label();
    let mut rewrite = a.create_label();

    a.set_label(&mut report)?;
    a.mov(dx, u32::from(REPORT_PORT))?;
    a.out(dx, al)?;
    a.mov(rax, word(mail::COMMAND))?;
    for (command, label) in [
        (number::FILL, fill),
        (number::CHECK, check),
        (number::REWRITE, rewrite),
    ] {
        a.cmp(rax, small(command))?;
        a.je(label)?;
    }
    a.jmp(report)?;

    a.set_label(&mut fill)?;
    for_each_page(&mut a, report, emit_fill)?;
    a.set_label(&mut check)?;
    for_each_page(&mut a, report, emit_check)?;
    a.set_label(&mut rewrite)?;
    emit_rewrite(&mut a, report)?;
    a.assemble(CODE)
}

/// A word of the mailbox.
fn word(offset: u64) -> AsmMemoryOperand {
    qword_ptr(rbx + small(offset))
}

/// A constant of the layout as an operand; all of them are small.
fn small(value: u64) -> i32 {
    i32::try_from(value).expect("constants of the layout fit an operand")
}

/// [`small`] for counts of words.
fn count(value: usize) -> i32 {
    i32::try_from(value).expect("a page has few words")
}

fn kind(kind: Kind) -> i32 {
    small(u64::from(kind as u32))
}

/// `rdi` and `rbp` from `rsi`.
fn emit_locate(a: &mut CodeAssembler) -> Emitted {
    a.mov(rdi, rsi)?;
    a.shl(rdi, ksm_core::page::PAGE_SHIFT)?;
    a.add(rdi, r14)?;
    a.mov(rbp, rsi)?;
    a.shl(rbp, descriptor::SHIFT)?;
    a.add(rbp, r15)
}

/// `rax` one step on in its stream. Changes `r8`.
fn emit_step(a: &mut CodeAssembler) -> Emitted {
    a.mov(r8, rax)?;
    a.shl(r8, 13)?;
    a.xor(rax, r8)?;
    a.mov(r8, rax)?;
    a.shr(r8, 7)?;
    a.xor(rax, r8)?;
    a.mov(r8, rax)?;
    a.shl(r8, 17)?;
    a.xor(rax, r8)
}

/// Counts page `rsi` as lost, once for ever.
fn emit_lost(a: &mut CodeAssembler) -> Emitted {
    let mut counted = a.create_label();
    a.cmp(dword_ptr(rbp + small(descriptor::LOST)), 0)?;
    a.jne(counted)?;
    a.mov(dword_ptr(rbp + small(descriptor::LOST)), 1)?;
    a.inc(word(mail::LOST_PAGES))?;
    a.mov(word(mail::LAST_LOST), rsi)?;
    a.set_label(&mut counted)?;
    a.zero_bytes()
}

/// Runs `body` for pages FIRST..END that are not to be skipped, then jumps to
/// `done`. The body jumps to the label it is given, or falls through.
fn for_each_page(
    a: &mut CodeAssembler,
    done: CodeLabel,
    body: impl FnOnce(&mut CodeAssembler, CodeLabel) -> Emitted,
) -> Emitted {
    let mut again = a.create_label();
    let mut next = a.create_label();
    a.mov(rsi, word(mail::FIRST))?;
    a.set_label(&mut again)?;
    a.cmp(rsi, word(mail::END))?;
    a.jae(done)?;
    emit_locate(a)?;
    a.cmp(dword_ptr(rbp), kind(Kind::Skip))?;
    a.je(next)?;
    body(a, next)?;
    a.set_label(&mut next)?;
    a.inc(rsi)?;
    a.jmp(again)
}

/// Writes one page.
fn emit_fill(a: &mut CodeAssembler, next: CodeLabel) -> Emitted {
    let mut words = a.create_label();
    let mut repeat = a.create_label();
    a.mov(rax, qword_ptr(rbp + small(descriptor::KEY)))?;
    a.mov(ecx, count(WORDS))?;
    a.cmp(dword_ptr(rbp), kind(Kind::Repeat))?;
    a.jne(words)?;

    a.set_label(&mut repeat)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(rdi, 8)?;
    a.dec(ecx)?;
    a.jnz(repeat)?;
    a.jmp(next)?;

    a.set_label(&mut words)?;
    emit_step(a)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(rdi, 8)?;
    a.dec(ecx)?;
    a.jnz(words)?;
    a.mov(rax, qword_ptr(rbp + small(descriptor::TAIL)))?;
    a.xor(qword_ptr(rdi - 8), rax)?;
    a.cmp(dword_ptr(rbp), kind(Kind::Lockstep))?;
    a.jne(next)?;
    a.mov(rax, qword_ptr(rbp + small(descriptor::COUNTER)))?;
    for counter in 0..COUNTERS {
        // rdi stands at the page's end.
        a.mov(
            qword_ptr(rdi + (counter_offset(counter) - count(8 * WORDS))),
            rax,
        )?;
    }
    Ok(())
}

/// Byte offset of a counter in its page.
fn counter_offset(counter: usize) -> i32 {
    count(8 * COUNTER_STRIDE * counter)
}

/// `r8` the hash of the page at `rdi`, which then stands at its end. Changes
/// `r9` and `r11`.
fn emit_hash(a: &mut CodeAssembler) -> Emitted {
    let mut words = a.create_label();
    a.xor(r8d, r8d)?;
    a.mov(r9, HASH_FACTOR)?;
    a.mov(r11d, count(WORDS))?;
    a.set_label(&mut words)?;
    a.xor(r8, qword_ptr(rdi))?;
    a.imul_2(r8, r9)?;
    a.rol(r8, HASH_ROTATE)?;
    a.add(rdi, 8)?;
    a.dec(r11d)?;
    a.jnz(words)
}

/// Compares one page, word by word, or by its hash.
fn emit_check(a: &mut CodeAssembler, next: CodeLabel) -> Emitted {
    let mut repeat = a.create_label();
    let mut words = a.create_label();
    let mut plain = a.create_label();
    let mut compared = a.create_label();
    let mut lost = a.create_label();
    let mut known_words = a.create_label();

    a.inc(word(mail::PAGES_CHECKED))?;
    a.mov(rax, qword_ptr(rbp + small(descriptor::KEY)))?;
    a.cmp(dword_ptr(rbp), kind(Kind::Image))?;
    a.jne(known_words)?;
    emit_hash(a)?;
    a.cmp(r8, rax)?;
    a.jne(lost)?;
    a.jmp(next)?;

    a.set_label(&mut known_words)?;
    a.mov(ecx, count(WORDS))?;
    a.cmp(dword_ptr(rbp), kind(Kind::Repeat))?;
    a.je(repeat)?;

    // r9d counts down to the next counter; in a plain stream it starts too high.
    a.mov(r11, qword_ptr(rbp + small(descriptor::COUNTER)))?;
    a.mov(r9d, 1)?;
    a.cmp(dword_ptr(rbp), kind(Kind::Lockstep))?;
    a.je(words)?;
    a.mov(r9d, count(WORDS + 1))?;

    a.set_label(&mut words)?;
    emit_step(a)?;
    a.dec(r9d)?;
    a.jnz(plain)?;
    a.cmp(r11, qword_ptr(rdi))?;
    a.jne(lost)?;
    a.mov(r9d, count(COUNTER_STRIDE))?;
    a.jmp(compared)?;
    a.set_label(&mut plain)?;
    a.mov(r8, rax)?;
    let mut middle = a.create_label();
    a.cmp(ecx, 1)?;
    a.jne(middle)?;
    a.xor(r8, qword_ptr(rbp + small(descriptor::TAIL)))?;
    a.set_label(&mut middle)?;
    a.cmp(r8, qword_ptr(rdi))?;
    a.jne(lost)?;
    a.set_label(&mut compared)?;
    a.add(rdi, 8)?;
    a.dec(ecx)?;
    a.jnz(words)?;
    a.jmp(next)?;

    a.set_label(&mut repeat)?;
    a.cmp(rax, qword_ptr(rdi))?;
    a.jne(lost)?;
    a.add(rdi, 8)?;
    a.dec(ecx)?;
    a.jnz(repeat)?;
    a.jmp(next)?;

    a.set_label(&mut lost)?;
    emit_lost(a)
}

/// TIMES times: for each page of the list's part, checks every counter, then
/// increments it; checks a page of an image, then rewrites or restores it. Many pages are shared with other guests just then, or are
/// being merged.
fn emit_rewrite(a: &mut CodeAssembler, done: CodeLabel) -> Emitted {
    let mut again = a.create_label();
    let mut page = a.create_label();
    let mut pass_done = a.create_label();
    a.mov(r12, word(mail::TIMES))?;

    a.set_label(&mut again)?;
    a.test(r12, r12)?;
    a.jz(done)?;
    a.dec(r12)?;
    a.mov(rcx, word(mail::FIRST))?;
    a.set_label(&mut page)?;
    a.cmp(rcx, word(mail::END))?;
    a.jae(pass_done)?;
    a.mov(rsi, qword_ptr(r13 + rcx * 8))?;
    emit_locate(a)?;
    let mut written = a.create_label();
    let mut counters = a.create_label();
    a.cmp(dword_ptr(rbp), kind(Kind::Image))?;
    a.jne(counters)?;
    emit_rewrite_image(a)?;
    a.jmp(written)?;
    a.set_label(&mut counters)?;
    a.mov(rax, qword_ptr(rbp + small(descriptor::COUNTER)))?;
    a.xor(r8d, r8d)?;
    a.xor(r10d, r10d)?;
    for counter in 0..COUNTERS {
        let mut right = a.create_label();
        let place = qword_ptr(rdi + counter_offset(counter));
        a.cmp(place, rax)?;
        a.je(right)?;
        // Set right, so that the next store is checked for itself.
        a.mov(r10d, 1)?;
        a.mov(place, rax)?;
        a.set_label(&mut right)?;
        a.inc(place)?;
        a.inc(r8d)?;
    }
    a.add(word(mail::STORES_CHECKED), r8)?;
    a.inc(rax)?;
    a.mov(qword_ptr(rbp + small(descriptor::COUNTER)), rax)?;
    a.set_label(&mut written)?;
    let mut intact = a.create_label();
    a.test(r10d, r10d)?;
    a.jz(intact)?;
    emit_lost(a)?;
    a.set_label(&mut intact)?;
    a.inc(rcx)?;
    a.jmp(page)?;
    a.set_label(&mut pass_done)?;
    a.jmp(again)
}

/// Checks a page of an image, XORs the mask into its words, and exchanges what it
/// is to be known by. `r10d` is 1 if it was wrong before.
fn emit_rewrite_image(a: &mut CodeAssembler) -> Emitted {
    let mut right = a.create_label();
    emit_hash(a)?;
    a.xor(r10d, r10d)?;
    a.mov(rax, qword_ptr(rbp + small(descriptor::KEY)))?;
    a.cmp(r8, rax)?;
    a.je(right)?;
    a.mov(r10d, 1)?;
    a.set_label(&mut right)?;
    a.mov(r8, qword_ptr(rbp + small(descriptor::COUNTER)))?;
    for counter in 0..COUNTERS {
        // rdi stands at the page's end.
        let place = rdi + (counter_offset(counter) - count(8 * WORDS));
        a.xor(qword_ptr(place), r8)?;
    }
    a.add(word(mail::STORES_CHECKED), count(COUNTERS))?;
    a.mov(r8, qword_ptr(rbp + small(descriptor::TAIL)))?;
    a.mov(qword_ptr(rbp + small(descriptor::KEY)), r8)?;
    a.mov(qword_ptr(rbp + small(descriptor::TAIL)), rax)
}
