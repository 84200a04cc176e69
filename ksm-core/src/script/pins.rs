//! DMA: guards that announce it, and devices that pin pages.

use super::host::{Host, Meddling};
use super::op::Reach;
use super::run::{Applied, Outcome, Runner};
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
        let ends = |held: &mut Guard| {
            held.region == region && !held.guard.pages().intersection(range).is_empty()
        };
        let ended: Vec<_> = self.guards.extract_if(.., ends).collect();
        for page in ended.iter().flat_map(|held| held.guard.pages().iter()) {
            let memory = &self.memories[self.regions[region].memory];
            if !self.is_held(region, PageRange::one(page)) {
                self.host
                    .meddle(&memory.guest, PageRange::one(page), Meddling::Unpin);
            }
        }
        match ended.is_empty() {
            true => Applied::Skipped,
            false => Applied::Done,
        }
    }

    /// Whether guards hold any of these pages.
    pub(super) fn is_held(&self, region: usize, range: PageRange) -> bool {
        let memory = self.regions[region].memory;
        self.guards.iter().any(|held| {
            let overlap = held.guard.pages().intersection(range);
            self.regions[held.region].memory == memory && !overlap.is_empty()
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
            let all = PageRange {
                start: PageIndex(0),
                end: PageIndex(u64::MAX),
            };
            if self.unpin_guards(place, all) == Applied::Skipped {
                return Err(format!("region {region} is pinned, by no guard"));
            }
        }
    }

    /// A region stays as long as there are guards.
    pub(super) fn verify_guards(&self) -> Result<(), String> {
        let gone = |held: &&Guard| self.region(held.region) != Some(held.guard.region());
        match self.guards.iter().find(gone) {
            Some(held) => Err(format!("the region of {held:?} is gone")),
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
