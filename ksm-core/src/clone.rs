//! Clones: a region whose pages are those of another one, most of them by mapping
//! the same frames (`dup_mmap`, for guests).
//!
//! First the parent's own pages come to map frames, as in a pass, but whether
//! they have equals or not ([`scan::Aim::Freeze`](crate::scan::Aim)). Then the
//! clone maps what the parent maps, in runs. It has no rmap_items: the parent's
//! stand for its pages as well. What has no frame is copied, and so is what would
//! cost more mappings than it is worth: a clone that holds more memory is better than
//! none, or than a process that can map nothing more.

use crate::backend::{Backend, Memory, PageState};
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::nursery::Nursling;
use crate::outcome::Outcome;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::ration::{Ration, mappings_for};
use crate::region::{Adoption, Class, RegionGuard};
use crate::rmap::ItemId;

impl<B: Backend> Nursling<'_, B> {
    /// Clones the pages of `range`, which were not before, with no more mappings than
    /// the `ration` allows. What the parent's guest writes meanwhile is in the clone
    /// or not, page by page.
    ///
    /// # Errors
    /// When the host has no memory for copies, or the page map cannot be read.
    pub(crate) fn take(
        &self,
        parent: &RegionGuard<'_, B>,
        range: PageRange,
        mut ration: Ration,
    ) -> Result<(), BackendError> {
        let mut runs = Vec::new();
        let mut rest = range;
        while !rest.is_empty() {
            rest.start = parent.memory().populated(rest, rest.len(), &mut runs)?;
        }
        // What the guest has written since it was looked at last is its own.
        let own = runs
            .iter()
            .filter(|run| matches!(run.state, PageState::Private | PageState::Swapped));
        for page in own.flat_map(|run| run.range.iter()) {
            let class = parent.region().pages().get(page).class;
            if matches!(class, Class::Merged(_)) {
                parent.note_cow_break(page);
            }
        }
        let merged = merged_pages(parent, range);
        self.map(parent, &merged, &mut ration)?;
        let mut merged = merged.iter().map(|&(page, ..)| page).peekable();
        let shown = runs.iter().filter(|run| run.state != PageState::Zero);
        let mut own: Vec<_> = shown.map(|run| run.range).collect();
        own.extend(parent.memory().hidden(range, &runs));
        own.sort_unstable_by_key(|range| range.start);
        let own = own.iter().flat_map(|range| range.iter()).filter(|&page| {
            while merged.next_if(|&merged| merged < page).is_some() {}
            merged.peek() != Some(&page)
        });
        self.copy(parent, own)?;
        fault::point(Step::Reared);
        Ok(())
    }

    /// Maps what the parent maps.
    fn map(
        &self,
        parent: &RegionGuard<'_, B>,
        merged: &[Merged],
        ration: &mut Ration,
    ) -> Result<(), BackendError> {
        let goes_on = |&(page, frame, _): &Merged, &(next, after, _): &Merged| {
            page.plus(1) == next && u64::from(frame.0) + 1 == u64::from(after.0)
        };
        let mut runs = merged.chunk_by(goes_on);
        runs.try_for_each(|run| self.map_run(parent, run, ration))
    }

    fn map_run(
        &self,
        parent: &RegionGuard<'_, B>,
        run: &[Merged],
        ration: &mut Ration,
    ) -> Result<(), BackendError> {
        let Some(&(page, frame, _)) = run.first() else {
            return Ok(());
        };
        let items: Vec<_> = run.iter().map(|&(.., item)| item).collect();
        let adoption = Adoption::new(page, frame, items);
        let range = adoption.range();
        let mappings = mappings_for(&self.region().pages(), range, frame);
        if !ration.pays(range.len(), mappings) {
            self.region().tally().outcomes[Outcome::VmaBudget] += range.len();
            return self.copy(parent, range.iter());
        }
        let guard = self.region().lock().expect("nobody else knows of it");
        let landing = guard.landing();
        // Counted first, as before any mapping: the frames stay.
        guard.reserve_clones(adoption);
        let parents = parent.region();
        if guard
            .adopt(|pages, _| pages.take_run(&parents.pages(), range))
            .is_ok()
        {
            return Ok(());
        }
        drop(landing);
        drop(guard);
        ration.give_back(mappings);
        // No mapping is left for it: then each page is the clone's own.
        self.copy(parent, range.iter())
    }

    fn copy(
        &self,
        parent: &RegionGuard<'_, B>,
        mut pages: impl Iterator<Item = PageIndex>,
    ) -> Result<(), BackendError> {
        let mut buf = PageBuf::zeroed();
        let guard = self.region().lock().expect("nobody else knows of it");
        pages.try_for_each(|page| {
            parent.memory().read(page, &mut buf)?;
            match buf.is_zero() {
                true => Ok(()),
                false => guard.memory().fill(page, &buf),
            }
        })
    }
}

/// A merged page, its frame and the item that stands for it.
type Merged = (PageIndex, FrameId, ItemId);

fn merged_pages<B: Backend>(guard: &RegionGuard<'_, B>, range: PageRange) -> Vec<Merged> {
    let pages = guard.region().pages();
    let merged =
        pages
            .seen(range)
            .filter_map(|(page, record)| match (record.class, record.frame) {
                (Class::Merged(item), Some(frame)) => Some((page, frame, item)),
                _ => None,
            });
    merged.collect()
}
