//! Clones: a region whose pages are those of another one, most of them by mapping
//! the same frames (`dup_mmap`, for guests).
//!
//! First the parent's own pages come to map frames, as in a pass, but whether
//! they have equals or not ([`scan::Aim::Freeze`](crate::scan::Aim)). Then the
//! clone maps what the parent maps, in runs. It has no rmap_items: the parent's
//! stand for its pages as well. What has no frame is copied.

use crate::backend::{Backend, Memory, PageState};
use crate::error::BackendError;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};
use crate::region::{Class, Region, RegionGuard};
use crate::rmap::ItemId;
use crate::unshare;

/// A clone that is being made: nobody knows of it yet, and if it is dropped
/// before it is [ready](Nursling::ready) it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Nursling<B: Backend>(Option<Region<B>>);

/// Neighbours over consecutive frames.
#[derive(Debug, Default)]
struct Run {
    first: Option<(PageIndex, FrameId)>,
    items: Vec<ItemId>,
}

impl<B: Backend> Drop for Nursling<B> {
    fn drop(&mut self) {
        if let Some(Ok(guard)) = self.0.as_ref().map(Region::lock) {
            unshare::give_up(&guard);
        }
    }
}

impl<B: Backend> Nursling<B> {
    pub(crate) const fn new(region: Region<B>) -> Self {
        Self(Some(region))
    }

    /// The region, complete.
    pub(crate) fn ready(mut self) -> Region<B> {
        self.0
            .take()
            .expect("taken only here, and dropped only then")
    }

    fn region(&self) -> &Region<B> {
        self.0.as_ref().expect("there until it is ready")
    }

    /// Clones the pages of `range`, which were not before. What the parent's guest
    /// writes meanwhile is in the clone or not, page by page.
    ///
    /// # Errors
    /// When the host has no memory for copies, or the page map cannot be read.
    pub(crate) fn take(
        &self,
        parent: &RegionGuard<'_, B>,
        range: PageRange,
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
        // Frames that somebody is emptying are for nobody to come to.
        let emptied = parent.region().domain.sealed();
        let (to_copy, to_map): (Vec<_>, Vec<_>) = merged
            .iter()
            .partition(|(_, frame, _)| emptied.contains(frame));
        self.map(parent, &to_map)?;
        self.copy(parent, to_copy.into_iter().map(|(page, ..)| page))?;
        let mut merged = merged.iter().map(|&(page, ..)| page).peekable();
        let shown = runs.iter().filter(|run| run.state != PageState::Zero);
        let mut own: Vec<_> = shown.map(|run| run.range).collect();
        own.extend(parent.memory().hidden(range, &runs));
        own.sort_unstable_by_key(|range| range.start);
        let own = own.iter().flat_map(|range| range.iter()).filter(|&page| {
            while merged.next_if(|&merged| merged < page).is_some() {}
            merged.peek() != Some(&page)
        });
        self.copy(parent, own)
    }

    /// Maps what the parent maps.
    fn map(&self, parent: &RegionGuard<'_, B>, merged: &[Merged]) -> Result<(), BackendError> {
        let mut run = Run::default();
        for &(page, frame, item) in merged {
            if !run.goes_on(page, frame) {
                self.map_run(parent, &std::mem::take(&mut run))?;
            }
            run.first.get_or_insert((page, frame));
            run.items.push(item);
        }
        self.map_run(parent, &run)
    }

    fn map_run(&self, parent: &RegionGuard<'_, B>, run: &Run) -> Result<(), BackendError> {
        let Some((page, frame)) = run.first else {
            return Ok(());
        };
        let (clone, domain) = (self.region(), &parent.region().domain);
        let range = PageRange::new(page, run.items.len() as u64);
        // Counted first, as before any mapping: the frames stay.
        domain.add_clones(frame, &run.items);
        let guard = clone.lock().expect("nobody else knows of it");
        if guard.memory().adopt(range, &domain.store, frame).is_ok() {
            let parents = parent.region().pages();
            clone.pages().take_run(&parents, range);
            return Ok(());
        }
        drop(guard);
        domain.remove_clones(frame, &run.items);
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

impl Run {
    /// Whether a page over `frame` continues it.
    fn goes_on(&self, page: PageIndex, frame: FrameId) -> bool {
        let Some((first_page, first_frame)) = self.first else {
            return true;
        };
        let len = self.items.len() as u64;
        page == first_page.plus(len) && u64::from(frame.0) == u64::from(first_frame.0) + len
    }
}
