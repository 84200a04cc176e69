//! The scanning thread panics, or vanishes, at every step of a merge of real
//! memory while vCPUs write to it: they run on, and no byte is lost.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]
#![cfg(feature = "fault-injection")]

mod linux_common;
mod step_hooks;

use std::sync::Arc;
use std::thread;

use ksm_core::backend::linux::LinuxBackend;
use ksm_core::fault::Step;
use ksm_core::page::{PageBuf, PageIndex};
use ksm_core::{Config, Ksm, RegionOptions};
use linux_common::{Guest, KINDS, Kind, full_of, pages};
use step_hooks::{panics_at, vanishes_at};
use vm_memory::{Bytes, MemoryRegionAddress};

const PAGES: u64 = 24;
/// Where the vCPUs write, in every page.
const OFFSET: u64 = 8;
const WRITTEN: u8 = 0xee;

struct World {
    ksm: Arc<Ksm<LinuxBackend>>,
    guests: [Guest; 2],
}

/// What a page holds, as one byte all over.
fn content(page: u64) -> u8 {
    match page {
        0 => 100,
        2 => 0,
        page if page >= PAGES - 4 => 0,
        page => 1 + page as u8,
    }
}

/// One pass before the merge of new pages, zero pages and copied pages, one of
/// which is again what the frame below it holds.
fn world(kind: Kind) -> World {
    let ksm = Ksm::new(kind.backend(), Config::default()).unwrap();
    let domain = ksm.create_domain().unwrap();
    let guests = [kind.guest(PAGES), kind.guest(PAGES)];
    for guest in &guests {
        let space = ksm.create_space(domain).unwrap();
        let options = RegionOptions { dma_guarded: true };
        ksm.register(space, guest.source(), options).unwrap();
        (0..PAGES / 2).for_each(|page| guest.fill(page, 1 + page as u8));
    }
    while ksm.stats().full_scans < 2 {
        ksm.scan(1 << 20).unwrap();
    }
    assert_eq!(ksm.stats().pages_shared, PAGES / 2);
    for guest in &guests {
        for page in (PAGES / 2..PAGES).chain([0, 2]) {
            guest.fill(page, 7);
            guest.fill(page, content(page));
        }
    }
    guests[0].fill(1, 100);
    guests[0].fill(1, content(1));
    ksm.scan(1 << 20).unwrap();
    World {
        ksm: Arc::new(ksm),
        guests,
    }
}

impl World {
    fn scan(&self) {
        self.ksm.scan(1 << 20).unwrap();
    }

    /// Each vCPU writes to every page of its guest; none may be left waiting,
    /// and no write and no other byte may be lost. `meanwhile` runs while they
    /// try.
    fn vcpus_run_on(&self, when: &str, meanwhile: impl FnOnce()) {
        let vcpus = [0, 1].map(|number: usize| {
            let region = Arc::clone(&self.guests[number].0);
            linux_common::Vcpu::new(move || {
                for page in pages(0, PAGES).iter() {
                    let at = MemoryRegionAddress(page.byte_offset() + OFFSET);
                    region.write_obj(WRITTEN, at).unwrap();
                }
            })
        });
        meanwhile();
        for vcpu in vcpus {
            vcpu.runs_on();
        }
        self.ksm
            .check()
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        for (number, guest) in self.guests.iter().enumerate() {
            for page in 0..PAGES {
                let mut expected = full_of(content(page));
                expected.bytes_mut()[OFFSET as usize] = WRITTEN;
                let mut is = PageBuf::zeroed();
                let at = MemoryRegionAddress(PageIndex(page).byte_offset());
                guest.0.read_slice(is.bytes_mut(), at).unwrap();
                assert_eq!(is, expected, "{when}: guest {number} page {page}");
                guest.fill(page, content(page));
            }
        }
    }

    /// The engine does what is left.
    fn finish(&self, when: &str) {
        for _ in 0..4 {
            self.ksm.scan(1 << 20).unwrap();
        }
        self.ksm
            .check()
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        let stats = self.ksm.stats();
        let sharing = (
            stats.pages_shared,
            stats.pages_sharing,
            stats.ksm_zero_pages,
        );
        assert_eq!(sharing, (PAGES - 5, PAGES - 5, 10), "{when}");
    }
}

/// How often a whole pass takes each step.
fn times_taken(kind: Kind, step: Step) -> usize {
    let world = world(kind);
    step_hooks::times_taken(step, || world.scan())
}

#[test]
fn vcpus_run_on_after_a_panic_at_any_step() {
    for kind in KINDS {
        for step in Step::ALL {
            for nth in 1..=times_taken(kind, step) {
                let world = world(kind);
                let panicked = panics_at(step, nth, || world.scan());
                let when = format!("{kind:?}: panic at {step:?} {nth}");
                assert!(panicked, "{when}");
                world.vcpus_run_on(&when, || ());
                world.finish(&when);
            }
        }
    }
}

#[test]
fn vcpus_run_on_after_the_thread_has_vanished_at_any_step() {
    for kind in KINDS {
        for step in Step::ALL {
            for nth in 1..=times_taken(kind, step) {
                let world = world(kind);
                let ksm = Arc::clone(&world.ksm);
                let dead = vanishes_at(step, nth, move || {
                    ksm.scan(1 << 20).unwrap();
                });
                let when = format!("{kind:?}: gone at {step:?} {nth}");
                world.vcpus_run_on(&when, || {
                    // Some of the vCPUs' writes come before, some wait.
                    thread::yield_now();
                    assert!(world.ksm.recover(dead) >= 1, "{when}");
                });
                world.finish(&when);
            }
        }
    }
}
