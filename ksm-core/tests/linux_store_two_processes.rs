//! A store's read-only descriptor in the hands of another process: it can read
//! and map frames, and change nothing.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use ksm_core::backend::linux::StopMethod;
use ksm_core::backend::{Backend, FrameStore};
use ksm_core::page::{FrameId, FrameRange, PAGE_SIZE_U64, PageBuf};
use linux_common::{View, again, backend, become_nobody, full_of};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, fstat,
    ftruncate, memfd_create, open,
};
use rustix::io::{Errno, pread, pwrite};
use rustix::mm::{MapFlags, ProtFlags};

const FRAMES: FrameRange = FrameRange {
    start: FrameId(0),
    len: 4,
};
const PAGES: usize = 4;
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

#[test]
fn another_process_reads_frames_and_changes_none() {
    let Some(mut other) = again("another_process_reads_frames_and_changes_none") else {
        // The descriptor comes as standard input.
        let stdin = std::io::stdin();
        reads_frames(stdin.as_fd());
        changes_none(stdin.as_fd());
        become_nobody();
        cannot_open_it_to_write();
        println!("all of it was tried");
        return;
    };
    let store = backend(StopMethod::Auto).open_store().unwrap();
    for (byte, frame) in (11..).zip(FRAMES.iter()) {
        store.fill(frame, &full_of(byte)).unwrap();
    }
    let before = store.allocated_bytes().unwrap();
    let ended = other.stdin(store.open_read_only().unwrap()).output();
    let ended = ended.unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && said.contains("all of it was tried"),
        "{}: {said} {}",
        ended.status,
        String::from_utf8_lossy(&ended.stderr)
    );
    assert_eq!(store.allocated_bytes().unwrap(), before);
    let mut buf = PageBuf::zeroed();
    for (byte, frame) in (11..).zip(FRAMES.iter()) {
        store.read(frame, &mut buf).unwrap();
        assert_eq!(buf, full_of(byte), "{frame}");
    }
}

/// Mapped privately, frames show, and what is written to them stays here.
fn reads_frames(store: BorrowedFd<'_>) {
    let view = View::new(store, PAGES, READ_WRITE, MapFlags::PRIVATE).unwrap();
    let bytes = || [0, 1, 2, 3].map(|page| view.load(page));
    assert_eq!(bytes(), [11, 12, 13, 14]);
    view.store(1, 99);
    assert_eq!(bytes(), [11, 99, 13, 14]);
    let mut byte = [0];
    pread(store, &mut byte, PAGE_SIZE_U64).unwrap();
    assert_eq!(byte, [12], "the frame is as it was");
    let other = View::new(store, PAGES, ProtFlags::READ, MapFlags::SHARED).unwrap();
    assert_eq!(other.load(1), 12);
}

fn changes_none(store: BorrowedFd<'_>) {
    // Not through a shared mapping, made or turned writable.
    let shared = View::new(store, PAGES, READ_WRITE, MapFlags::SHARED);
    assert_eq!(shared.err(), Some(Errno::ACCESS));
    let shared = View::new(store, PAGES, ProtFlags::READ, MapFlags::SHARED).unwrap();
    assert_eq!(shared.make_writable(), Err(Errno::ACCESS));
    // Not by writing, growing, shrinking or punching.
    assert_eq!(pwrite(store, &[1], 0), Err(Errno::BADF));
    let len = u64::try_from(fstat(store).unwrap().st_size).unwrap();
    for len in [0, len - PAGE_SIZE_U64, len + PAGE_SIZE_U64] {
        assert_eq!(ftruncate(store, len), Err(Errno::INVAL));
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for flags in [FallocateFlags::empty(), FallocateFlags::ZERO_RANGE, punch] {
        assert_eq!(fallocate(store, flags, 0, PAGE_SIZE_U64), Err(Errno::BADF));
    }
    // Nor can it keep the owner from its work.
    assert_eq!(fcntl_add_seals(store, SealFlags::WRITE), Err(Errno::PERM));
}

/// A descriptor can be opened anew through /proc, with other rights: those that
/// the file's mode gives.
fn cannot_open_it_to_write() {
    let reopen = |fd: i32, flags| open(format!("/proc/self/fd/{fd}"), flags, Mode::empty());
    for flags in [OFlags::WRONLY, OFlags::RDWR] {
        assert_eq!(reopen(0, flags).err(), Some(Errno::ACCESS));
    }
    // It is the mode that does it: a file of one's own can be had so.
    let own = memfd_create("own", MemfdFlags::CLOEXEC).unwrap();
    reopen(own.as_raw_fd(), OFlags::RDWR).unwrap();
}
