//! [`Plan`]: frames that pages are about to map.

use super::Domain;
use crate::backend::{Backend, FrameStore};
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::fingerprint::{Digest, Fingerprint};
use crate::frames::Planner;
use crate::page::{FrameId, PageBuf};
use crate::rmap::StableNode;

/// How often a plan lets others run while another one makes the frame that it is
/// after: that takes as long as a page is written.
const WAITS: u32 = 1000;

/// What came of looking for a frame.
enum Begun {
    Found(FrameId),
    /// Allotted, and to be filled.
    Mine(FrameId),
}

/// Makes frames for a window or for a clone. Those that no page has come to map
/// are given back when it is dropped, whatever happens; no other plan touches
/// them before. A thread has one at a time.
#[derive(Debug)]
pub(crate) struct Plan<'d, B: Backend> {
    pub(super) domain: &'d Domain<B>,
    pub(super) planner: Planner,
}

impl<B: Backend> Drop for Plan<'_, B> {
    fn drop(&mut self) {
        let mine = |planner: Planner| planner.is_none() || planner == self.planner;
        self.domain.sharing.lock().frames.leave_plot(self.planner);
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
        let frame = match self.find_or_begin(previous, fingerprint, digest)? {
            Begun::Found(frame) => return Ok(frame),
            Begun::Mine(frame) => frame,
        };
        let filled = self.fill(frame, content);
        let mut sharing = self.domain.sharing.lock();
        sharing.end_making(frame);
        filled?;
        // Another plan may have made one meanwhile; this one goes with the plan. Only
        // what is live stands in the tree, which this lock guards.
        if sharing.rmap.node(frame).is_none_or(|node| !node.live) {
            return Err(BackendError::Again);
        }
        let other = self.domain.stable.insert(fingerprint, digest, frame);
        Ok(other.unwrap_or(frame))
    }

    /// Allots a frame for a content, unless there is one. Two plans that come by the
    /// same contents at a time, for two guests that are cloned, make frames for them
    /// together: were each to make its own, the pages of both would map now a frame of
    /// the one run, now one of the other. So this waits for another that makes the
    /// frame, within bounds: whoever does may be gone.
    fn find_or_begin(
        &self,
        previous: Option<FrameId>,
        fingerprint: Fingerprint,
        digest: Digest,
    ) -> Result<Begun, BackendError> {
        let find = || self.domain.stable.find_exact(fingerprint, &digest);
        if let Some(frame) = find() {
            return Ok(Begun::Found(frame));
        }
        let mut waits = 0;
        loop {
            let mut sharing = self.domain.sharing.lock();
            if let Some(frame) = find() {
                return Ok(Begun::Found(frame));
            }
            if waits < WAITS && sharing.is_in_the_making(&digest) {
                drop(sharing);
                waits += 1;
                std::thread::yield_now();
                continue;
            }
            let frame = sharing.frames.allot(previous, self.planner);
            let frame = frame.ok_or(BackendError::OutOfMemory)?;
            sharing.add_loose(frame, fingerprint, false, self.planner);
            sharing.begin_making(frame, digest);
            return Ok(Begun::Mine(frame));
        }
    }

    /// Another frame of the content of `frame`, which later pages of it are to
    /// find. `None` where there is none to be had.
    pub(crate) fn copy_of(&self, frame: FrameId) -> Option<FrameId> {
        let fingerprint = {
            let sharing = self.domain.sharing.lock();
            let node = sharing.rmap.node(frame)?;
            node.live.then_some(node.fingerprint)?
        };
        let mut buf = PageBuf::zeroed();
        self.domain.store.read(frame, &mut buf).ok()?;
        // It may have been given back meanwhile.
        if self.domain.keys.fingerprint(&buf) != fingerprint {
            return None;
        }
        let copy = {
            let mut sharing = self.domain.sharing.lock();
            let same = |node: &StableNode| node.live && node.fingerprint == fingerprint;
            sharing.rmap.node(frame).filter(|node| same(node))?;
            let copy = sharing.frames.allot(None, self.planner)?;
            sharing.add_loose(copy, fingerprint, false, self.planner);
            sharing.note_copy(fingerprint, frame, copy);
            copy
        };
        self.fill(copy, &buf).ok()?;
        self.stand_for(copy);
        Some(copy)
    }

    /// Fills a frame that was just allotted, so that pages may come to map it.
    pub(super) fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        fault::point(Step::Allotted);
        self.domain.store.fill(frame, content)?;
        self.domain.sharing.lock().rmap.set_live(frame, true);
        fault::point(Step::Filled);
        Ok(())
    }
}
