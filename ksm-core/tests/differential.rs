//! The same operations on both backends: after each, the engine must say the
//! same of every page, the counters must be equal, and so must the page maps.
//!
//! Needs userfaultfd, and fails where there is none.
#![cfg(all(feature = "script", feature = "linux"))]

mod linux_common;
mod readable;

use std::cell::Cell;
use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;

use ksm_core::backend::PageState;
use ksm_core::backend::linux::{HostRegion, LinuxBackend, StopMethod};
use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, Stop};
use ksm_core::page::{PAGE_SHIFT, PageBuf, PageIndex};
use ksm_core::script::{Applied, Host, Op, Runner, Script, SimHost};
use linux_common::{Guest, Kind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use readable::{Readable, scripts};
use vm_memory::{Bytes, MemoryRegionAddress};

/// Operations that are compared, for each way to stop and to read.
const OPERATIONS: u64 = 5_000;

/// What a read of a merged page brings in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reads {
    /// Its neighbours too, as the host likes (`fault_around_bytes`): so that no
    /// page is left to chance, every check reads every page.
    All,
    /// That page alone, since regions that are guarded are registered for
    /// write-protection, where the kernel does not fault around. Checks read one
    /// page of seven, so that others stay untouched.
    Some,
}

impl Reads {
    /// Whether the `nth` look reads its page.
    const fn includes(self, nth: u64) -> bool {
        match self {
            Self::All => true,
            Self::Some => nth.is_multiple_of(7),
        }
    }
}

/// How a page stands in the page map, as far as every kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mapped {
    Nothing,
    Own,
    Frame,
}

/// A host whose page map can be looked at.
trait Visible: Host {
    fn mapped(&self, guest: &Self::Guest, page: PageIndex) -> Mapped;
}

/// Real memory of this process.
struct LinuxHost {
    kind: Kind,
    backend: LinuxBackend,
    pagemap: File,
    reads: Reads,
    looks: u64,
}

impl LinuxHost {
    fn new(kind: Kind, reads: Reads) -> Self {
        Self {
            kind,
            backend: kind.backend(),
            pagemap: File::open("/proc/self/pagemap").expect("this test needs /proc"),
            reads,
            looks: 0,
        }
    }
}

fn address(page: PageIndex) -> MemoryRegionAddress {
    MemoryRegionAddress(page.byte_offset())
}

impl Host for LinuxHost {
    type Backend = LinuxBackend;
    type Guest = Guest;

    fn backend(&self) -> LinuxBackend {
        self.backend.clone()
    }

    fn guest(&mut self, pages: u64) -> Guest {
        self.kind.guest(pages)
    }

    fn source(&self, guest: &Guest) -> HostRegion {
        guest.source()
    }

    fn write(&mut self, guest: &Guest, page: PageIndex, bytes: &PageBuf) {
        let written = guest.0.write_slice(bytes.bytes(), address(page));
        written.expect("guest memory takes a page");
    }

    fn read(&mut self, guest: &Guest, page: PageIndex) -> PageBuf {
        let mut bytes = PageBuf::zeroed();
        let read = guest.0.read_slice(bytes.bytes_mut(), address(page));
        read.expect("guest memory gives a page");
        *bytes
    }

    fn reads_fill(&self) -> bool {
        self.kind == Kind::Memfd
    }

    fn peek(&mut self, guest: &Guest, page: PageIndex) -> Option<PageBuf> {
        self.looks += 1;
        let fills = self.reads_fill() && self.mapped(guest, page) == Mapped::Nothing;
        let looks = self.reads.includes(self.looks) && !fills;
        looks.then(|| self.read(guest, page))
    }
}

impl Visible for LinuxHost {
    fn mapped(&self, guest: &Guest, page: PageIndex) -> Mapped {
        const ENTRY: u64 = 8;
        const PRESENT_OR_SWAPPED: u64 = 3 << 62;
        const FILE: u64 = 1 << 61;
        let number = (guest.address() as u64 + page.byte_offset()) >> PAGE_SHIFT;
        let mut entry = [0; 8];
        let read = self.pagemap.read_exact_at(&mut entry, number * ENTRY);
        read.expect("a page map entry");
        let entry = u64::from_ne_bytes(entry);
        match (entry & PRESENT_OR_SWAPPED, entry & FILE) {
            (0, _) => Mapped::Nothing,
            (_, 0) => Mapped::Own,
            _ => Mapped::Frame,
        }
    }
}

/// The model, without the powers that the other side does not have.
struct PlainSim {
    sim: SimHost,
    reads: Reads,
    looks: u64,
}

impl PlainSim {
    fn new(stop: Stop, reads: Reads) -> Self {
        let config = SimConfig {
            stop,
            ..SimConfig::default()
        };
        Self {
            sim: SimHost::with(config),
            reads,
            looks: 0,
        }
    }
}

impl Host for PlainSim {
    type Backend = SimBackend;
    type Guest = SimGuest;

    fn backend(&self) -> SimBackend {
        self.sim.backend()
    }

    fn guest(&mut self, pages: u64) -> SimGuest {
        self.sim.guest(pages)
    }

    fn source(&self, guest: &SimGuest) -> SimGuest {
        self.sim.source(guest)
    }

    fn write(&mut self, guest: &SimGuest, page: PageIndex, bytes: &PageBuf) {
        self.sim.write(guest, page, bytes);
    }

    fn read(&mut self, guest: &SimGuest, page: PageIndex) -> PageBuf {
        self.sim.read(guest, page)
    }

    fn reads_fill(&self) -> bool {
        self.sim.reads_fill()
    }

    fn peek(&mut self, guest: &SimGuest, page: PageIndex) -> Option<PageBuf> {
        self.looks += 1;
        let fills = self.reads_fill() && self.mapped(guest, page) == Mapped::Nothing;
        let looks = self.reads.includes(self.looks) && !fills;
        looks.then(|| self.read(guest, page))
    }

    fn merged(&self, guest: &SimGuest) -> Option<u64> {
        self.sim.merged(guest)
    }

    fn verdict(&self) -> Result<(), String> {
        self.sim.verdict()
    }
}

impl Visible for PlainSim {
    fn mapped(&self, guest: &SimGuest, page: PageIndex) -> Mapped {
        match guest.mapped(page) {
            None => Mapped::Nothing,
            Some(PageState::File) => Mapped::Frame,
            Some(PageState::Private | PageState::Zero | PageState::Swapped) => Mapped::Own,
        }
    }
}

/// Everything that can be seen of an engine, as text: what differs is then
/// readable.
fn portrait<H: Visible>(runner: &Runner<H>) -> String {
    let mut text = String::new();
    let ksm = runner.ksm();
    let store = ksm.store_bytes().expect("the store says its size");
    writeln!(text, "{:?}, store of {store} bytes", ksm.stats()).expect("room");
    for region in 0..runner.regions() {
        let Some(id) = runner.region(region) else {
            continue;
        };
        let (guest, first) = runner.place(region).expect("a registered region");
        let stats = ksm.region_stats(id).expect("a registered region");
        writeln!(text, "r{region}: {stats:?}").expect("room");
        for page in (0..stats.pages).map(PageIndex) {
            let found = ksm.explain(id, page).expect("a page of the region");
            let mapped = runner.host().mapped(guest, page.plus(first.0));
            writeln!(text, "r{region} {}: {mapped:?} {found:?}", page.0).expect("room");
        }
    }
    text
}

/// Whether two engines took an operation the same way. Messages may differ.
fn alike(one: &Applied, other: &Applied) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn compare<A: Visible, B: Visible>(
    script: &Script,
    (one, other): (A, B),
) -> Result<(), TestCaseError> {
    let fail = |reason: String| Err(TestCaseError::fail(reason));
    let mut one = Runner::new(one).expect("good settings");
    let mut other = Runner::new(other).expect("good settings");
    for op in &script.0 {
        let took = match (one.apply(op), other.apply(op)) {
            (Ok(one), Ok(other)) => (one, other),
            (Err(mismatch), _) => return fail(format!("simulated: {mismatch}")),
            (_, Err(mismatch)) => return fail(format!("Linux: {mismatch}")),
        };
        if !alike(&took.0, &took.1) {
            return fail(format!("{op}: simulated, Linux: {took:?}"));
        }
        let (seen, real) = (portrait(&one), portrait(&other));
        let mut lines = seen.lines().zip(real.lines());
        if let Some((seen, real)) = lines.find(|(seen, real)| seen != real) {
            return fail(format!("after {op}:\nsimulated {seen}\nLinux     {real}"));
        }
    }
    Ok(())
}

/// The script with every region declared guarded.
fn guarded(script: &Script) -> Script {
    let mut script = script.clone();
    for op in &mut script.0 {
        if let Op::Register { guarded, .. }
        | Op::Again { guarded, .. }
        | Op::TakeOver { guarded, .. } = op
        {
            *guarded = true;
        }
    }
    script
}

fn explore(stop: Stop, kind: Kind, reads: Reads) {
    let compared = Cell::new(0);
    while compared.get() < OPERATIONS {
        let mut runner = TestRunner::new(Config {
            cases: 16,
            failure_persistence: None,
            max_shrink_iters: 2_000,
            ..Config::default()
        });
        let explored = runner.run(&scripts(1..100), |Readable(script)| {
            let script = match reads {
                Reads::All => script,
                Reads::Some => guarded(&script),
            };
            compared.set(compared.get() + script.0.len() as u64);
            let hosts = (PlainSim::new(stop, reads), LinuxHost::new(kind, reads));
            compare(&script, hosts)
        });
        if let Err(failure) = explored {
            panic!("{failure}");
        }
    }
    println!("{} operations", compared.get());
}

#[test]
fn both_backends_move_pages_alike() {
    for reads in [Reads::All, Reads::Some] {
        explore(Stop::Move, Kind::Anonymous(StopMethod::Move), reads);
    }
}

#[test]
fn both_backends_protect_pages_alike() {
    for reads in [Reads::All, Reads::Some] {
        explore(
            Stop::Protect,
            Kind::Anonymous(StopMethod::WriteProtect),
            reads,
        );
    }
}

/// A memfd is only merged where it is guarded.
#[test]
fn both_backends_treat_memfds_alike() {
    explore(Stop::Memfd, Kind::Memfd, Reads::Some);
}
