//! What happens between the steps of the engine.

use std::sync::Arc;

use super::config::{Stop, Storm};
use super::page::{Bytes, Hold, Write, pattern};
use super::region::Waiter;
use super::world::World;
use crate::page::{PAGE_SIZE, PageIndex, PageRange};

/// The pages that the call at hand is about.
pub(super) type Focus = Option<(usize, PageRange)>;

impl World {
    /// One step of everybody but the engine.
    pub(super) fn step(&mut self, focus: Focus) {
        let storm = self.storm;
        if self.still {
            return;
        }
        if self.rng.chance(storm.write) {
            self.storm_writes(focus);
        }
        if self.rng.chance(storm.read) {
            let (region, page) = self.pick(focus);
            if !self.regions[region].paused {
                self.touch(region, page);
            }
        }
        if self.rng.chance(storm.swap) {
            let (region, page) = self.pick(focus);
            self.swap_out(region, page);
        }
        if self.rng.chance(storm.discard) {
            let (region, page) = self.pick(focus);
            self.storm_drops(region, page);
        }
    }

    /// A page: half of the time one of the call at hand.
    fn pick(&mut self, focus: Focus) -> (usize, PageIndex) {
        if let Some((region, range)) = focus
            && self.rng.chance(500)
        {
            let page = range.start.plus(self.rng.below(range.len()));
            return (region, page);
        }
        let region = self.rng.below(self.regions.len() as u64);
        let region = usize::try_from(region).expect("an index of a Vec");
        let page = PageIndex(self.rng.below(self.regions[region].len()));
        (region, page)
    }

    /// A vCPU that is not waiting writes to a page, or begins to wait for it.
    fn storm_writes(&mut self, focus: Focus) {
        let idle = |vcpu: &u32| {
            let mut waiters = self.regions.iter().flat_map(|region| &region.waiters);
            waiters.all(|waiter| waiter.vcpu != Some(*vcpu))
        };
        let Some(vcpu) = (0..self.storm.vcpus).find(idle) else {
            return;
        };
        let (region, page) = self.pick(focus);
        if self.regions[region].paused {
            return;
        }
        let content = self.rng.below(self.storm.contents.max(1));
        let write = if self.rng.chance(250) {
            // The last byte, which a comparison reaches last.
            Write::Byte(PAGE_SIZE - 1, content.to_le_bytes()[0])
        } else {
            Write::Whole(Arc::from(pattern(content)))
        };
        if self.regions[region].write_waits(page) {
            let vcpu = Some(vcpu);
            self.regions[region]
                .waiters
                .push(Waiter { page, write, vcpu });
        } else {
            let after = self.apply(region, page, &write);
            self.regions[region].log.push((page, after));
        }
    }

    /// A page of the guest's own is dropped: by a balloon, say. Nobody may do
    /// that to a page over a frame, which would show its old bytes.
    fn storm_drops(&mut self, region: usize, page: PageIndex) {
        let own = self.regions[region].page(page).below.is_none();
        if own && !self.regions[region].paused && !self.regions[region].write_waits(page) {
            let after = self.apply(region, page, &Write::Drop);
            self.regions[region].log.push((page, after));
        }
    }

    /// A read by the guest or on its behalf brings a page into the page table.
    /// Does nothing if it would wait.
    pub(super) fn touch(&mut self, region: usize, page: PageIndex) {
        let place = self.regions[region].page(page);
        let below = place.below;
        let bytes = match (&place.hold, &place.bytes) {
            (Hold::Out | Hold::Gone, _) => return,
            (_, Bytes::Nowhere) if below.is_none() && self.config.stop == Stop::Memfd => {
                let zero = Arc::clone(&self.zero);
                if self.storm != Storm::default() {
                    self.regions[region]
                        .log
                        .push((page, Some(Arc::clone(&zero))));
                }
                Bytes::Own(zero)
            }
            (_, Bytes::Nowhere) => Bytes::Below,
            (_, Bytes::Swap(bytes)) => Bytes::Own(Arc::clone(bytes)),
            (_, Bytes::Below | Bytes::Own(_)) => return,
        };
        self.put(region, page, below, bytes);
    }

    /// Swaps a page out. Returns whether it is swapped then: only pages with
    /// bytes of their own go there, and neither pinned ones nor parts of huge
    /// ones do.
    pub(super) fn swap_out(&mut self, region: usize, page: PageIndex) -> bool {
        let place = self.regions[region].page(page);
        let fit = !place.pinned && !place.huge && matches!(place.hold, Hold::Free | Hold::Stopped);
        let below = place.below;
        let bytes = match &place.bytes {
            Bytes::Own(bytes) if fit => Bytes::Swap(Arc::clone(bytes)),
            _ => return matches!(place.bytes, Bytes::Swap(_)),
        };
        self.put(region, page, below, bytes);
        true
    }
}
