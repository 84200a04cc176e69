//! Frames that nobody sees any more: they are buried, then punched, then their
//! numbers are free.
//!
//! To punch is to ask the host, which may take its time. So no lock is held meanwhile:
//! who has pages stopped may want it. The frames are out of reach by then, nobody else
//! punches them, and their numbers are not free before it is done; whose they are is
//! written down, so that [`Domain::sweep_after`] does what a thread has left undone.

use super::Domain;
use crate::backend::{Backend, FrameStore};
use crate::fault::{self, Step};
use crate::frames::Planner;
use crate::page::{FrameId, FrameRange};
use crate::rmap::{ItemId, StableNode};
use crate::sharing::Sharing;
use crate::sync::{ThreadId, current};

/// Frames that are looked at under one hold of the lock.
const AT_ONCE: usize = 256;

/// Buried frames whose memory the calling thread gives back. However this is left,
/// those that have kept theirs are for the next sweep.
struct Unseen<'d, B: Backend> {
    domain: &'d Domain<B>,
    frames: Vec<FrameId>,
    /// Those of them that have no memory any more, in order.
    empty: Vec<FrameId>,
}

impl<'d, B: Backend> Unseen<'d, B> {
    const fn none(domain: &'d Domain<B>) -> Self {
        Self {
            domain,
            frames: Vec::new(),
            empty: Vec::new(),
        }
    }

    /// Puts those of `frames` out of reach that no page maps and nobody gives back
    /// already, and adds them.
    fn bury(&mut self, sharing: &mut Sharing, mut frames: Vec<FrameId>) {
        let is_unseen = |node: &StableNode| node.sharers == 0 && !node.punching;
        frames.retain(|&frame| sharing.rmap.node(frame).is_some_and(is_unseen));
        for &frame in &frames {
            self.domain.bury(sharing, frame);
        }
        sharing.begin_punching(&frames, current().id());
        self.frames.append(&mut frames);
    }

    /// Gives their memory back, one call for those in a row. Returns whether the
    /// host took all of it. To be called with no lock held.
    fn punch(mut self) -> bool {
        if self.frames.is_empty() {
            return true;
        }
        fault::point(Step::Buried);
        self.frames.sort_unstable();
        for run in self.frames.chunk_by(|left, right| left.plus(1) == *right) {
            let len = u32::try_from(run.len()).expect("frames are numbered in 32 bits");
            let range = FrameRange { start: run[0], len };
            if self.domain.store.punch(range).is_ok() {
                self.empty.extend(run);
            }
        }
        fault::point(Step::Punched);
        self.empty.len() == self.frames.len()
    }
}

impl<B: Backend> Drop for Unseen<'_, B> {
    fn drop(&mut self) {
        let is_empty = |frame| self.empty.binary_search(&frame).is_ok();
        for some in self.frames.chunks_mut(AT_ONCE) {
            some.sort_unstable();
            self.domain.sharing.lock().end_punching(some, is_empty);
        }
    }
}

impl<B: Backend> Domain<B> {
    /// Pages got copies of their own, or are nobody's any more; their mappings still
    /// name the frames. Those that nobody sees any more are given back: nothing may
    /// be stopped.
    pub(crate) fn unshare(&self, pages: &[(FrameId, ItemId)]) {
        let mut unseen = Unseen::none(self);
        for some in pages.chunks(AT_ONCE) {
            let mut sharing = self.sharing.lock();
            let last = some
                .iter()
                .filter(|&&(frame, item)| sharing.rmap.remove(frame, item) == 0);
            let left = last.map(|&(frame, _)| frame).collect();
            unseen.bury(&mut sharing, left);
        }
        // Behind all of it: what is lost here can be made up for.
        unseen.punch();
    }

    /// Gives back frames that nobody planned and no page maps. Nothing may be
    /// stopped.
    pub(crate) fn sweep(&self) {
        self.give_back(|planner| planner.is_none());
    }

    /// Gives back what a thread planned, or was giving back, that is gone for good.
    pub(crate) fn sweep_after(&self, dead: ThreadId) {
        {
            let mut sharing = self.sharing.lock();
            sharing.frames.leave_plot(Some(dead));
            sharing.end_punching_after(dead);
        }
        self.give_back(|planner| planner.is_none() || planner == Some(dead));
    }

    /// Looks again at the loose frames that `is_mine` says of whom, until the host
    /// refuses to take one back: the others are for the next time then.
    pub(super) fn give_back(&self, is_mine: impl Fn(Planner) -> bool) {
        loop {
            let mut unseen = Unseen::none(self);
            {
                let mut sharing = self.sharing.lock();
                let some = sharing.take_loose(&is_mine, AT_ONCE);
                if some.is_empty() {
                    return;
                }
                unseen.bury(&mut sharing, some);
            }
            if !unseen.punch() {
                return;
            }
        }
    }

    /// Takes care that nobody comes to map the frame any more.
    pub(super) fn bury(&self, sharing: &mut Sharing, frame: FrameId) {
        let node = sharing.rmap.node(frame).copied();
        let Some(node) = node.filter(|node| node.live) else {
            return;
        };
        sharing.rmap.set_live(frame, false);
        if let Some(digest) = self.stable.digest_of(node.fingerprint, frame) {
            self.stable.remove(node.fingerprint, &digest);
            if let Some(heir) = sharing.heir(&node) {
                self.stable.insert(node.fingerprint, digest, heir);
            }
        }
    }
}
