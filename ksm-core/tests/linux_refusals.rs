//! Memory that can never be merged is refused, and says why.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ksm_core::backend::linux::{Fds, HostRegion, LinuxBackend, OpenError, StopMethod};
use ksm_core::backend::{Backend, Backing, Memory, RegionOptions};
use ksm_core::{MemfdFault, RegisterError};
use linux_common::{Bench, Guest, METHODS, backend, pages, refusal};
use rustix::fs::SealFlags;
use rustix::mm::Advice;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

fn memfd() -> OwnedFd {
    linux_common::memfd(256)
}

fn file_guest(fd: OwnedFd, flags: i32) -> Guest {
    guest_of(fd, flags, libc::PROT_READ | libc::PROT_WRITE)
}

fn guest_of(fd: OwnedFd, flags: i32, protection: i32) -> Guest {
    let region = MmapRegionBuilder::new(16 * 4096)
        .with_file_offset(FileOffset::new(fd.into(), 0))
        .with_mmap_prot(protection)
        .with_mmap_flags(flags)
        .build()
        .unwrap();
    Guest::of(region)
}

/// Each reads what is mapped, while the others map and unmap.
#[test]
fn memory_is_registered_by_several_threads_at_once() {
    let backend = backend(StopMethod::Auto);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let guest = Guest::new(16);
                    backend
                        .attach(guest.source(), RegionOptions::default())
                        .unwrap();
                }
            });
        }
    });
}

macro_rules! assert_refused {
    ($guest:expr, $why:pat) => {
        let error = refusal($guest, RegionOptions::default());
        assert!(matches!(error, $why), "{error:?}");
    };
}

#[test]
fn shared_memory() {
    let anonymous = Guest::with_flags(16, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    assert_refused!(&anonymous, RegisterError::Shared { .. });
    let file = file_guest(memfd(), libc::MAP_SHARED);
    assert_refused!(&file, RegisterError::Shared { .. });
}

/// Fact 16: neither way to stop writes works on a private mapping of a file on
/// disk; on one of a memfd the frames below would not be ours.
#[test]
fn fact_16_private_mappings_of_files() {
    let file = file_guest(memfd(), libc::MAP_PRIVATE);
    assert_refused!(&file, RegisterError::PrivateFile { .. });
    let disk = named_file(&std::env::temp_dir(), "snapshot");
    std::fs::remove_file(&disk.1).unwrap();
    let snapshot = file_guest(disk.0.into(), libc::MAP_PRIVATE);
    assert_refused!(&snapshot, RegisterError::PrivateFile { .. });
}

/// A file of 1 MiB, and where it is.
fn named_file(folder: &Path, name: &str) -> (File, PathBuf) {
    let path = folder.join(format!("ksm-{name}-{}", std::process::id()));
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).open(&path);
    let file = file.unwrap();
    file.set_len(1 << 20).unwrap();
    (file, path)
}

/// Why a guest that is declared to be a memfd of this process is refused.
fn memfd_fault(guest: Guest) -> MemfdFault {
    let guest = guest.declared_owned();
    match refusal(&guest, RegionOptions { dma_guarded: true }) {
        RegisterError::Memfd { why, .. } => why,
        other => panic!("{other}"),
    }
}

#[test]
fn memfds_with_unannounced_dma() {
    let error = refusal(&Guest::memfd(16), RegionOptions::default());
    let why = MemfdFault::Unguarded;
    assert!(matches!(error, RegisterError::Memfd { why: found, .. } if found == why));
}

#[test]
fn memory_that_is_declared_a_memfd_and_is_none() {
    assert_eq!(memfd_fault(Guest::new(16)), MemfdFault::NoFile);
    let private = file_guest(memfd(), libc::MAP_PRIVATE);
    assert_eq!(memfd_fault(private), MemfdFault::NotMappedThere);
    // On a disk; then in memory, but with a name.
    for folder in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
        let (file, path) = named_file(&folder, "shared");
        let why = memfd_fault(file_guest(file.into(), libc::MAP_SHARED));
        std::fs::remove_file(path).unwrap();
        assert_eq!(why, MemfdFault::NotMemfd, "{}", folder.display());
    }
}

#[test]
fn memfds_whose_pages_cannot_be_freed_or_written_back() {
    let sealed = Guest::memfd(16);
    rustix::fs::fcntl_add_seals(sealed.file(), SealFlags::FUTURE_WRITE).unwrap();
    assert_eq!(memfd_fault(sealed), MemfdFault::Sealed);
    let short = Guest::memfd(16);
    short.file().set_len(15 * 4096).unwrap();
    assert_eq!(memfd_fault(short), MemfdFault::Short);
    let fd = memfd();
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let reader = File::open(path).unwrap();
    let reader = guest_of(reader.into(), libc::MAP_SHARED, libc::PROT_READ);
    assert_eq!(memfd_fault(reader), MemfdFault::ReadOnly);
}

#[test]
fn memfds_that_are_mapped_twice() {
    let file = Arc::new(File::from(memfd()));
    let part = |page: u64, n| {
        let offset = FileOffset::from_arc(Arc::clone(&file), page * 4096);
        Guest::part_of(offset, n)
    };
    let guest = part(16, 16);
    for (page, n) in [(16, 16), (0, 17), (31, 16), (20, 2), (0, 64)] {
        let other = part(page, n);
        let twice = memfd_fault(guest.clone());
        assert!(
            matches!(twice, MemfdFault::MappedTwice { .. }),
            "{page}+{n}: {twice}"
        );
        drop(other);
    }
    // Other parts are no concern of it.
    let others = [part(0, 16), part(32, 16)];
    Bench::with(
        backend(StopMethod::Auto),
        guest,
        RegionOptions { dma_guarded: true },
    );
    drop(others);
}

#[test]
fn memory_that_is_attached_already() {
    for method in METHODS {
        let backend = backend(method);
        let guest = Guest::new(16);
        let first = backend.attach(guest.source(), RegionOptions::default());
        let again = backend.attach(guest.source(), RegionOptions::default());
        let error = again.expect_err("it must be refused");
        assert!(matches!(error, RegisterError::Overlaps { .. }), "{error}");
        drop(first);
        backend
            .attach(guest.source(), RegionOptions::default())
            .expect("nobody has it any more");
    }
}

#[test]
fn hugetlb_memory() {
    // Mapped without a page in the pool: it is never touched.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    let guest = Guest::with_flags(512, flags);
    assert_refused!(&guest, RegisterError::HugeTlb { .. });
}

#[test]
fn fact_10_locked_memory() {
    let guest = Guest::new(16);
    guest.lock(pages(8, 2));
    assert_refused!(&guest, RegisterError::Locked { .. });
}

#[test]
fn fact_9_memory_that_the_kernel_merges() {
    let guest = Guest::new(16);
    guest
        .try_advise(pages(4, 4), Advice::LinuxMergeable)
        .expect("this test needs a kernel with KSM");
    assert_refused!(&guest, RegisterError::Mergeable { .. });
}

#[test]
fn memory_with_another_userfaultfd() {
    let guest = Guest::new(16);
    let options = RegionOptions::default();
    let first = backend(StopMethod::WriteProtect)
        .attach(guest.source(), options)
        .unwrap();
    assert_refused!(&guest, RegisterError::OtherUserfaultfd { .. });
    drop(first);
    backend(StopMethod::Auto)
        .attach(guest.source(), options)
        .unwrap();
}

#[test]
fn memory_that_is_not_there_or_not_writable() {
    let guest = Guest::new(16);
    guest.protect_from_writes(pages(3, 1));
    let error = refusal(&guest, RegionOptions::default());
    let third = guest.address() as u64 + 3 * 4096;
    assert!(
        matches!(error, RegisterError::NotMapped { address } if address == third),
        "{error:?}"
    );
    let guest = Guest::new(16);
    guest.unmap(pages(5, 1));
    let error = refusal(&guest, RegionOptions::default());
    let fifth = guest.address() as u64 + 5 * 4096;
    assert!(
        matches!(error, RegisterError::NotMapped { address } if address == fifth),
        "{error:?}"
    );
    guest.map_anonymous_over(pages(5, 1));
}

#[test]
fn memory_that_is_not_made_of_whole_pages() {
    let region = GuestRegionMmap::<()>::from_range(GuestAddress(0), 5000, None).unwrap();
    let error = backend(StopMethod::Auto)
        .attach(HostRegion::new(Arc::new(region)), RegionOptions::default())
        .expect_err("it must be refused");
    assert!(
        matches!(error, RegisterError::NotWholePages { bytes: 5000, .. }),
        "{error:?}"
    );
}

#[test]
fn refused_memory_is_left_as_it_was() {
    let guest = Guest::new(16);
    guest.lock(pages(8, 2));
    let _ = refusal(&guest, RegionOptions::default());
    let flags = guest.vm_flags(0);
    assert!(
        !flags
            .iter()
            .any(|flag| ["dc", "um", "uw"].contains(&&**flag)),
        "{flags:?}"
    );
}

/// On copied pages no host call can tell whether a device still writes.
#[test]
fn copied_pages_of_memory_with_dma_are_not_stopped() {
    for method in METHODS {
        let bench = Bench::with(backend(method), Guest::new(4), RegionOptions::default());
        bench.guest.fill_all(pages(0, 4), 7);
        bench.merge(pages(0, 4), 0, 7);
        bench.memory.populate(pages(0, 4)).unwrap();
        assert!(bench.memory.stop(pages(0, 4), Backing::Frame).is_err());
        bench.guest.writes(0, 1).runs_on();
    }
}

#[test]
fn what_a_host_lacks_is_named() {
    let fds = Fds {
        pagemap: memfd(),
        ..Fds::open().unwrap()
    };
    let error = LinuxBackend::from_fds(fds).expect_err("that is no page map");
    assert!(error.to_string().contains("Linux 6.7"), "{error}");
    let fds = Fds {
        userfaultfd: memfd(),
        ..Fds::open().unwrap()
    };
    let error = LinuxBackend::from_fds(fds).expect_err("that is no userfaultfd");
    assert!(error.to_string().contains("userfaultfd"), "{error}");
}

#[test]
fn another_process_page_map_is_not_ours() {
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let opened = |name: &str| -> OwnedFd {
        let path = format!("/proc/{}/{name}", other.id());
        File::open(path).unwrap().into()
    };
    let foreign = [
        Fds {
            pagemap: opened("pagemap"),
            ..Fds::open().unwrap()
        },
        Fds {
            smaps: opened("smaps"),
            ..Fds::open().unwrap()
        },
    ];
    let errors = foreign.map(|fds| LinuxBackend::from_fds(fds).map(drop));
    other.kill().unwrap();
    other.wait().unwrap();
    for error in errors {
        let named = matches!(error, Err(OpenError::OtherAddressSpace));
        assert!(named, "{error:?}");
    }
}
