//! Taking a frame from all who share it.

use std::sync::Arc;

use super::Ksm;
use super::sharers::{Sharer, merged_frame};
use crate::backend::Backend;
use crate::domain::Domain;
use crate::error::{BackendError, Error};
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Region, RegionGuard, RegionId};
use crate::unshare;

/// What came of emptying a frame.
#[derive(Debug, Default)]
struct Emptied {
    /// Pages that got copies.
    unshared: u64,
    /// Those that the host refused one when they were last tried.
    refused: Vec<(Sharer, BackendError)>,
}

impl<B: Backend> Ksm<B> {
    /// Gives every page that maps the frame of `page` a copy of its own: what a
    /// memory error on a frame needs. Returns how many did; none if the page is
    /// not merged. The frame's memory is given back then, and its content
    /// becomes another frame if it is merged again.
    ///
    /// Nobody comes to map the frame from the first moment on, even where this
    /// fails. Busy regions are waited for in turn, those that are leaving too. A
    /// clone that is just being made
    /// ([`fork_region`](Self::fork_region), [`take_over`](Self::take_over)) cannot
    /// be reached: this counts its page among those that are left, and the call
    /// that makes it unshares the page before it returns. Whatever is left, because
    /// the host refuses or a thread was killed, is tried again at the end of each pass.
    /// Pages that others give copies meanwhile are not counted.
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::OutOfRange`]; [`Error::FrameStillShared`] says
    /// which pages are left: those of which the host cannot, or will not, make a
    /// copy.
    pub fn unshare_frame(&self, region: RegionId, page: PageIndex) -> Result<u64, Error> {
        let region = self.region_with(region, PageRange::one(page))?;
        let frame = {
            let guard = self.turn_in_the_end(&region)?;
            let _guard = guard.ok_or(Error::NoRegion(region.id))?;
            // Under its lease the page keeps its frame, and its frame the number.
            let Some(frame) = merged_frame(&region, page) else {
                return Ok(0);
            };
            region.domain.seal(frame);
            frame
        };
        let Emptied { unshared, refused } = self.empty(&region.domain, frame)?;
        let pages = region.domain.sealed_sharers(frame);
        if pages == 0 {
            return Ok(unshared);
        }
        let (sharers, mut said): (_, Vec<_>) = refused.into_iter().unzip();
        Err(Error::FrameStillShared {
            pages,
            sharers,
            source: said.pop().unwrap_or(BackendError::Again),
        })
    }

    /// Empties frames that were sealed while a region that maps them was being made
    /// and nobody knew of it. To be called once it is known. What the host refuses
    /// stays, as it does for whoever sealed the frame, until the end of a pass.
    pub(super) fn empty_sealed(&self, domain: &Domain<B>) {
        for frame in domain.sealed() {
            // Fails only for a thread that holds the engine still, which can have
            // made no region.
            let _ = self.empty(domain, frame);
        }
    }

    /// Empties what others have left sealed: the host had refused, or they were
    /// killed. Not for [`recover`](Self::recover) to do, as it waits for leases, which
    /// further threads may hold that are to be recovered from.
    pub(super) fn empty_all_sealed(&self) {
        for domain in self.layout.domains() {
            self.empty_sealed(&domain);
        }
    }

    /// Gives every page that maps `frame`, a sealed one, a copy of its own. As
    /// nobody comes to map it there are fewer pages each time that they are looked
    /// for, until there are none or those that are left have all refused.
    fn empty(&self, domain: &Domain<B>, frame: FrameId) -> Result<Emptied, Error> {
        let mut emptied = Emptied::default();
        loop {
            let before = domain.sealed_sharers(frame);
            let mut gone = false;
            emptied.refused.clear();
            for (region, page) in self.sharers_and_comers(domain, frame) {
                match self.turn_in_the_end(&region)? {
                    Some(guard) => emptied.take(&guard, page, frame),
                    // What took its place has the page now.
                    None => gone = true,
                }
            }
            let left = domain.sealed_sharers(frame);
            if left == 0 || (left == before && !gone) {
                return Ok(emptied);
            }
            if gone {
                std::thread::yield_now();
            }
        }
    }

    fn sharers_and_comers(
        &self,
        domain: &Domain<B>,
        frame: FrameId,
    ) -> Vec<(Arc<Region<B>>, PageIndex)> {
        self.walk(domain).sharers_and_comers(frame, |id| {
            let mut leaving = self.retired.going().into_iter();
            leaving.find(|region| region.id == id)
        })
    }
}

impl Emptied {
    /// Gives `page` a copy if it maps `frame`.
    fn take<B: Backend>(&mut self, guard: &RegionGuard<'_, B>, page: PageIndex, frame: FrameId) {
        let region: &Region<B> = guard.region();
        // The number may have come to be another frame's meanwhile.
        let is_sealed = region.domain.sealed_sharers(frame) > 0;
        if !is_sealed || merged_frame(region, page) != Some(frame) {
            return;
        }
        match unshare::unmerge_page(guard, page) {
            Ok(()) => self.unshared += 1,
            Err(error) => self.refused.push((Sharer::of(region, page), error)),
        }
    }
}
