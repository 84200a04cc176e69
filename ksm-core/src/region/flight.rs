//! What a lease's holder has under way, written down before it is done, so
//! that whoever comes after can end it: the holder itself when it unwinds, or
//! the one who takes the lease over when it vanished.

use crate::backend::{Backend, Backing, Memory, Settled};
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::outcome::Outcome;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::adoption::Adoption;
use crate::region::{Class, Record, RegionGuard};
use crate::rmap::ItemId;

/// What may be stopped, may have been mapped, and is reserved.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    stop: Option<(PageRange, Backing)>,
    change: Option<Change>,
    /// Reserved in the rmap for pages whose records do not say so yet, in the
    /// order of the pages.
    pending: Vec<Pending>,
    /// What is being dropped, and what lay below.
    discard: Option<(PageRange, Backing)>,
    pub(super) adoption: Option<Adoption>,
}

/// A page that is to map a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) page: PageIndex,
    pub(crate) frame: FrameId,
    pub(crate) item: ItemId,
}

/// A replacement of held pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// By the frames of the pending entries.
    Share(PageRange),
    /// Copies dropped over the frames of the pending entries.
    Reuse(PageRange),
    /// By zero pages.
    Zero(PageRange),
    /// By private pages.
    Restore(PageRange),
}

impl Change {
    const fn range(self) -> PageRange {
        match self {
            Self::Share(range) | Self::Reuse(range) | Self::Zero(range) | Self::Restore(range) => {
                range
            }
        }
    }
}

/// Ends a flight, on every way out.
#[derive(Debug)]
#[must_use = "the flight ends when this is dropped"]
pub(crate) struct Landing<'g, 'a, B: Backend>(&'g RegionGuard<'a, B>);

impl<B: Backend> Drop for Landing<'_, '_, B> {
    fn drop(&mut self) {
        self.0.land();
    }
}

impl<'a, B: Backend> RegionGuard<'a, B> {
    /// Writes down that `range` is about to be stopped for `pending`.
    pub(crate) fn take_off(
        &self,
        range: PageRange,
        backing: Backing,
        pending: Vec<Pending>,
    ) -> Landing<'_, 'a, B> {
        *self.lease.journal() = Flight {
            stop: Some((range, backing)),
            change: None,
            pending,
            discard: None,
            adoption: None,
        };
        Landing(self)
    }

    /// Ends what comes to be under way from here on.
    pub(crate) const fn landing(&self) -> Landing<'_, 'a, B> {
        Landing(self)
    }

    /// Makes `change` by `call`, so that the records follow it even if this
    /// thread panics or vanishes in between.
    pub(crate) fn change<E>(
        &self,
        change: Change,
        call: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.lease.journal().change = Some(change);
        fault::point(Step::Sharing);
        let done = call();
        fault::point(Step::Mapped);
        let _ = self.lease.journal().change.take();
        if done.is_ok() {
            self.record(change);
            fault::point(Step::Recorded);
        }
        done
    }

    /// Drops the content of `range`, so that the records follow it even if this
    /// thread panics or vanishes in between: who has begun to discard memory does not
    /// use it until that has ended.
    ///
    /// # Errors
    /// The pages are as they were.
    pub(crate) fn discard(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        let _landing = self.landing();
        self.lease.journal().discard = Some((range, backing));
        fault::point(Step::Discarding);
        let dropped = self.memory().discard(range, backing);
        fault::point(Step::Discarded);
        if dropped.is_ok() {
            self.record_absent(range);
        }
        self.lease.journal().discard = None;
        if dropped.is_ok() && backing == Backing::Frame {
            self.region().domain.sweep();
        }
        dropped
    }

    /// Ends whatever is under way: completes or forgets a change, lifts the
    /// stop, and gives back what was reserved in vain. Does nothing when nothing
    /// is under way.
    pub(crate) fn land(&self) {
        self.end_adoption();
        self.end_discard();
        let (stop, change) = {
            let mut flight = self.lease.journal();
            (flight.stop, flight.change.take())
        };
        let Some((range, backing)) = stop else {
            return;
        };
        match change {
            // Says so ahead of the truth: if the copies are still there, the
            // next look at the page map finds them.
            Some(change @ Change::Reuse(_)) => self.record(change),
            Some(change) if self.memory().settle(change.range(), backing) == Settled::Replaced => {
                self.record(change);
            }
            _ => {}
        }
        self.memory().lift(range, backing);
        let flight = std::mem::take(&mut *self.lease.journal());
        for pending in flight.pending {
            self.region().domain.release(pending.frame, pending.item);
        }
    }

    /// Whether it came about, only the host knows: so once more.
    fn end_discard(&self) {
        let begun = self.lease.journal().discard;
        let Some((range, backing)) = begun else {
            return;
        };
        // If this fails, so did the first time, in all likelihood: it takes nothing more.
        if self.memory().discard(range, backing).is_ok() {
            self.record_absent(range);
        }
        self.lease.journal().discard = None;
    }

    fn record_absent(&self, range: PageRange) {
        self.note_own(range);
        self.region().forget(range);
    }

    /// The records follow a change that has been made.
    fn record(&self, change: Change) {
        match change {
            Change::Share(range) | Change::Reuse(range) => self.record_merged(range),
            Change::Zero(range) => self.record_zero(range),
            Change::Restore(range) => self.note_own(range),
        }
    }

    fn record_merged(&self, range: PageRange) {
        let committed: Vec<Pending> = {
            let pending = &mut self.lease.journal().pending;
            let inside = |pending: &mut Pending| range.contains(pending.page);
            pending.extract_if(.., inside).collect()
        };
        for Pending { page, frame, item } in committed {
            let old = self.region().pages().get(page);
            self.region().pages().set(
                page,
                Record {
                    frame: Some(frame),
                    class: Class::Merged(item),
                    ..old
                },
            );
            if let Some(frame) = old.frame {
                self.region().domain.unname(frame);
            }
        }
    }

    fn record_zero(&self, range: PageRange) {
        self.note_own(range);
        let mut pages = self.region().pages();
        for page in range.iter() {
            pages.update(page, |record| {
                record.class = Class::Zero;
                record.outcome = Outcome::Zeroed;
            });
        }
    }
}
