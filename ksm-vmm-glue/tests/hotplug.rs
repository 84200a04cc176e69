//! Memory comes to a guest and leaves it, on the simulated backend: engine, memory
//! slots and map change together, whatever step fails.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use ksm_core::backend::sim::{Call, Failure, SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::page::PageIndex;
use ksm_core::{Config, Ksm, RegionOptions};
use ksm_vmm_glue::{Content, GuestError, GuestKsm, Hotplug, HotplugError, Slots};
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap,
};

const PAGE: u64 = 4096;
const PAGES: u64 = 8;
const BYTES: u64 = PAGES * PAGE;
/// Where there is memory at first, and where more comes.
const FIRST: GuestAddress = GuestAddress(0x10_000);
const MORE: GuestAddress = GuestAddress(0x80_000);
const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

/// Memory slots, by address, which can be refused.
#[derive(Debug, Default)]
struct FakeSlots {
    set: RefCell<Vec<u64>>,
    refuses: Cell<bool>,
}

impl FakeSlots {
    fn ask(&self) -> io::Result<()> {
        match self.refuses.get() {
            true => Err(io::Error::other("no slot today")),
            false => Ok(()),
        }
    }
}

impl Slots<GuestRegionMmap> for FakeSlots {
    type Error = io::Error;

    fn set(&self, region: &Arc<GuestRegionMmap>) -> io::Result<()> {
        self.ask()?;
        self.set.borrow_mut().push(region.start_addr().0);
        self.set.borrow_mut().sort_unstable();
        Ok(())
    }

    fn remove(&self, region: &Arc<GuestRegionMmap>) -> io::Result<()> {
        self.ask()?;
        let start = region.start_addr().0;
        self.set.borrow_mut().retain(|&set| set != start);
        Ok(())
    }
}

/// A guest with one region, and an equal one with which its pages are merged.
struct Bench {
    sim: SimBackend,
    ksm: Arc<Ksm<SimBackend>>,
    map: GuestMemoryAtomic<GuestMemoryMmap>,
    slots: FakeSlots,
    guest: GuestKsm<SimBackend>,
    sources: RefCell<HashMap<u64, SimGuest>>,
}

impl Bench {
    fn new(options: RegionOptions) -> Self {
        let sim = SimBackend::new(SimConfig::default());
        let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
        let domain = ksm.create_domain().unwrap();
        let first = sim.guest(PAGES);
        let sources = RefCell::new(HashMap::from([(FIRST.0, first.clone())]));
        let memory = region(FIRST, BYTES);
        let map = GuestMemoryMmap::from_arc_regions(vec![Arc::clone(&memory)]).unwrap();
        let slots = FakeSlots::default();
        slots.set(&memory).unwrap();
        let of = |_| first.clone();
        let guest = GuestKsm::register_with(&ksm, domain, &map, options, of).unwrap();
        let map = GuestMemoryAtomic::new(map);
        Self {
            sim,
            ksm,
            map,
            slots,
            guest,
            sources,
        }
    }

    fn source(&self, start: GuestAddress) -> SimGuest {
        source(&self.sim, &self.sources, start)
    }

    fn add(&mut self, start: GuestAddress, bytes: u64) -> Result<(), HotplugError<io::Error>> {
        self.change(|hotplug, guest| hotplug.add(guest, region(start, bytes)).map(drop))
    }

    fn withdraw(
        &mut self,
        start: GuestAddress,
        content: Content,
    ) -> Result<(), HotplugError<io::Error>> {
        self.change(|hotplug, guest| hotplug.withdraw(guest, start, BYTES, content).map(drop))
    }

    fn change<T>(
        &mut self,
        change: impl FnOnce(
            &Hotplug<'_, GuestRegionMmap, FakeSlots, &dyn Fn(Arc<GuestRegionMmap>) -> SimGuest>,
            &mut GuestKsm<SimBackend>,
        ) -> T,
    ) -> T {
        let (sim, sources) = (&self.sim, &self.sources);
        let of = |region: Arc<GuestRegionMmap>| source(sim, sources, region.start_addr());
        let of: &dyn Fn(Arc<GuestRegionMmap>) -> SimGuest = &of;
        change(&Hotplug::new(&self.map, &self.slots, of), &mut self.guest)
    }

    /// What the three say that there is.
    fn state(&self) -> [Vec<u64>; 3] {
        let map = self.map.memory();
        let engine = self.guest.mapped().iter();
        let engine: Vec<_> = engine.map(|mapped| mapped.start.0).collect();
        let regions = self.ksm.regions_of(self.guest.space()).unwrap();
        assert_eq!(regions.len(), engine.len());
        [
            map.iter().map(|region| region.start_addr().0).collect(),
            self.slots.set.borrow().clone(),
            engine,
        ]
    }

    /// They agree.
    fn there_is(&self, starts: &[GuestAddress]) {
        let starts: Vec<u64> = starts.iter().map(|start| start.0).collect();
        assert_eq!(self.state(), [(); 3].map(|()| starts.clone()));
        assert_eq!(self.sim.violation(), None);
        self.ksm.check().unwrap();
    }

    /// Gives the memory at `start` contents which are merged with those of the first.
    fn merge(&self, start: GuestAddress) {
        for page in 0..PAGES {
            for start in [FIRST, start] {
                self.source(start)
                    .write(PageIndex(page), &pattern(1 + page));
            }
        }
        for _ in 0..3 {
            self.ksm.scan(u64::MAX).unwrap();
        }
        assert_eq!(self.ksm.stats().pages_sharing, PAGES);
    }

    fn holds_its_content(&self, start: GuestAddress) {
        for page in 0..PAGES {
            let is = self.source(start).read(PageIndex(page));
            assert_eq!(is, *pattern(1 + page), "page {page} at {start:?}");
        }
    }
}

/// What is behind the memory at an address, the same when it comes back.
fn source(
    sim: &SimBackend,
    sources: &RefCell<HashMap<u64, SimGuest>>,
    start: GuestAddress,
) -> SimGuest {
    let mut sources = sources.borrow_mut();
    let guest = sources.entry(start.0).or_insert_with(|| sim.guest(PAGES));
    guest.clone()
}

fn region(start: GuestAddress, bytes: u64) -> Arc<GuestRegionMmap> {
    let bytes = usize::try_from(bytes).unwrap();
    Arc::new(GuestRegionMmap::from_range(start, bytes, None).unwrap())
}

#[test]
fn memory_comes_is_merged_and_leaves() {
    for content in [Content::Drop, Content::Keep] {
        let mut bench = Bench::new(GUARDED);
        bench.add(MORE, BYTES).unwrap();
        bench.there_is(&[FIRST, MORE]);
        bench.merge(MORE);
        bench.withdraw(MORE, content).unwrap();
        bench.there_is(&[FIRST]);
        bench.holds_its_content(FIRST);
        match content {
            Content::Keep => bench.holds_its_content(MORE),
            Content::Drop => assert!(bench.source(MORE).read(PageIndex(3)).is_zero()),
        }
        // What is behind it is nobody's, and may come again.
        bench.add(MORE, BYTES).unwrap();
        bench.there_is(&[FIRST, MORE]);
    }
}

#[test]
fn memory_that_a_reader_still_has_stays_mapped() {
    let mut bench = Bench::new(GUARDED);
    bench.add(MORE, BYTES).unwrap();
    let reader = bench.map.memory();
    bench.withdraw(MORE, Content::Drop).unwrap();
    assert!(reader.find_region(MORE).is_some());
    assert!(bench.map.memory().find_region(MORE).is_none());
}

#[test]
fn memory_that_cannot_come_leaves_no_trace() {
    let mut bench = Bench::new(GUARDED);
    let overlapping = bench.add(FIRST, BYTES);
    assert!(matches!(overlapping, Err(HotplugError::Map(_))));
    bench.there_is(&[FIRST]);

    let ragged = bench.add(MORE, BYTES - 5);
    let not_whole = GuestError::NotWholePages {
        address: MORE.0,
        bytes: BYTES - 5,
    };
    let ragged = ragged.unwrap_err().to_string();
    assert_eq!(ragged, not_whole.to_string());
    bench.there_is(&[FIRST]);

    bench.sim.fail_nth(Call::Attach, Failure::OutOfMemory, 1);
    let refused = bench.add(MORE, BYTES);
    assert!(
        matches!(refused, Err(HotplugError::Guest(_))),
        "{refused:?}"
    );
    bench.there_is(&[FIRST]);

    bench.slots.refuses.set(true);
    let refused = bench.add(MORE, BYTES);
    assert!(matches!(refused, Err(HotplugError::Slot(_))), "{refused:?}");
    bench.there_is(&[FIRST]);

    bench.slots.refuses.set(false);
    bench.add(MORE, BYTES).unwrap();
    bench.there_is(&[FIRST, MORE]);
}

#[test]
fn memory_that_cannot_leave_stays_as_it_was() {
    let mut bench = Bench::new(GUARDED);
    let absent = bench.withdraw(MORE, Content::Keep);
    assert!(matches!(absent, Err(HotplugError::Map(_))));
    bench.there_is(&[FIRST]);
    bench.add(MORE, BYTES).unwrap();
    bench.merge(MORE);

    // A device uses a page of it: nothing is dropped.
    let pin = bench.guest.pin(MORE, 10).unwrap();
    for content in [Content::Drop, Content::Keep] {
        let pinned = bench.withdraw(MORE, content);
        assert!(matches!(pinned, Err(HotplugError::Guest(_))), "{pinned:?}");
        bench.there_is(&[FIRST, MORE]);
        bench.holds_its_content(MORE);
    }
    drop(pin);
    bench.merge(MORE);

    // The host has no memory for copies.
    bench
        .sim
        .fail_often(Call::Populate, Failure::OutOfMemory, 1000);
    let refused = bench.withdraw(MORE, Content::Keep);
    assert!(
        matches!(refused, Err(HotplugError::Guest(_))),
        "{refused:?}"
    );
    bench.sim.no_failures();
    bench.there_is(&[FIRST, MORE]);
    bench.holds_its_content(MORE);

    // KVM refuses: it is registered anew, and merged again.
    bench.slots.refuses.set(true);
    let refused = bench.withdraw(MORE, Content::Keep);
    assert!(matches!(refused, Err(HotplugError::Slot(_))), "{refused:?}");
    bench.there_is(&[FIRST, MORE]);
    bench.holds_its_content(MORE);
    bench.merge(MORE);
    let refused = bench.withdraw(MORE, Content::Drop);
    assert!(matches!(refused, Err(HotplugError::Slot(_))), "{refused:?}");
    bench.there_is(&[FIRST, MORE]);

    bench.slots.refuses.set(false);
    bench.withdraw(MORE, Content::Drop).unwrap();
    bench.there_is(&[FIRST]);
    bench.holds_its_content(FIRST);
}

/// Two failures at once are said, and `sync` sets right what they left.
#[test]
fn what_could_not_be_undone_is_named() {
    let mut bench = Bench::new(GUARDED);
    bench.add(MORE, BYTES).unwrap();
    bench.slots.refuses.set(true);
    bench.sim.fail_nth(Call::Attach, Failure::OutOfMemory, 1);
    let refused = bench.withdraw(MORE, Content::Keep);
    assert!(
        matches!(refused, Err(HotplugError::NotUndone { .. })),
        "{refused:?}"
    );
    let both = vec![FIRST.0, MORE.0];
    assert_eq!(bench.state(), [both.clone(), both, vec![FIRST.0]]);

    let (sim, sources) = (&bench.sim, &bench.sources);
    let of = |region: Arc<GuestRegionMmap>| source(sim, sources, region.start_addr());
    bench.guest.sync_with(&bench.map.memory(), of).unwrap();
    bench.there_is(&[FIRST, MORE]);
}
