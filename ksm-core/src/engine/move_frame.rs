//! Moving a frame to another place in the store, from under all who share it.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::Ksm;
use super::sharers::merged_frame;
use super::turn::{Patience, Turn};
use crate::backend::Backend;
use crate::error::{BackendError, Error};
use crate::merge::{self, Goal, Wish};
use crate::outcome::Outcome;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Region, RegionId};
use crate::unshare;

impl<B: Backend> Ksm<B> {
    /// Moves the frame of `page` to another place in the store, the lowest that
    /// is free, and all pages with it that map it: what compaction is made of.
    /// Returns how many pages moved; none if the page is not merged.
    ///
    /// Each page gets a copy first, and is merged with the new frame like any
    /// other: so pages of regions that are not
    /// [`dma_guarded`](crate::RegionOptions::dma_guarded) stay where they are, and
    /// one that its guest writes meanwhile drops out. The old frame goes with the
    /// last page that maps it.
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::OutOfRange`]; [`Error::Backend`] when the host
    /// has no memory for another frame; [`Error::StillShared`] when it refuses a
    /// copy: pages that moved before that stay where they went.
    pub fn move_frame(&self, region: RegionId, page: PageIndex) -> Result<u64, Error> {
        let region = self.region_with(region, PageRange::one(page))?;
        let Some(old) = merged_frame(&region, page) else {
            return Ok(0);
        };
        let plan = region.domain.plan();
        let new = plan.copy_of(old).ok_or(BackendError::OutOfMemory)?;
        let mut sharers = Vec::new();
        self.walk(&region.domain).sharers(old, |region, page| {
            if region.options.dma_guarded {
                sharers.push((Arc::clone(region), page));
            }
            ControlFlow::Continue(())
        });
        let mut moved = 0;
        for (region, page) in sharers {
            unshare::unmerge(&region, PageRange::one(page), u32::MAX)?;
            moved += u64::from(self.merge_page(&region, page, new)?);
        }
        Ok(moved)
    }

    /// Merges a page with a frame if they are equal. Returns whether they were.
    fn merge_page(
        &self,
        region: &Region<B>,
        page: PageIndex,
        frame: FrameId,
    ) -> Result<bool, Error> {
        let Turn::Now(guard) = self.turn(region, Patience::Wait)? else {
            return Ok(false);
        };
        if !self.layout.stands(region) {
            return Ok(false);
        }
        let goal = Goal::Frame(frame);
        let outcomes = merge::commit(&guard, &[Wish { page, goal }], self.limits(region));
        Ok(outcomes == [Outcome::Merged])
    }
}
