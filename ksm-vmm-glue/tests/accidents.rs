//! The scanner panics, or is killed, at every step of a merge, while memory comes
//! and goes and vCPUs write: they run on, every change of memory ends, no byte is
//! lost, and the next scanner goes on. On the simulated backend, and on real memory.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod vanish;

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ksm_core::backend::Backend;
use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::backend::sim::{Access, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::page::{PageBuf, PageIndex};
use ksm_core::{Config, Ksm, LockPolicy, RegionOptions};
use ksm_vmm_glue::{
    Content, GuestKsm, Hotplug, Pacing, ScannerOptions, ScannerThread, Slots, Status,
};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
};

const PAGES: u64 = 24;
const BYTES: usize = 24 * 4096;
/// Pages that no vCPU rewrites.
const KEPT: u64 = 8;
/// How long anything may take: no test relies on its being short.
const PATIENCE: Duration = Duration::from_secs(60);
/// So much goes on after the accident.
const AFTERWARDS: u64 = 3;
const MORE: GuestAddress = GuestAddress(1 << 30);

/// Where guests live.
trait Ground: Sized + Send + Sync {
    type Backend: Backend + Debug;
    type Memory: Memory;

    fn new() -> (Self, Self::Backend);
    fn memory(&self, region: &Arc<GuestRegionMmap>) -> Self::Memory;
    fn source(memory: &Self::Memory) -> <Self::Backend as Backend>::Source;
}

/// A region as a vCPU sees it: it waits where it must.
trait Memory: Clone + Send + Sync {
    fn store(&self, page: PageIndex, bytes: &PageBuf);
    fn load(&self, page: PageIndex) -> PageBuf;
}

struct Sim(SimBackend);
struct Linux;

impl Ground for Sim {
    type Backend = SimBackend;
    type Memory = SimGuest;

    fn new() -> (Self, SimBackend) {
        let sim = SimBackend::new(SimConfig::default());
        (Self(sim.clone()), sim)
    }

    fn memory(&self, region: &Arc<GuestRegionMmap>) -> SimGuest {
        self.0.guest(region.len() / 4096)
    }

    fn source(memory: &SimGuest) -> SimGuest {
        memory.clone()
    }
}

impl Memory for SimGuest {
    fn store(&self, page: PageIndex, bytes: &PageBuf) {
        if self.write(page, bytes) == Access::Waits {
            self.wait_for_writes(page);
        }
    }

    fn load(&self, page: PageIndex) -> PageBuf {
        self.read(page)
    }
}

impl Ground for Linux {
    type Backend = LinuxBackend;
    type Memory = Arc<GuestRegionMmap>;

    fn new() -> (Self, LinuxBackend) {
        let backend = LinuxBackend::open();
        let backend = backend.unwrap_or_else(|error| panic!("this test needs it: {error}"));
        (Self, backend)
    }

    fn memory(&self, region: &Arc<GuestRegionMmap>) -> Arc<GuestRegionMmap> {
        Arc::clone(region)
    }

    fn source(memory: &Arc<GuestRegionMmap>) -> HostRegion {
        HostRegion::new(Arc::clone(memory))
    }
}

impl Memory for Arc<GuestRegionMmap> {
    fn store(&self, page: PageIndex, bytes: &PageBuf) {
        let at = MemoryRegionAddress(page.byte_offset());
        self.write_slice(bytes.bytes(), at).unwrap();
    }

    fn load(&self, page: PageIndex) -> PageBuf {
        let mut bytes = *PageBuf::zeroed();
        let at = MemoryRegionAddress(page.byte_offset());
        self.read_slice(bytes.bytes_mut(), at).unwrap();
        bytes
    }
}

/// A machine without KVM: nobody to be told.
#[derive(Debug)]
struct NoSlots;

impl Slots<GuestRegionMmap> for NoSlots {
    type Error = Infallible;

    fn set(&self, _: &Arc<GuestRegionMmap>) -> Result<(), Infallible> {
        Ok(())
    }

    fn remove(&self, _: &Arc<GuestRegionMmap>) -> Result<(), Infallible> {
        Ok(())
    }
}

/// What goes on until it is told to end, in rounds.
#[derive(Default)]
struct Rounds {
    end: AtomicBool,
    done: AtomicU64,
}

impl Rounds {
    fn go_on(&self, mut round: impl FnMut(u64)) {
        while !self.end.load(Ordering::Relaxed) {
            round(self.done.load(Ordering::Relaxed));
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Ends everything, also if the test fails.
struct EndAll<'a>(&'a [Rounds]);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        for rounds in self.0 {
            rounds.end.store(true, Ordering::Relaxed);
        }
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn region(start: GuestAddress) -> Arc<GuestRegionMmap> {
    Arc::new(GuestRegionMmap::from_range(start, BYTES, None).unwrap())
}

fn expect<M: Memory>(memory: &M, page: u64, content: u64, who: &str) {
    let is = memory.load(PageIndex(page));
    assert_eq!(is, *pattern(content), "{who}, page {page}");
}

/// What a page of a guest holds: at times the same as in the other, at times zeros
/// (pattern 0), at times its own. What is kept is equal always.
fn content(guest: u64, page: u64, turn: u64) -> u64 {
    match (page, turn % 3) {
        (..KEPT, _) | (16.., 1) | (_, 0) => 1 + page,
        (16.., _) => 0,
        _ => 1000 * (1 + guest) + 100 * turn + page,
    }
}

/// One round of a vCPU: it checks all pages, and in every eighth rewrites some.
fn compute<M: Memory>(memory: &M, guest: u64, round: u64) {
    let (turn, begins) = (round / 8, round.is_multiple_of(8));
    for page in 0..PAGES {
        let first = if round == 0 { 0 } else { KEPT };
        if begins && page >= first {
            memory.store(PageIndex(page), &pattern(content(guest, page, turn)));
        }
    }
    for page in 0..PAGES {
        expect(memory, page, content(guest, page, turn), "a vCPU");
    }
    thread::sleep(Duration::from_millis(1));
}

/// One round of hotplug: memory comes, is written, and leaves.
fn plug<G: Ground>(
    ground: &G,
    map: &GuestMemoryAtomic<GuestMemoryMmap>,
    guest: &mut GuestKsm<G::Backend>,
    round: u64,
) {
    let region = region(MORE);
    let memory = ground.memory(&region);
    let hotplug = Hotplug::new(map, &NoSlots, |_| G::source(&memory));
    hotplug.add(guest, region).unwrap();
    let content = |page: u64| match page.is_multiple_of(4) {
        true => 50_000 + 100 * round + page,
        false => 1 + page,
    };
    for page in 0..PAGES {
        memory.store(PageIndex(page), &pattern(content(page)));
    }
    thread::sleep(Duration::from_millis(round % 6));
    (0..PAGES).for_each(|page| expect(&memory, page, content(page), "added memory"));
    let bytes = BYTES as u64;
    if round.is_multiple_of(2) {
        hotplug.withdraw(guest, MORE, bytes, Content::Keep).unwrap();
        (0..PAGES).for_each(|page| expect(&memory, page, content(page), "what was withdrawn"));
    } else {
        hotplug.withdraw(guest, MORE, bytes, Content::Drop).unwrap();
    }
}

/// What the scanner does to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accident {
    Panic,
    Kill,
}

/// What happens on a scanner's thread, once of all: at the `nth` time that one takes
/// `step`.
fn at(accident: Accident, step: Step, nth: u32) -> impl Fn() + Send + Sync {
    let left = Arc::new(AtomicU32::new(nth));
    move || {
        let left = Arc::clone(&left);
        set_hook(Some(Box::new(move |now| {
            let counted = |left: u32| left.checked_sub(u32::from(now == step));
            let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted);
            if now != step || before != Ok(1) {
                return;
            }
            match accident {
                Accident::Panic => panic!("injected"),
                Accident::Kill => vanish::this_thread(),
            }
        })));
    }
}

fn goes_on_after<G: Ground>(accident: Accident, step: Step, nth: u32, lock_policy: LockPolicy) {
    let when = format!("{accident:?} at {step:?} {nth}, {lock_policy:?}");
    let (ground, backend) = G::new();
    // Mappings are given back only where they are short.
    let is_scarce = step == Step::Unshared;
    let config = Config {
        max_vmas: is_scarce.then_some(2),
        lock_policy,
        ..Config::default()
    };
    let ksm = Arc::new(Ksm::new(backend, config).unwrap());
    let domain = ksm.create_domain().unwrap();
    let mut guests = Vec::new();
    for _ in 0..2 {
        let own = region(GuestAddress(0));
        let memory = ground.memory(&own);
        let map = GuestMemoryMmap::from_arc_regions(vec![own]).unwrap();
        let options = RegionOptions { dma_guarded: true };
        let of = |_| G::source(&memory);
        let guest = GuestKsm::register_with(&ksm, domain, &map, options, of).unwrap();
        guests.push((memory, GuestMemoryAtomic::new(map), guest));
    }
    let options = ScannerOptions {
        pacing: Pacing {
            pages_to_scan: 1000,
            sleep_millisecs: 1,
        },
        restarts: 1,
    };
    let scanner =
        ScannerThread::start_with(Arc::clone(&ksm), options, at(accident, step, nth)).unwrap();
    let rounds: [Rounds; 3] = Default::default();
    thread::scope(|scope| {
        let _end = EndAll(&rounds);
        let [one, other, plugs] = &rounds;
        let (memories, ground) = (guests.iter().map(|g| g.0.clone()), &ground);
        for (number, (memory, rounds)) in (0..).zip(memories.zip([one, other])) {
            scope.spawn(move || rounds.go_on(|round| compute(&memory, number, round)));
        }
        let (_, map, guest) = &mut guests[0];
        scope.spawn(move || plugs.go_on(|round| plug(ground, map, guest, round)));

        wait_until(&when, || scanner.tally().restarts == 1);
        let then = rounds.each_ref().map(|r| r.done.load(Ordering::Relaxed));
        for (rounds, then) in rounds.iter().zip(then) {
            wait_until(&format!("{when}: the others go on"), || {
                rounds.done.load(Ordering::Relaxed) >= then + AFTERWARDS
            });
        }
        assert_eq!(scanner.status(), Status::Running, "{when}");
    });
    assert_eq!(guests[0].1.memory().num_regions(), 1, "{when}");
    if !is_scarce {
        wait_until(&format!("{when}: the next scanner merges"), || {
            let kept = |guest: &GuestKsm<G::Backend>, page| {
                let explained = guest.explain(GuestAddress(page * 4096)).unwrap();
                explained.sharers >= 2
            };
            (0..KEPT).all(|page| guests.iter().all(|(.., guest)| kept(guest, page)))
        });
    }
    assert_eq!(scanner.stop(), Status::Stopped, "{when}");
    ksm.check()
        .unwrap_or_else(|error| panic!("{when}: {error}"));
    for (_, _, guest) in guests {
        guest.unregister().unwrap();
    }
    assert_eq!(ksm.stats().pages_shared, 0, "{when}");
}

fn all_goes_on_after<G: Ground>(accident: Accident) {
    for step in Step::PASS {
        for (nth, policy) in [
            (1, LockPolicy::PerRegion),
            (4, LockPolicy::PerRegion),
            (2, LockPolicy::Global),
        ] {
            goes_on_after::<G>(accident, step, nth, policy);
        }
    }
}

#[test]
fn all_goes_on_after_a_panic_on_a_simulated_host() {
    all_goes_on_after::<Sim>(Accident::Panic);
}

#[test]
fn all_goes_on_after_a_kill_on_a_simulated_host() {
    all_goes_on_after::<Sim>(Accident::Kill);
}

#[test]
fn all_goes_on_after_a_panic_on_real_memory() {
    all_goes_on_after::<Linux>(Accident::Panic);
}

#[test]
fn all_goes_on_after_a_kill_on_real_memory() {
    all_goes_on_after::<Linux>(Accident::Kill);
}
