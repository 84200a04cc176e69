//! [`Adoption`]: frames that pages of a region are to map which nobody knows of
//! yet. Written down in its [`Flight`](super::Flight), as nothing has to be stopped
//! where nobody runs.

use crate::backend::{Backend, Memory};
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Class, PageTable, RegionGuard};
use crate::rmap::ItemId;

/// Neighbours that nobody uses yet and that are to map frames in a row, or do so
/// already.
#[derive(Debug)]
pub(crate) struct Adoption {
    start: PageIndex,
    first: FrameId,
    /// Reserved in the rmap, one for each page.
    items: Vec<ItemId>,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Reserved,
    /// Being mapped: whether they are, nobody knows but the host.
    Begun,
    Mapped,
}

impl Adoption {
    /// The pages from `start` on, as many as there are `items`, are to map the frames
    /// from `first` on.
    pub(crate) const fn new(start: PageIndex, first: FrameId, items: Vec<ItemId>) -> Self {
        Self {
            start,
            first,
            items,
            progress: Progress::Reserved,
        }
    }

    pub(crate) fn range(&self) -> PageRange {
        PageRange::new(self.start, self.items.len() as u64)
    }

    /// Its pages, each with its frame and item.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (PageIndex, FrameId, ItemId)> + '_ {
        let frames = (self.first.0..).map(FrameId);
        let pages = self.range().iter().zip(frames).zip(&self.items);
        pages.map(|((page, frame), &item)| (page, frame, item))
    }
}

impl<B: Backend> RegionGuard<'_, B> {
    /// Counts pages of a clone among those that map frames, ahead of the mapping, and
    /// writes that down. What stands for the parent's pages stands for them.
    pub(crate) fn reserve_clones(&self, adoption: Adoption) {
        let domain = &self.region.domain;
        domain.add_clones(adoption.first, &adoption.items);
        self.lease.journal().adoption = Some(adoption);
        fault::point(Step::Reserved);
    }

    /// Writes down what is reserved for one page, behind those before it, which map
    /// the frames before.
    pub(crate) fn reserved(&self, page: PageIndex, frame: FrameId, item: ItemId) {
        {
            let mut flight = self.lease.journal();
            let adoption = flight
                .adoption
                .get_or_insert_with(|| Adoption::new(page, frame, Vec::new()));
            adoption.items.push(item);
        }
        fault::point(Step::Reserved);
    }

    /// Gives back what was reserved last.
    pub(crate) fn release_last(&self) {
        let last = {
            let mut flight = self.lease.journal();
            let mut adoption = flight.adoption.take();
            let last = adoption.as_ref().and_then(|run| run.pages().last());
            if let Some(run) = &mut adoption {
                run.items.pop();
            }
            flight.adoption = adoption.filter(|run| !run.items.is_empty());
            last
        };
        if let Some((_, frame, item)) = last {
            self.region.domain.release(frame, item);
        }
    }

    /// Maps what is reserved for, and lets `record` say so of the region's pages.
    ///
    /// # Errors
    /// Nothing is mapped; it is reserved still.
    pub(crate) fn adopt(
        &self,
        record: impl FnOnce(&mut PageTable, &Adoption),
    ) -> Result<(), BackendError> {
        let run = {
            let flight = self.lease.journal();
            let adoption = flight.adoption.as_ref();
            adoption.map(|adoption| (adoption.range(), adoption.first))
        };
        let Some((range, first)) = run.filter(|(range, _)| !range.is_empty()) else {
            return Ok(());
        };
        self.progressed(Progress::Begun);
        fault::point(Step::Adopting);
        let store = &self.region.domain.store;
        let adopted = self.memory().adopt(range, store, first);
        adopted.inspect_err(|_| self.progressed(Progress::Reserved))?;
        self.progressed(Progress::Mapped);
        fault::point(Step::Adopted);
        let done = self.lease.journal().adoption.take();
        if let Some(adoption) = done {
            record(&mut self.region.pages(), &adoption);
        }
        Ok(())
    }

    fn progressed(&self, progress: Progress) {
        if let Some(adoption) = &mut self.lease.journal().adoption {
            adoption.progress = progress;
        }
    }

    /// The records follow what was adopted, and what was reserved in vain is given
    /// back. What may be mapped or not is mapped again.
    pub(super) fn end_adoption(&self) {
        let begun = {
            let flight = self.lease.journal();
            let begun = |adoption: &&Adoption| adoption.progress == Progress::Begun;
            let begun = flight.adoption.as_ref().filter(begun);
            begun.map(|adoption| (adoption.range(), adoption.first))
        };
        if let Some((range, first)) = begun {
            // If this fails, so did the first time: it takes nothing more.
            let again = self.memory().adopt(range, &self.region.domain.store, first);
            self.progressed(again.map_or(Progress::Reserved, |()| Progress::Mapped));
        }
        let Some(adoption) = self.lease.journal().adoption.take() else {
            return;
        };
        for (page, frame, item) in adoption.pages() {
            if adoption.progress != Progress::Mapped {
                self.region.domain.release(frame, item);
                continue;
            }
            self.region.pages().update(page, |record| {
                record.frame = Some(frame);
                record.class = Class::Merged(item);
            });
        }
    }
}
