//! Everything there is on a simulated host, and the ways a page changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::call::{Call, FailurePlan};
use super::config::{SimConfig, Storm};
use super::page::{Below, Bytes, Hold, Write};
use super::region::{Region, Waiter};
use super::rng::Rng;
use crate::backend::RegionOptions;
use crate::error::{BackendError, RegisterError};
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};

/// What is going on at one moment, over all guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// Pages whose writers wait.
    pub stopped: u64,
    /// Pages whose readers wait too.
    pub out: u64,
    /// Writes that wait.
    pub waiting: u64,
}

impl Busy {
    /// Whether nothing is stopped or out, and nobody waits.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.stopped == 0 && self.out == 0 && self.waiting == 0
    }
}

/// A frame of a store, and who uses it.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// Nothing when no memory is reserved for it.
    pub(super) bytes: Option<Arc<PageBuf>>,
    /// Pages in which it shows.
    pub(super) shown: u64,
    /// Pages that were copied from it and still stand over it.
    pub(super) copied: u64,
}

/// The host's data.
#[derive(Debug)]
pub(super) struct World {
    pub(super) config: SimConfig,
    pub(super) rng: Rng,
    pub(super) storm: Storm,
    pub(super) plan: FailurePlan,
    pub(super) stores: Vec<BTreeMap<FrameId, Frame>>,
    pub(super) regions: Vec<Region>,
    pub(super) vmas: u64,
    /// Nothing happens but what the engine does.
    pub(super) still: bool,
    /// Calls of these kinds that a store gets sleep.
    pub(super) asleep: Vec<Call>,
    pub(super) violation: Option<String>,
    pub(super) zero: Arc<PageBuf>,
}

impl World {
    pub(super) fn new(config: SimConfig) -> Self {
        assert!(config.pages_per_huge.is_power_of_two(), "huge page size");
        Self {
            rng: Rng::new(config.seed),
            config,
            storm: Storm::default(),
            plan: FailurePlan::default(),
            stores: Vec::new(),
            regions: Vec::new(),
            vmas: 0,
            still: false,
            asleep: Vec::new(),
            violation: None,
            zero: Arc::from(PageBuf::zeroed()),
        }
    }

    /// Demands what the contract says. Says what was broken by a panic, except
    /// in a thread that panics already: the engine is cleaning up there.
    pub(super) fn demand(&mut self, kept: bool, broken: impl FnOnce() -> String) {
        if kept {
            return;
        }
        let text = format!("contract broken: {}", broken());
        self.violation.get_or_insert_with(|| text.clone());
        assert!(std::thread::panicking(), "{text}");
    }

    /// Counts a call, and lets it fail if it is to.
    pub(super) fn may_fail(&mut self, call: Call) -> Result<(), BackendError> {
        if self.still {
            return Ok(());
        }
        match self.plan.count(call, &mut self.rng) {
            Some(failure) => Err(failure.error(call)),
            None => Ok(()),
        }
    }

    pub(super) fn add_region(&mut self, pages: u64) -> usize {
        self.regions.push(Region::new(pages));
        self.vmas += 1;
        self.regions.len() - 1
    }

    pub(super) fn add_store(&mut self) -> usize {
        self.stores.push(BTreeMap::new());
        self.stores.len() - 1
    }

    pub(super) fn attach(
        &mut self,
        region: usize,
        options: RegionOptions,
    ) -> Result<u64, RegisterError> {
        // Its number is as good as an address.
        let address = region as u64;
        let region = &mut self.regions[region];
        if region.options.is_some() {
            return Err(RegisterError::OtherUserfaultfd { address });
        }
        if region.pages.iter().any(|page| page.below.is_some()) {
            return Err(RegisterError::PrivateFile { address });
        }
        region.options = Some(options);
        region.attached = 1;
        region.store = None;
        Ok(region.len())
    }

    pub(super) fn busy(&self) -> Busy {
        let mut busy = Busy::default();
        for region in &self.regions {
            busy.waiting += region.waiters.len() as u64;
            for page in &region.pages {
                match page.hold {
                    Hold::Free => {}
                    Hold::Stopped => busy.stopped += 1,
                    Hold::Out | Hold::Gone => busy.out += 1,
                }
            }
        }
        busy
    }

    pub(super) fn frame(&mut self, store: usize, frame: FrameId) -> &mut Frame {
        self.stores[store].entry(frame).or_default()
    }

    /// A frame's bytes; zeros where it has none.
    pub(super) fn frame_bytes(&self, store: usize, frame: FrameId) -> &Arc<PageBuf> {
        let frame = self.stores[store].get(&frame);
        frame.and_then(|f| f.bytes.as_ref()).unwrap_or(&self.zero)
    }

    /// A page's bytes.
    pub(super) fn bytes(&self, region: usize, page: PageIndex) -> Arc<PageBuf> {
        let page = self.regions[region].page(page);
        let bytes = match (page.own(), page.below) {
            (Some(own), _) => own,
            (None, Some((store, frame))) => self.frame_bytes(store, frame),
            (None, None) => &self.zero,
        };
        Arc::clone(bytes)
    }

    /// Changes what a page is, and keeps the frames' accounts.
    pub(super) fn put(&mut self, region: usize, page: PageIndex, below: Below, bytes: Bytes) {
        self.account(region, page, |count| *count -= 1);
        let place = self.regions[region].page_mut(page);
        place.below = below;
        place.bytes = bytes;
        self.account(region, page, |count| *count += 1);
    }

    fn account(&mut self, region: usize, page: PageIndex, change: impl Fn(&mut u64)) {
        let page = self.regions[region].page(page);
        let copied = page.own().is_some();
        if let Some((store, frame)) = page.below {
            let frame = self.frame(store, frame);
            change(if copied {
                &mut frame.copied
            } else {
                &mut frame.shown
            });
        }
    }

    /// Puts new mappings in place of `range`, if there are VMAs for them: the
    /// old pages are gone with all that was peculiar to them.
    pub(super) fn remap(
        &mut self,
        region: usize,
        range: PageRange,
        new: impl Fn(PageIndex) -> (Below, Bytes),
    ) -> Result<(), BackendError> {
        let place = &self.regions[region];
        let before = place.vma_starts(range, |page| place.page(page).below);
        let after = place.vma_starts(range, |page| new(page).0);
        let vmas = self.vmas + after - before;
        if after > before && vmas > self.config.max_vmas {
            return Err(BackendError::NoVmas);
        }
        self.vmas = vmas;
        for page in range.iter() {
            let (below, bytes) = new(page);
            self.put(region, page, below, bytes);
            self.forget_page(region, page);
            self.regions[region].page_mut(page).hold = Hold::Free;
        }
        Ok(())
    }

    /// The physical page is gone: nothing pins it, no child shares it, and the
    /// huge page it was in is split.
    pub(super) fn forget_page(&mut self, region: usize, page: PageIndex) {
        self.split_huge(region, page);
        let page = self.regions[region].page_mut(page);
        page.pinned = false;
        page.forked = false;
    }

    /// The pages of the huge page that `page` could be part of.
    pub(super) const fn huge_range(&self, page: PageIndex) -> PageRange {
        let pages = self.config.pages_per_huge;
        PageRange::new(PageIndex(page.0 & !(pages - 1)), pages)
    }

    pub(super) fn split_huge(&mut self, region: usize, page: PageIndex) {
        if self.regions[region].page(page).huge {
            for part in self.huge_range(page).iter() {
                self.regions[region].page_mut(part).huge = false;
            }
        }
    }

    /// Does a write, now. Returns what the page holds then, or nothing if it
    /// was dropped.
    pub(super) fn apply(
        &mut self,
        region: usize,
        page: PageIndex,
        write: &Write,
    ) -> Option<Arc<PageBuf>> {
        let below = self.regions[region].page(page).below;
        if let Write::Drop = write {
            self.put(region, page, below, Bytes::Nowhere);
            self.forget_page(region, page);
            return None;
        }
        let after = write.on(&self.bytes(region, page));
        self.put(region, page, below, Bytes::Own(Arc::clone(&after)));
        // A write to a page that a child shares makes a copy for this process.
        self.regions[region].page_mut(page).forked = false;
        Some(after)
    }

    /// Lets the writes go on that wait for pages of `range`, in order.
    pub(super) fn wake(&mut self, region: usize, range: PageRange) {
        for Waiter { page, write, vcpu } in self.regions[region].take_waiters(range) {
            let after = self.apply(region, page, &write);
            if vcpu.is_some() {
                self.regions[region].log.push((page, after));
            }
        }
    }
}
