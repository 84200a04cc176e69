//! An engine with guests on the simulated backend, and what its tests do and demand
//! again and again.
#![allow(dead_code)] // No test file uses all of it.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::page::{PageBuf, PageIndex, PageRange};
use ksm_core::{Config, Ksm, RegionId, RegionOptions, SpaceId};

pub(crate) const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

/// An engine, and a space for the regions of its guests.
pub(crate) struct World {
    pub(crate) sim: SimBackend,
    pub(crate) ksm: Arc<Ksm<SimBackend>>,
    pub(crate) space: SpaceId,
}

impl World {
    pub(crate) fn new(config: Config) -> Self {
        let sim = SimBackend::new(SimConfig::default());
        let ksm = Arc::new(Ksm::new(sim.clone(), config).unwrap());
        let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
        Self { sim, ksm, space }
    }

    /// A guest whose page `n` holds content `first + n`.
    pub(crate) fn guest(&self, pages: u64, first: u64) -> SimGuest {
        self.guest_of(pages, |page| first + page)
    }

    /// A guest whose page `n` holds `content(n)`.
    pub(crate) fn guest_of(&self, pages: u64, content: impl Fn(u64) -> u64) -> SimGuest {
        let guest = self.sim.guest(pages);
        fill(&guest, content);
        guest
    }

    pub(crate) fn register(&self, guest: &SimGuest) -> RegionId {
        let guest = guest.clone();
        self.ksm.register(self.space, guest, GUARDED).unwrap()
    }

    pub(crate) fn passes(&self, count: u64) {
        passes(&self.ksm, count);
    }
}

/// The pages from `start` to before `end`.
pub(crate) const fn range(start: u64, end: u64) -> PageRange {
    PageRange {
        start: PageIndex(start),
        end: PageIndex(end),
    }
}

/// Writes `content(n)` to every page `n`.
pub(crate) fn fill(guest: &SimGuest, content: impl Fn(u64) -> u64) {
    for page in 0..guest.len() {
        guest.write(PageIndex(page), &pattern(content(page)));
    }
}

/// Whole passes, while nobody else is at work.
pub(crate) fn passes(ksm: &Ksm<SimBackend>, count: u64) {
    for _ in 0..count {
        let report = ksm.scan(u64::MAX).unwrap();
        assert_eq!(report.passes, 1, "{report:?}");
    }
    is_sane(ksm, "after a pass");
}

/// The records are right, the backend was used by its rules, and nothing is under
/// way.
pub(crate) fn is_sane(ksm: &Ksm<SimBackend>, when: &str) {
    let sim = ksm.backend();
    assert_eq!(sim.violation(), None, "{when}");
    assert!(sim.busy().is_idle(), "{when}: {:?}", sim.busy());
    ksm.check()
        .unwrap_or_else(|error| panic!("{when}: {error}"));
}

/// Every page holds what it must, and none is waited for.
pub(crate) fn reads(guest: &SimGuest, expected: impl Fn(u64) -> Box<PageBuf>, when: &str) {
    for page in range(0, guest.len()).iter() {
        let is = guest.try_read(page);
        let is = is.unwrap_or_else(|| panic!("{when}: a read of {page} waits"));
        assert_eq!(is, *expected(page.0), "{when}: page {page}");
    }
}
