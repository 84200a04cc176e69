//! [`Plan`]: frames that pages are about to map.

use super::Domain;
use crate::backend::{Backend, FrameStore};
use crate::error::BackendError;
use crate::fingerprint::Fingerprint;
use crate::page::{FrameId, FrameRange, PageBuf};
use crate::sharing::Planner;

/// Makes frames for a window or for a clone. Those that no page has come to map
/// are given back when it is dropped, whatever happens; no other plan touches
/// them before.
#[derive(Debug)]
pub(crate) struct Plan<'d, B: Backend> {
    pub(super) domain: &'d Domain<B>,
    pub(super) planner: Planner,
}

impl<B: Backend> Drop for Plan<'_, B> {
    fn drop(&mut self) {
        let mine = |planner: Planner| planner.is_none() || planner == self.planner;
        self.domain.give_back(mine);
    }
}

impl<B: Backend> Plan<'_, B> {
    /// Allots a frame, the one after `previous` if it is free, fills it with
    /// `content` and puts it into the stable tree.
    pub(crate) fn frame(
        &self,
        previous: Option<FrameId>,
        fingerprint: Fingerprint,
        content: &PageBuf,
    ) -> Result<FrameId, BackendError> {
        let digest = self.domain.keys.digest(content);
        if let Some(frame) = self.domain.stable.find_exact(fingerprint, &digest) {
            return Ok(frame);
        }
        let frame = {
            let mut sharing = self.domain.sharing.lock();
            let frame = sharing.frames.allot(previous);
            let frame = frame.ok_or(BackendError::OutOfMemory)?;
            sharing.add_loose(frame, fingerprint, false, self.planner);
            frame
        };
        self.fill(frame, content)?;
        // Another plan may have made one meanwhile; this one goes with the plan.
        let other = self.domain.stable.insert(fingerprint, digest, frame);
        Ok(other.unwrap_or(frame))
    }

    /// Fills a frame that was just allotted, so that pages may come to map it.
    pub(super) fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        self.domain.store.reserve(FrameRange::one(frame))?;
        self.domain.store.fill(frame, content)?;
        self.domain.sharing.lock().rmap.set_live(frame, true);
        Ok(())
    }
}
