//! Moving a frame to another place in the store, from under all who share it.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::Ksm;
use super::sharers::{Sharer, merged_frame};
use crate::backend::{Backend, Memory};
use crate::error::Error;
use crate::merge::{self, Goal, Wish};
use crate::outcome::Outcome;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Region, RegionGuard, RegionId};
use crate::unshare;

/// How often sharers are looked for: once more for what was about to map the old
/// frame, and what was split, when it began.
const ROUNDS: u32 = 3;

/// What became of the pages of a frame: see [`Ksm::move_frame`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameMove {
    /// The frame that was to go.
    pub from: FrameId,
    /// The one that its pages were to go to.
    pub to: FrameId,
    /// Pages that map `to` now.
    pub moved: u64,
    /// Pages that map `from` still, each with why:
    /// [`Outcome::CopiedUnguarded`] in a region that is not
    /// [`dma_guarded`](crate::RegionOptions::dma_guarded),
    /// [`Outcome::Pinned`], or what the host has refused.
    pub stayed: Vec<(Sharer, Outcome)>,
    /// Pages that map neither, but have copies of their own, each with why:
    /// [`Outcome::Raced`] where the guest was writing to it.
    pub copied: Vec<(Sharer, Outcome)>,
}

/// What became of one page.
enum Fate {
    Moved,
    Stayed(Outcome),
    Copied(Outcome),
}

impl<B: Backend> Ksm<B> {
    /// Moves the frame of `page` to the lowest place in the store that is free, and
    /// the pages that map it with it, clones included: what compaction is made
    /// of. `None` if the page is not merged, or no place below its frame's is
    /// free.
    ///
    /// To empty the upper part of a store, call this for pages whose
    /// [frame](crate::Explanation::frame) lies there until it says `None`, or
    /// [`to`](FrameMove::to) comes to lie there as well. A frame's memory is given
    /// back when the last page leaves it. One that moves alone cuts the run of its
    /// neighbours, which costs mappings
    /// ([`Config::max_vmas`](crate::Config::max_vmas) is not asked).
    ///
    /// Each page gets a copy first, and is merged with the new frame like any
    /// other. Where one cannot be, it goes back if it can, and the others move all
    /// the same.
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::OutOfRange`]; [`Error::Backend`] when the host
    /// has no memory for another frame: nothing has moved then.
    pub fn move_frame(
        &self,
        region: RegionId,
        page: PageIndex,
    ) -> Result<Option<FrameMove>, Error> {
        let region = self.region_with(region, PageRange::one(page))?;
        let Some(from) = merged_frame(&region, page) else {
            return Ok(None);
        };
        let plan = region.domain.plan();
        let Some(to) = plan.copy_below(from)? else {
            return Ok(None);
        };
        let mut done = FrameMove {
            from,
            to,
            moved: 0,
            stayed: Vec::new(),
            copied: Vec::new(),
        };
        for _ in 0..ROUNDS {
            let moved = done.moved;
            let gone = self.move_sharers(&region, &mut done)?;
            if moved == done.moved && !gone {
                break;
            }
        }
        Ok(Some(done))
    }

    /// Moves the pages that map the frame now. Returns whether some of them were
    /// another region's when their turn came.
    fn move_sharers(&self, region: &Region<B>, done: &mut FrameMove) -> Result<bool, Error> {
        let mut sharers = Vec::new();
        self.walk(&region.domain)
            .sharers(done.from, |region, page| {
                sharers.push((Arc::clone(region), page));
                ControlFlow::Continue(())
            });
        let mut gone = false;
        for (region, page) in sharers {
            let guard = self.turn_in_the_end(&region)?;
            // It must not be merged behind whoever unshares it to take it away.
            let Some(guard) = guard.filter(|_| self.layout.stands(&region)) else {
                gone = true;
                continue;
            };
            let sharer = Sharer::of(&region, page);
            let stays = done.stayed.iter().any(|&(stayed, _)| stayed == sharer);
            if stays || merged_frame(&region, page) != Some(done.from) {
                continue;
            }
            match self.move_page(&guard, page, (done.from, done.to)) {
                Fate::Moved => done.moved += 1,
                Fate::Stayed(why) => done.stayed.push((sharer, why)),
                Fate::Copied(why) => done.copied.push((sharer, why)),
            }
            guard.memory().rest();
        }
        Ok(gone)
    }

    fn move_page(
        &self,
        guard: &RegionGuard<'_, B>,
        page: PageIndex,
        (from, to): (FrameId, FrameId),
    ) -> Fate {
        let region = guard.region();
        if !region.options.dma_guarded {
            return Fate::Stayed(Outcome::CopiedUnguarded);
        }
        if region.pinned(PageRange::one(page)).contains(page) {
            return Fate::Stayed(Outcome::Pinned);
        }
        if let Err(error) = unshare::unmerge_page(guard, page) {
            return Fate::Stayed(merge::refused(&error));
        }
        let merge = |frame| {
            let goal = Goal::Frame(frame);
            // One wish, one outcome.
            merge::commit(guard, &[Wish { page, goal }], self.limits(region))[0]
        };
        match merge(to) {
            Outcome::Merged => Fate::Moved,
            why if merge(from) == Outcome::Merged => Fate::Stayed(why),
            why => Fate::Copied(why),
        }
    }
}
