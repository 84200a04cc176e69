//! What guests, embedders and the host do to pages.

use std::sync::Arc;

use super::host::{Host, Meddling};
use super::op::Reach;
use super::oracle::Cell;
use super::pins::refused_as_pinned;
use super::run::{Applied, Memory, Outcome, Runner};
use super::verify::name_of;
use crate::engine::Target;
use crate::page::{PageBuf, PageRange};

impl<H: Host> Runner<H> {
    /// The memory of a region of the script, registered or not, and those of
    /// the pages that it has.
    pub(super) fn memory(&self, region: usize, range: PageRange) -> Option<(usize, PageRange)> {
        let region = self.regions.get(region)?;
        let range = range.intersection(region.range());
        (!range.is_empty()).then_some((region.memory, range))
    }

    pub(super) fn write(
        &mut self,
        region: usize,
        range: PageRange,
        bytes: impl Fn(u32) -> Box<PageBuf>,
    ) -> Outcome {
        let Some((memory, range)) = self.memory(region, range) else {
            return Ok(Applied::Skipped);
        };
        let range = self.regions[region].in_memory(range);
        for (nth, page) in (0..).zip(range.iter()) {
            let bytes = bytes(nth);
            let Memory { guest, oracle } = &mut self.memories[memory];
            self.host.write(guest, page, &bytes);
            oracle.set(page, Cell::Written(Arc::from(bytes)));
        }
        Ok(Applied::Done)
    }

    pub(super) fn read(&mut self, region: usize, range: PageRange) -> Outcome {
        let Some((memory, range)) = self.memory(region, range) else {
            return Ok(Applied::Skipped);
        };
        let range = self.regions[region].in_memory(range);
        for page in range.iter() {
            let Memory { guest, oracle } = &mut self.memories[memory];
            let bytes = self.host.read(guest, page);
            if !oracle.reads(page, &bytes) {
                return Err(format!("{} reads {bytes:?}", name_of(region, page)));
            }
            if self.host.reads_fill() {
                oracle.materialise(page);
            }
        }
        Ok(Applied::Done)
    }

    pub(super) fn discard(&mut self, region: usize, range: PageRange) -> Outcome {
        let (Some(id), Some((memory, range))) = (self.region(region), self.memory(region, range))
        else {
            return Ok(Applied::Skipped);
        };
        let done = self.ksm.discard(id, range);
        if self.is_held(region, range) {
            return refused_as_pinned(done);
        }
        for page in self.regions[region].in_memory(range).iter() {
            let Memory { guest, oracle } = &mut self.memories[memory];
            if done.is_ok() {
                oracle.set(page, Cell::Absent);
            } else if self.host.read(guest, page).is_zero() {
                // Dropped before the host refused to go on, or not.
                oracle.set(page, Cell::Dropped);
            }
        }
        self.accept(done)
    }

    pub(super) fn unmerge(&mut self, reach: Reach) -> Outcome {
        let target = match reach {
            Reach::All => Some(Target::All),
            Reach::Space(space) => {
                let space = self.spaces.get(space).and_then(Option::as_ref);
                space.map(|space| Target::Space(space.id))
            }
            Reach::Pages(region, range) => {
                let id = self.region(region);
                let range = self.memory(region, range);
                id.zip(range)
                    .map(|(id, (_, range))| Target::Pages(id, range))
            }
        };
        let Some(target) = target else {
            return Ok(Applied::Skipped);
        };
        let done = self.ksm.unmerge(target);
        if done.is_ok() {
            self.nothing_merged(reach)?;
        }
        self.accept(done)
    }

    /// After an unmerge, none of its pages is shared.
    pub(super) fn nothing_merged(&self, reach: Reach) -> Result<(), String> {
        let Reach::Pages(region, range) = reach else {
            let all = matches!(reach, Reach::All) && self.ksm.stats().pages_shared > 0;
            return match all {
                true => Err("pages are shared after an unmerge of everything".into()),
                false => Ok(()),
            };
        };
        let id = self.region(region).ok_or("an unmerged region is gone")?;
        let range = range.intersection(self.regions[region].range());
        for page in range.iter() {
            let sharers = self
                .ksm
                .explain(id, page)
                .map_err(|e| e.to_string())?
                .sharers;
            if sharers > 0 {
                return Err(format!(
                    "{} is shared after its unmerge",
                    name_of(region, page)
                ));
            }
        }
        Ok(())
    }

    /// Whether a region's memory is registered as free of unannounced DMA.
    pub(super) fn is_guarded(&self, region: usize) -> bool {
        let Some(region) = self.regions.get(region) else {
            return false;
        };
        let mut users = self
            .regions
            .iter()
            .filter(|user| user.memory == region.memory);
        users.any(|user| user.id.is_some() && user.guarded)
    }

    /// What only some hosts can do.
    pub(super) fn meddle(&mut self, region: usize, range: PageRange, how: Meddling) -> Outcome {
        let Some((memory, range)) = self.memory(region, range) else {
            return Ok(Applied::Skipped);
        };
        let range = self.regions[region].in_memory(range);
        let Memory { guest, oracle } = &mut self.memories[memory];
        let Some(own) = self.host.meddle(guest, range, how) else {
            return Ok(Applied::Skipped);
        };
        own.iter().for_each(|page| oracle.materialise(page));
        Ok(Applied::Done)
    }
}
