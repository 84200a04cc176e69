//! The published lists of system calls, enforced: each test runs again in a
//! process of its own, under a filter that kills it at the first call which is
//! not on the list.
#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used)] // In helpers of tests.

mod linux_common;

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use ksm_core::backend::linux::{Fds, LinuxBackend, OPEN_SYSTEM_CALLS, SYSTEM_CALLS, StopMethod};
use ksm_core::{Config, Ksm, Outcome, PageIndex, RegionId, RegionOptions, SpaceId, Target};
use linux_common::{Guest, KINDS, Kind, again, backend, pages};

/// What the process needs besides, whatever it does: the allocator's heap
/// (`brk`, and `mprotect` for that of a thread; its large pieces are mapped, as
/// the list has it), the message of a test that fails (`write`), and to end
/// (`exit_group`, and the stack for signals that the standard library gives
/// back, `sigaltstack`).
const PROCESS: &[&str] = &["brk", "exit_group", "mprotect", "sigaltstack", "write"];

/// What a VMM needs to plug in a memfd.
const MEMFDS: &[&str] = &["ftruncate"];

/// What a thread needs to begin and to end, for the trial of the userfaultfd:
/// its stack and its guard page, signals off meanwhile, its place in the C
/// library's lists.
const THREADS: &[&str] = &[
    "clone3",
    "exit",
    "gettid",
    "mprotect",
    "rseq",
    "rt_sigprocmask",
    "sched_getaffinity",
    "set_robust_list",
    "sigaltstack",
];

/// What a process says and how it ends that runs `work` of the test `name`.
fn jailed(name: &str, work: fn()) -> (String, ExitStatus) {
    let Some(mut command) = again(name) else {
        work();
        std::process::exit(0);
    };
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    (said, ended.status)
}

/// Lets this thread, and those that it starts, make these calls only.
fn go_to_jail(lists: &[&[&str]]) {
    let rules: Vec<_> = lists
        .concat()
        .iter()
        .map(|name| format!(r#"{{"syscall":"{name}"}}"#))
        .collect();
    let filter = format!(
        r#"{{"jail":{{"mismatch_action":"kill_process","match_action":"allow","filter":[{}]}}}}"#,
        rules.join(",")
    );
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filters = seccompiler::compile_from_json(filter.as_bytes(), arch).unwrap();
    seccompiler::apply_filter(&filters["jail"]).unwrap();
}

/// An engine and its guests.
struct World {
    kind: Kind,
    ksm: Ksm<LinuxBackend>,
    space: SpaceId,
    guests: Vec<(Guest, RegionId)>,
}

impl World {
    fn new(kind: Kind, backend: LinuxBackend) -> Self {
        let config = Config {
            // Not in a pool of threads, which would need its own calls.
            parallel_pages: u32::MAX,
            ..Config::default()
        };
        let ksm = Ksm::new(backend, config).unwrap();
        let domain = ksm.create_domain().unwrap();
        Self {
            kind,
            space: ksm.create_space(domain).unwrap(),
            ksm,
            guests: Vec::new(),
        }
    }

    /// Fresh memory, as hotplug adds it: 32 pages of the same content in each,
    /// then zero pages.
    fn plug(&mut self) {
        let guest = self.kind.guest(64);
        for page in 0..32 {
            guest.fill(page, 1 + u8::try_from(page).unwrap());
        }
        guest.fill_all(pages(40, 8), 1);
        guest.fill_all(pages(40, 8), 0);
        let options = RegionOptions { dma_guarded: true };
        let region = self.ksm.register(self.space, guest.source(), options);
        self.guests.push((guest, region.unwrap()));
    }

    fn passes(&self, count: u64) {
        let until = self.ksm.stats().full_scans + count;
        while self.ksm.stats().full_scans < until {
            self.ksm.scan(1 << 20).unwrap();
        }
        self.ksm.check().unwrap();
    }

    fn shared(&self) -> (u64, u64, u64) {
        let stats = self.ksm.stats();
        (
            stats.pages_shared,
            stats.pages_sharing,
            stats.ksm_zero_pages,
        )
    }

    /// The whole life of merged pages.
    fn live(&mut self) {
        self.plug();
        self.plug();
        self.passes(2);
        assert_eq!(self.shared(), (32, 32, 16));
        // Written, noticed, merged again.
        let (guest, region) = self.guests[0].clone();
        guest.fill_all(pages(3, 2), 77);
        self.passes(1);
        assert_eq!(self.ksm.stats().cow_breaks, 2);
        guest.fill(3, 4);
        guest.fill(4, 5);
        self.passes(2);
        assert_eq!(self.shared(), (32, 32, 16));
        // In use by a device.
        let guard = self.ksm.pin(region, pages(8, 4)).unwrap();
        self.passes(2);
        assert_eq!(self.shared(), (32, 28, 16));
        let explained = self.ksm.explain(region, PageIndex(9)).unwrap();
        assert_eq!(explained.outcome, Outcome::Pinned);
        drop(guard);
        // More memory comes, and finds its equals.
        self.plug();
        self.passes(2);
        assert_eq!(self.shared(), (32, 64, 24));
        // Ballooned, unmerged, given back.
        self.ksm.discard(region, pages(16, 32)).unwrap();
        assert_eq!(guest.ends(20), (0, 0));
        assert_eq!(self.ksm.unmerge(Target::Space(self.space)).unwrap(), 80);
        assert_eq!(self.ksm.stats().pages_shared, 0);
        assert_eq!(self.ksm.store_bytes().unwrap(), 0);
        self.passes(2);
        for (guest, region) in self.guests.drain(..) {
            self.ksm.unregister(region).unwrap();
            assert_eq!(guest.ends(5), (6, 6));
        }
        self.ksm.remove_space(self.space).unwrap();
    }
}

#[test]
fn the_engine_works_under_the_published_filter() {
    let (said, status) = jailed("the_engine_works_under_the_published_filter", || {
        // The descriptors are handed in, and tried out, before the door shuts.
        let backends = KINDS.map(|kind| (kind, kind.backend()));
        go_to_jail(&[SYSTEM_CALLS, PROCESS, MEMFDS]);
        for (kind, backend) in backends {
            World::new(kind, backend).live();
        }
    });
    assert!(status.success(), "{status}: {said}");
}

#[test]
fn a_backend_is_opened_under_the_published_filter() {
    let (said, status) = jailed("a_backend_is_opened_under_the_published_filter", || {
        go_to_jail(&[OPEN_SYSTEM_CALLS, SYSTEM_CALLS, PROCESS, THREADS]);
        let backend = LinuxBackend::with_stop_method(Fds::open().unwrap(), StopMethod::Auto);
        World::new(Kind::Anonymous(StopMethod::Auto), backend.unwrap()).live();
    });
    assert!(status.success(), "{status}: {said}");
}

/// The filter is on: a call that is not on the list ends the process.
#[test]
fn a_call_that_is_not_published_is_refused() {
    let (said, status) = jailed("a_call_that_is_not_published_is_refused", || {
        let backend = backend(StopMethod::Auto);
        go_to_jail(&[SYSTEM_CALLS, PROCESS]);
        let mut world = World::new(Kind::Anonymous(StopMethod::Auto), backend);
        world.plug();
        eprintln!("so far so good");
        let _ = std::fs::File::open("/dev/null");
        eprintln!("it was let through");
    });
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}: {said}");
    assert_eq!(said, "so far so good\n");
}
