//! [`RegionGuard`]: a region's lease, and the records of what its holder did.

use super::{Class, Flight, LeaseGuard, Region};
use crate::backend::Backend;
use crate::page::{PageIndex, PageRange};

/// The lease of a region: the right to change its pages.
#[derive(Debug)]
pub(crate) struct RegionGuard<'a, B: Backend> {
    pub(super) region: &'a Region<B>,
    pub(super) lease: LeaseGuard<'a, Flight>,
    /// The lock of the whole layout, where there is one: given up last.
    pub(super) layout: Option<LeaseGuard<'a, ()>>,
}

impl<'a, B: Backend> RegionGuard<'a, B> {
    /// The same, with the lock of the whole layout, taken before.
    pub(crate) fn under(mut self, layout: LeaseGuard<'a, ()>) -> Self {
        self.layout = Some(layout);
        self
    }

    pub(crate) fn region(&self) -> &'a Region<B> {
        self.region
    }

    /// How often the lease had been taken when this guard took it: the next higher
    /// one is of whoever took it next.
    pub(crate) const fn epoch(&self) -> u64 {
        self.lease.epoch()
    }

    /// The memory whose pages this guard may change.
    pub(crate) fn memory(&self) -> &B::Memory {
        &self.region.memory
    }

    /// A merged page was written to, or given a copy: it maps its frame no
    /// longer, though its mapping still names it. Nothing may be stopped.
    pub(crate) fn note_copied(&self, page: PageIndex) {
        self.note_all_copied([page]);
    }

    /// The same, for many pages at once; those that are not merged are left
    /// alone.
    pub(crate) fn note_all_copied(&self, copied: impl IntoIterator<Item = PageIndex>) {
        let mut pages = self.region.pages();
        let mut unshared = Vec::new();
        for page in copied {
            let mut record = pages.get(page);
            let Class::Merged(item) = record.class else {
                continue;
            };
            record.class = Class::Volatile;
            record.fingerprint = None;
            record.age = 0;
            pages.set(page, record);
            unshared.extend(record.frame.map(|frame| (frame, item)));
        }
        drop(pages);
        self.region.domain.unshare(&unshared);
    }

    /// The same, for a page found copied that nobody but the guest can have
    /// copied.
    pub(crate) fn note_cow_break(&self, page: PageIndex) {
        self.region.tally().cow_breaks += 1;
        self.note_copied(page);
    }

    /// The mappings of `range` were replaced by the region's own memory. Frames that
    /// nobody sees any more are left to the next sweep: pages may be stopped still.
    pub(crate) fn note_own(&self, range: PageRange) {
        let runs = self.region.frame_runs(range);
        for page in runs.into_iter().flat_map(PageRange::iter) {
            let old = self.region.pages().get(page);
            self.region.pages().update(page, |record| {
                record.frame = None;
                if matches!(record.class, Class::Merged(_)) {
                    record.class = Class::Volatile;
                }
            });
            match (old.frame, old.class) {
                (Some(frame), Class::Merged(item)) => self.region.domain.release(frame, item),
                (Some(frame), _) => self.region.domain.unname(frame),
                (None, _) => {}
            }
        }
    }
}
