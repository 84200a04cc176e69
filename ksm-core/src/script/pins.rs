//! DMA: guards that announce it, and devices that pin pages.

use super::host::{Host, Meddling};
use super::op::Reach;
use super::run::{Applied, Outcome, Region, Runner};
use crate::engine::Ksm;
use crate::error::Error;
use crate::page::{PageIndex, PageRange};
use crate::region::PinGuard;

/// A guard that the embedder holds, with its region's place.
#[derive(Debug)]
pub(super) struct Guard {
    region: usize,
    guard: PinGuard,
}

impl Guard {
    /// The memory and the pages of it that it holds.
    fn pages(&self, regions: &[Region]) -> (usize, PageRange) {
        let region = &regions[self.region];
        (region.memory, region.in_memory(self.guard.pages()))
    }
}

impl<H: Host> Runner<H> {
    pub(super) fn pin_guard(&mut self, region: usize, range: PageRange) -> Outcome {
        let (Some(id), Some((_, range))) = (self.region(region), self.memory(region, range)) else {
            return Ok(Applied::Skipped);
        };
        match self.ksm.pin(id, range) {
            Ok(guard) => {
                self.guards.push(Guard { region, guard });
                self.nothing_merged(Reach::Pages(region, range))?;
                Ok(Applied::Done)
            }
            refused => self.accept(refused),
        }
    }

    /// Gives up the guards that hold any of these pages, when no device uses
    /// what they alone held any more.
    pub(super) fn unpin_guards(&mut self, region: usize, range: PageRange) -> Applied {
        let Some(place) = self.regions.get(region) else {
            return Applied::Skipped;
        };
        let (memory, range) = (place.memory, place.in_memory(range));
        let regions = &self.regions;
        let ends = |held: &mut Guard| {
            let (of, pages) = held.pages(regions);
            of == memory && !pages.intersection(range).is_empty()
        };
        let ended: Vec<_> = self.guards.extract_if(.., ends).collect();
        for held in &ended {
            let (_, pages) = held.pages(&self.regions);
            for page in pages.iter().map(PageRange::one) {
                if !self.memory_is_held(memory, page) {
                    let guest = &self.memories[memory].guest;
                    self.host.meddle(guest, page, Meddling::Unpin);
                }
            }
        }
        match ended.is_empty() {
            true => Applied::Skipped,
            false => Applied::Done,
        }
    }

    /// Whether guards hold any of these pages.
    pub(super) fn is_held(&self, region: usize, range: PageRange) -> bool {
        let region = &self.regions[region];
        self.memory_is_held(region.memory, region.in_memory(range))
    }

    fn memory_is_held(&self, memory: usize, range: PageRange) -> bool {
        self.guards.iter().any(|held| {
            let (of, pages) = held.pages(&self.regions);
            of == memory && !pages.intersection(range).is_empty()
        })
    }

    /// A device pins a page.
    pub(super) fn pin(&mut self, region: usize, page: PageIndex) -> Outcome {
        let one = PageRange::one(page);
        if self.memory(region, one).is_none() {
            return Ok(Applied::Skipped);
        }
        if self.is_held(region, one) {
            return self.meddle(region, one, Meddling::AnnouncedPin);
        }
        // A pin that nothing notices would be the embedder's fault.
        if self.is_guarded(region) {
            return Ok(Applied::Skipped);
        }
        self.meddle(region, one, Meddling::Pin)
    }

    /// Makes a call that the engine must refuse while there are guards; then
    /// they are given up, and it is made again.
    pub(super) fn despite_guards(
        &mut self,
        call: impl Fn(&Ksm<H::Backend>) -> Result<(), Error>,
    ) -> Result<Result<(), Error>, String> {
        loop {
            let done = call(&self.ksm);
            let Err(Error::Pinned { region }) = done else {
                return Ok(done);
            };
            let place = self
                .regions
                .iter()
                .position(|known| known.id == Some(region));
            let place = place.ok_or("a region is pinned that is not there")?;
            let all = self.regions[place].range();
            if self.unpin_guards(place, all) == Applied::Skipped {
                return Err(format!("region {region} is pinned, by no guard"));
            }
        }
    }

    /// Pages stay registered as long as guards hold them.
    pub(super) fn verify_guards(&self) -> Result<(), String> {
        let stays = |held: &Guard| {
            let (memory, pages) = held.pages(&self.regions);
            let users = self.regions.iter();
            let users = users.filter(|user| user.memory == memory && user.id.is_some());
            let inside = |user: &Region| user.in_memory(user.range()).intersection(pages).len();
            users.map(inside).sum::<u64>() == pages.len()
        };
        match self.guards.iter().find(|held| !stays(held)) {
            Some(held) => Err(format!("pages of {held:?} are gone")),
            None => Ok(()),
        }
    }
}

/// What became of a call that guards must have kept from being done.
pub(super) fn refused_as_pinned(done: Result<(), Error>) -> Outcome {
    match done {
        Err(error @ Error::Pinned { .. }) => Ok(Applied::Refused(error.to_string())),
        done => Err(format!("not refused, though guards hold pages: {done:?}")),
    }
}
