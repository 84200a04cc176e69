//! Memory that can never be merged is refused, and says why.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ksm_core::RegisterError;
use ksm_core::backend::linux::{Fds, HostRegion, LinuxBackend, StopMethod};
use ksm_core::backend::{Backend, Backing, Memory, RegionOptions};
use linux_common::{Bench, Guest, METHODS, backend, pages, refusal};
use rustix::fs::MemfdFlags;
use rustix::mm::Advice;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

fn memfd() -> OwnedFd {
    let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
    fd
}

fn file_guest(fd: OwnedFd, flags: i32) -> Guest {
    let region = MmapRegionBuilder::new(16 * 4096)
        .with_file_offset(FileOffset::new(fd.into(), 0))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags)
        .build()
        .unwrap();
    Guest::of(region)
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
    let path = std::env::temp_dir().join(format!("ksm-snapshot-{}", std::process::id()));
    let disk = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    disk.set_len(1 << 20).unwrap();
    let snapshot = file_guest(disk.into(), libc::MAP_PRIVATE);
    assert_refused!(&snapshot, RegisterError::PrivateFile { .. });
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
