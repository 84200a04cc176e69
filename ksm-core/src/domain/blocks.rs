//! Blocks: frames in a row that hold the same, for contents that fill stretches
//! of memory or that very many pages have.

use super::Plan;
use crate::backend::{Backend, FrameStore};
use crate::fingerprint::Fingerprint;
use crate::frames::{BLOCK, block_of};
use crate::page::{FrameId, PageBuf};

impl<B: Backend> Plan<'_, B> {
    /// A frame of the content of `frame` behind which there is room for more of
    /// the same, so that a stretch of that content needs one mapping for many
    /// pages: the first of a block of equal frames, made now if there is none.
    /// `frame` itself where that cannot be.
    pub(crate) fn stretch(&self, frame: FrameId) -> FrameId {
        let in_block = {
            let sharing = self.domain.sharing.lock();
            sharing.rmap.node(frame).map(|node| node.in_block)
        };
        let first = match in_block {
            Some(true) => self.replica(frame, block_of(frame)),
            Some(false) => self.start_block(frame),
            None => None,
        };
        first.unwrap_or(frame)
    }

    /// A frame of the content of `frame` that another page may come to map, where
    /// `planned` says how many are about to: `frame` itself, or another one of its
    /// block, or the first of a new block. A content that very many pages have
    /// comes to a chain of them, as in the kernel (`stable_node_chain`).
    pub(crate) fn with_room(
        &self,
        frame: FrameId,
        max_items: u32,
        planned: impl Fn(FrameId) -> u32,
    ) -> FrameId {
        let other = {
            let sharing = self.domain.sharing.lock();
            let has_room = |frame: FrameId| {
                let items = sharing.rmap.node(frame).map_or(0, |node| node.items);
                items + planned(frame) < max_items
            };
            let node = sharing.rmap.node(frame).copied();
            let Some(node) = node.filter(|_| !has_room(frame)) else {
                return frame;
            };
            let numbers = (0..BLOCK).map(|number| block_of(frame).plus(number));
            let mut others = numbers.filter(|_| node.in_block);
            others.find(|&other| {
                let live = sharing.rmap.node(other).is_none_or(|node| node.live);
                live && has_room(other)
            })
        };
        match other {
            Some(other) => {
                let replica = self.replica(frame, other);
                replica.inspect(|&replica| self.stand_for(replica))
            }
            None => self.start_block(frame),
        }
        .unwrap_or(frame)
    }

    /// Makes a block for the content of `frame`, which later pages of it are to
    /// find, and its first frame.
    fn start_block(&self, frame: FrameId) -> Option<FrameId> {
        let first = {
            let mut sharing = self.domain.sharing.lock();
            sharing.rmap.node(frame).filter(|node| node.live)?;
            sharing.add_block()?
        };
        let replica = self.replica(frame, first);
        match replica {
            Some(first) => self.stand_for(first),
            None => self.domain.sharing.lock().free_block_if_empty(first),
        }
        replica
    }

    /// Whoever looks for the content of `frame`, a live one, finds it from here on.
    pub(super) fn stand_for(&self, frame: FrameId) {
        let mut buf = PageBuf::zeroed();
        if self.domain.store.read(frame, &mut buf).is_err() {
            return;
        }
        let (fingerprint, digest) = (
            self.domain.keys.fingerprint(&buf),
            self.domain.keys.digest(&buf),
        );
        // Only what is live stands in the tree, which this lock guards.
        let sharing = self.domain.sharing.lock();
        let is_live = sharing.rmap.node(frame).is_some_and(|node| node.live);
        let stable = &self.domain.stable;
        if is_live && stable.remove(fingerprint, &digest).is_some() {
            stable.insert(fingerprint, digest, frame);
        }
    }

    /// The frame behind `previous`, if that is one of a block of the content that
    /// `fingerprint` stands for, the block goes on, and fewer than `max_items`
    /// items are on it.
    pub(crate) fn extend(
        &self,
        previous: FrameId,
        fingerprint: Fingerprint,
        max_items: u32,
    ) -> Option<FrameId> {
        let next = previous.plus(1);
        {
            let sharing = self.domain.sharing.lock();
            let node = sharing.rmap.node(previous)?;
            let same = node.live && node.in_block && node.fingerprint == fingerprint;
            let taken = sharing.rmap.node(next).map_or(0, |node| node.items);
            if !same || block_of(next) != block_of(previous) || taken >= max_items {
                return None;
            }
        }
        self.replica(previous, next)
    }

    /// Makes sure that `to`, a number of a block, holds what `from` holds.
    fn replica(&self, from: FrameId, to: FrameId) -> Option<FrameId> {
        let fingerprint = {
            let mut sharing = self.domain.sharing.lock();
            if let Some(node) = sharing.rmap.node(to) {
                return node.live.then_some(to);
            }
            let node = sharing.rmap.node(from).copied()?;
            sharing.add_loose(to, node.fingerprint, true, self.planner);
            sharing.note_copy(node.fingerprint, from, to);
            node.fingerprint
        };
        let mut buf = PageBuf::zeroed();
        self.domain.store.read(from, &mut buf).ok()?;
        // `from` may have been given back meanwhile.
        let whole = self.domain.keys.fingerprint(&buf) == fingerprint;
        (whole && self.fill(to, &buf).is_ok()).then_some(to)
    }
}
