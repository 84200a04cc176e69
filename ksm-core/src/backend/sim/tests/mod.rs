//! That the model behaves as the contract's table says, and that each of its
//! demands is heard.

mod demands;
mod states;

use super::*;
use crate::backend::{Backing, FrameStore, Held, Memory, PageRun, PageState, Refusal, Settled};
use crate::page::{FrameId, FrameRange, PageBuf, PageIndex, PageRange};

const P: PageIndex = PageIndex(3);

fn one(page: u64) -> PageRange {
    PageRange::one(PageIndex(page))
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIndex(start), len)
}

/// A guest of 32 pages, registered, and a store with frames 0 to 7, of which
/// frame n holds pattern n.
struct Lab {
    sim: SimBackend,
    guest: SimGuest,
    memory: SimMemory,
    store: SimStore,
}

impl Lab {
    fn new() -> Self {
        Self::with(SimConfig::default(), true)
    }

    fn with(config: SimConfig, dma_guarded: bool) -> Self {
        let sim = SimBackend::new(config);
        let guest = sim.guest(32);
        let options = RegionOptions { dma_guarded };
        let memory = sim.attach(guest.clone(), options).unwrap();
        let store = sim.open_store().unwrap();
        for number in 0..8 {
            let content = pattern(number.into());
            store.fill(FrameId(number), &content).unwrap();
        }
        Self {
            sim,
            guest,
            memory,
            store,
        }
    }

    fn write(&self, page: u64, number: u64) -> Access {
        self.guest.write(PageIndex(page), &pattern(number))
    }

    fn reads(&self, page: u64, number: u64) {
        assert_eq!(self.guest.read(PageIndex(page)), *pattern(number));
    }

    fn state(&self, page: u64) -> SimPageState {
        self.guest.state(PageIndex(page))
    }

    fn stop(&self, pages: PageRange) -> Held {
        self.memory.stop(pages, Backing::Own).unwrap()
    }

    fn share(&self, pages: PageRange, frame: u32) -> Result<(), BackendError> {
        let frame = FrameId(frame);
        self.memory.share(pages, Backing::Own, &self.store, frame)
    }

    /// Merges pages, which get patterns from `frame` on.
    fn merge(&self, pages: PageRange, frame: u32) {
        for (number, page) in (u64::from(frame)..).zip(pages.iter()) {
            self.guest.write(page, &pattern(number));
        }
        self.stop(pages);
        self.share(pages, frame).unwrap();
        self.memory.lift(pages, Backing::Own);
    }

    /// Merges a page with the frame of its pattern, and lets it be copied.
    fn copy(&self, page: u64, frame: u32) {
        self.merge(one(page), frame);
        self.write(page, frame.into());
        assert_eq!(self.state(page), SimPageState::Copied);
    }
}
