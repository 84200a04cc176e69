//! The calls that stop pages, put something in their place, and lift them: on
//! the world, with the demands that the contract makes.

use std::sync::Arc;

use super::call::Call;
use super::config::Stop;
use super::page::{Bytes, Hold};
use super::region::at;
use super::world::World;
use crate::backend::{Backing, Held, Refusal, Settled};
use crate::error::BackendError;
use crate::page::{FrameId, PageIndex, PageRange};

impl World {
    /// Demands of each call: pages that exist, of one backing.
    pub(super) fn demand_range(&mut self, call: Call, region: usize, range: PageRange) {
        let len = self.regions[region].len();
        self.demand(!range.is_empty(), || format!("{call} of no page"));
        self.demand(range.end.0 <= len, || {
            format!("{call} of {range} in {len} pages of memory")
        });
    }

    pub(super) fn demand_backing(
        &mut self,
        call: Call,
        region: usize,
        range: PageRange,
        backing: Backing,
    ) {
        self.demand_range(call, region, range);
        let wrong = self.regions[region].find(range, |page| page.backing() != backing);
        if let Some((page, _)) = wrong {
            self.demand(false, || {
                format!("{call} of {range} as {backing:?}, which page {page} is not")
            });
        }
    }

    /// Demands that all of `range` is held, or nothing of it.
    pub(super) fn demand_held(&mut self, call: Call, region: usize, range: PageRange, held: bool) {
        let wrong = self.regions[region].find(range, |page| match held {
            true => !page.is_held(),
            false => page.hold != Hold::Free,
        });
        if let Some((page, state)) = wrong {
            self.demand(false, || {
                format!("{call} of {range}, in which page {page} is {state:?}")
            });
        }
    }

    pub(super) fn stop(
        &mut self,
        region: usize,
        range: PageRange,
        backing: Backing,
    ) -> Result<Held, BackendError> {
        self.demand_backing(Call::Stop, region, range, backing);
        self.demand_held(Call::Stop, region, range, false);
        let max = self.config.max_stop;
        self.demand(range.len() <= max, || {
            format!("stop of {range}, longer than {max} pages")
        });
        if backing == Backing::Frame {
            self.demand_copied(region, range);
        }
        self.may_fail(Call::Stop)?;
        let mut answer = Held::default();
        for page in range.iter() {
            if let Err(refusal) = self.stop_page(region, page, backing) {
                answer.refused.push((page, refusal));
                continue;
            }
            match answer.held.last_mut() {
                Some(last) if last.end == page => last.end = page.plus(1),
                _ => answer.held.push(PageRange::one(page)),
            }
        }
        Ok(answer)
    }

    /// A write-protect of a merged page stops nobody from making it copied, and
    /// DMA to a copy is not noticed.
    fn demand_copied(&mut self, region: usize, range: PageRange) {
        let options = self.regions[region].options.unwrap_or_default();
        self.demand(options.dma_guarded, || {
            format!("stop of copied pages {range} where DMA is not guarded")
        });
        let merged = self.regions[region].find(range, |page| page.own().is_none());
        if let Some((page, _)) = merged {
            self.demand(false, || format!("stop of merged page {page}"));
        }
    }

    fn stop_page(
        &mut self,
        region: usize,
        page: PageIndex,
        backing: Backing,
    ) -> Result<(), Refusal> {
        let moves = backing == Backing::Own && self.config.stop == Stop::Move;
        let place = self.regions[region].page(page);
        if place.own().is_none() {
            return Err(Refusal::Raced);
        }
        if moves && self.is_pinned(region, page) {
            return Err(Refusal::Pinned);
        }
        if moves && place.forked {
            return Err(Refusal::NotExclusive);
        }
        if place.huge && self.config.stop == Stop::Protect {
            return Err(Refusal::Huge);
        }
        // It is not in the page table.
        let absent = backing == Backing::Own && place.mapped(self.config.stop).is_none();
        if absent {
            return Err(Refusal::Raced);
        }
        if self.rng.chance(self.storm.short) {
            return Err(Refusal::Raced);
        }
        let unnoticed = self.regions[region].page(page).pinned;
        self.demand(!unnoticed, || {
            format!("write-protection of page {page}, to which a device may write all the same")
        });
        self.split_huge(region, page);
        let hold = if moves { Hold::Out } else { Hold::Stopped };
        self.regions[region].page_mut(page).hold = hold;
        Ok(())
    }

    /// A huge page is pinned as a whole.
    pub(super) fn is_pinned(&self, region: usize, page: PageIndex) -> bool {
        let region = &self.regions[region];
        let range = match region.page(page).huge {
            true => self.huge_range(page),
            false => PageRange::one(page),
        };
        region.each(range).any(|(_, page)| page.pinned)
    }

    pub(super) fn share(
        &mut self,
        region: usize,
        range: PageRange,
        backing: Backing,
        store: usize,
        first: FrameId,
    ) -> Result<(), BackendError> {
        self.demand_backing(Call::Share, region, range, backing);
        self.demand_held(Call::Share, region, range, true);
        for page in range.iter() {
            let frame = nth_frame(range, page, first);
            self.demand_equal(Call::Share, region, page, (store, frame));
        }
        self.may_fail(Call::Share)?;
        self.map_store(region, range, store, first)
    }

    /// Maps the frames from `first` on in place of `range`.
    pub(super) fn map_store(
        &mut self,
        region: usize,
        range: PageRange,
        store: usize,
        first: FrameId,
    ) -> Result<(), BackendError> {
        let other = self.regions[region].store.is_some_and(|own| own != store);
        self.demand(!other, || {
            format!("{range} over the frames of another domain")
        });
        for page in range.iter() {
            let frame = nth_frame(range, page, first);
            let reserved = self.frame(store, frame).bytes.is_some();
            self.demand(reserved, || {
                format!("page {page} over frame {frame}, which has no memory")
            });
        }
        self.remap(region, range, |page| {
            let frame = nth_frame(range, page, first);
            (Some((store, frame)), Bytes::Nowhere)
        })?;
        self.regions[region].store = Some(store);
        Ok(())
    }

    /// The one thing that must never go wrong: a page's bytes are those of what
    /// takes its place.
    fn demand_equal(
        &mut self,
        call: Call,
        region: usize,
        page: PageIndex,
        (store, id): (usize, FrameId),
    ) {
        let bytes = self.bytes(region, page);
        let reserved = self.frame(store, id).bytes.is_some();
        self.demand(reserved, || {
            format!("{call} of page {page} with frame {id}, which has no memory")
        });
        let equal = *self.frame_bytes(store, id) == bytes;
        self.demand(equal, || {
            format!("{call} of page {page} with frame {id}, which differs from it")
        });
    }

    pub(super) fn reuse(&mut self, region: usize, range: PageRange) -> Result<(), BackendError> {
        self.demand_backing(Call::Reuse, region, range, Backing::Frame);
        self.demand_held(Call::Reuse, region, range, true);
        for page in range.iter() {
            if let Some(below) = self.regions[region].page(page).below {
                self.demand_equal(Call::Reuse, region, page, below);
            }
        }
        self.may_fail(Call::Reuse)?;
        for page in range.iter() {
            let below = self.regions[region].page(page).below;
            // The write-protect marker stays, and writers wait on.
            self.put(region, page, below, Bytes::Nowhere);
            self.forget_page(region, page);
        }
        Ok(())
    }

    pub(super) fn zero(
        &mut self,
        region: usize,
        range: PageRange,
        backing: Backing,
    ) -> Result<(), BackendError> {
        self.demand_backing(Call::Zero, region, range, backing);
        self.demand_held(Call::Zero, region, range, true);
        for page in range.iter() {
            let zero = self.bytes(region, page).is_zero();
            self.demand(zero, || {
                format!("zero of page {page}, which has other bytes")
            });
        }
        self.may_fail(Call::Zero)?;
        if backing == Backing::Frame {
            return self.remap(region, range, |_| (None, Bytes::Nowhere));
        }
        for page in range.iter() {
            self.put(region, page, None, Bytes::Nowhere);
            self.forget_page(region, page);
            let place = self.regions[region].page_mut(page);
            // Where pages were moved out, a touch of the hole waits as well.
            place.hold = match place.hold {
                Hold::Out | Hold::Gone => Hold::Gone,
                Hold::Stopped | Hold::Free => Hold::Free,
            };
        }
        Ok(())
    }

    pub(super) fn restore(&mut self, region: usize, range: PageRange) -> Result<(), BackendError> {
        self.demand_backing(Call::Restore, region, range, Backing::Frame);
        self.demand_held(Call::Restore, region, range, true);
        self.may_fail(Call::Restore)?;
        let bytes: Vec<_> = range.iter().map(|page| self.bytes(region, page)).collect();
        self.remap(region, range, |page| {
            let nth = at(PageIndex(page.0 - range.start.0));
            (None, Bytes::Own(Arc::clone(&bytes[nth])))
        })
    }

    pub(super) fn lift(&mut self, region: usize, range: PageRange, backing: Backing) {
        for page in range.iter() {
            let place = self.regions[region].page_mut(page);
            let (held, stands_on) = (place.is_held(), place.backing());
            place.hold = Hold::Free;
            self.demand(!held || stands_on == backing, || {
                format!("lift of page {page} as {backing:?}, which it is not")
            });
        }
        self.wake(region, range);
    }

    pub(super) fn settle(&mut self, region: usize, range: PageRange, backing: Backing) -> Settled {
        let pages = self.regions[region].each(range);
        let held = pages.filter(|(_, page)| page.is_held()).count() as u64;
        self.demand(held == 0 || held == range.len(), || {
            format!("settle of {range}, of which {held} pages are held")
        });
        self.lift(region, range, backing);
        match held {
            0 => Settled::Replaced,
            _ => Settled::Kept,
        }
    }
}

/// The frame of `page` where those of `range` begin with `first`.
pub(super) fn nth_frame(range: PageRange, page: PageIndex, first: FrameId) -> FrameId {
    let nth = u32::try_from(page.0 - range.start.0);
    first.plus(nth.expect("a range is shorter than a store"))
}
