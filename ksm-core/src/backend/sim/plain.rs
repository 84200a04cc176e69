//! The calls that stop nothing: they look at pages, fill them, drop them.

use std::io;
use std::sync::Arc;

use super::call::Call;
use super::config::Storm;
use super::page::{Bytes, Hold, Write};
use super::stop::nth_frame;
use super::world::World;
use crate::backend::{Backing, PageRun};
use crate::error::BackendError;
use crate::page::{FrameId, PAGE_SIZE, PageBuf, PageIndex, PageRange};

impl World {
    pub(super) fn populated(
        &self,
        region: usize,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> PageIndex {
        let first = runs.len();
        let mut left = max_pages;
        for (page, place) in self.regions[region].each(within) {
            let Some(state) = place.mapped(self.config.stop) else {
                continue;
            };
            if left == 0 {
                return page;
            }
            left -= 1;
            let huge = place.huge;
            match runs[first..].last_mut() {
                Some(run) if (run.range.end, run.state, run.huge) == (page, state, huge) => {
                    run.range.end = page.plus(1);
                }
                _ => runs.push(PageRun {
                    range: PageRange::one(page),
                    state,
                    huge,
                }),
            }
        }
        within.end
    }

    /// Reads a page while the world goes on: the second half of the copy may be
    /// of another time than the first.
    pub(super) fn read(
        &mut self,
        region: usize,
        page: PageIndex,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError> {
        let waits = self.regions[region].read_waits(page);
        self.demand(!waits, || {
            format!("read of page {page} waits for itself: it is out")
        });
        self.may_fail(Call::Read)?;
        let place = self.regions[region].page(page);
        let absent = place.below.is_none() && matches!(place.bytes, Bytes::Nowhere);
        if absent && self.rng.chance(500) {
            return Err(BackendError::Host {
                call: "read",
                source: io::ErrorKind::NotFound.into(),
            });
        }
        let half = PAGE_SIZE / 2;
        let bytes = self.bytes(region, page);
        buf.bytes_mut()[..half].copy_from_slice(&bytes.bytes()[..half]);
        self.step(Some((region, PageRange::one(page))));
        let bytes = self.bytes(region, page);
        buf.bytes_mut()[half..].copy_from_slice(&bytes.bytes()[half..]);
        if !absent {
            self.touch(region, page);
        }
        Ok(())
    }

    pub(super) fn populate(&mut self, region: usize, range: PageRange) -> Result<(), BackendError> {
        self.demand_backing(Call::Populate, region, range, Backing::Frame);
        // On stopped pages it would wait for itself.
        self.demand_held(Call::Populate, region, range, false);
        let verdict = self.may_fail(Call::Populate);
        let short = verdict.is_err() || self.rng.chance(self.storm.short);
        let done = match short {
            true => self.rng.below(range.len()),
            false => range.len(),
        };
        for page in PageRange::new(range.start, done).iter() {
            self.apply(region, page, &Write::Same);
        }
        verdict
    }

    pub(super) fn discard(
        &mut self,
        region: usize,
        range: PageRange,
        backing: Backing,
    ) -> Result<(), BackendError> {
        let repeats = backing == Backing::Frame && self.regions[region].discarded == range;
        if !repeats {
            self.demand_backing(Call::Discard, region, range, backing);
        }
        self.demand_held(Call::Discard, region, range, false);
        self.may_fail(Call::Discard)?;
        if backing == Backing::Frame {
            self.regions[region].discarded = range;
            self.remap(region, range, |_| (None, Bytes::Nowhere))?;
        } else {
            for page in range.iter() {
                self.apply(region, page, &Write::Drop);
            }
        }
        if self.storm != Storm::default() {
            let dropped = range.iter().map(|page| (page, None));
            self.regions[region].log.extend(dropped);
        }
        Ok(())
    }

    pub(super) fn adopt(
        &mut self,
        region: usize,
        range: PageRange,
        store: usize,
        first: FrameId,
    ) -> Result<(), BackendError> {
        let place = &self.regions[region];
        let repeats = range.iter().all(|page| {
            let frame = nth_frame(range, page, first);
            place.page(page).below == Some((store, frame))
        });
        if !repeats {
            self.demand_backing(Call::Adopt, region, range, Backing::Own);
        }
        self.demand_held(Call::Adopt, region, range, false);
        self.may_fail(Call::Adopt)?;
        self.map_store(region, range, store, first)
    }

    pub(super) fn vacate(&mut self, region: usize, range: PageRange) -> Result<(), BackendError> {
        self.demand_backing(Call::Vacate, region, range, Backing::Own);
        self.demand_held(Call::Vacate, region, range, false);
        self.may_fail(Call::Vacate)?;
        for page in range.iter() {
            self.apply(region, page, &Write::Drop);
        }
        Ok(())
    }

    pub(super) fn fill_page(
        &mut self,
        region: usize,
        page: PageIndex,
        content: &PageBuf,
    ) -> Result<(), BackendError> {
        self.demand_backing(Call::FillPage, region, PageRange::one(page), Backing::Own);
        self.may_fail(Call::FillPage)?;
        self.apply(region, page, &Write::Whole(Arc::new(content.clone())));
        Ok(())
    }

    pub(super) fn detach(&mut self, region: usize, range: PageRange) {
        let place = &mut self.regions[region];
        place.attached -= 1;
        if place.attached == 0 {
            place.options = None;
        }
        let held = place
            .each(range)
            .filter(|(_, page)| page.hold != Hold::Free)
            .count();
        // After another verdict it is no wonder, and a second panic would hide it.
        self.demand(held == 0 || self.violation.is_some(), || {
            format!("memory is dropped with {held} pages stopped or out")
        });
    }
}
