//! The frames of a domain and who maps them: numbers, blocks, reverse map.
//!
//! What a frame is follows from its [`StableNode`]. It goes from the first of these
//! states to the last, or is left out of some:
//!
//! | state | in the node | memory | who finds it |
//! |---|---|---|---|
//! | free | there is none | none | whoever looks for a number |
//! | planned | `loose`, of a planner | being filled | nobody |
//! | live | `live` | its content | by its content, or as an equal of it; pages come to map it |
//! | sealed | not `live`, has `sharers` | its content | nobody; pages that map it leave |
//! | punched | `punching` | is given back, with no lock held | nobody |
//! | named | not `live`, only `named` | none | nobody |
//!
//! A live frame without sharers is `loose`, too, if nobody has punched it yet: the sweep
//! after a window, a change of a region or a pass does, unless a page has come to
//! map it. So is one that the host would not take back. A number is free again when the
//! node says neither `live`, `loose` nor `punching`, and no mapping names it. (In a block
//! it waits for those of all others.)
//!
//! What changes the counts, with whose pages:
//!
//! | [`Domain`](crate::domain::Domain) | `sharers` | `named` | for a page that |
//! |---|---|---|---|
//! | `reserve`, `add_clones` | + 1 | + 1 | is to map the frame |
//! | `unshare` | - 1 | stays | has a copy: its mapping still names the frame |
//! | `unname` | stays | - 1 | was copied, and its mapping has gone as well |
//! | `release` | - 1 | - 1 | did not come to map it, or whose mapping is gone |
//! | `abandon` | - 1 if it was merged | stays | is nobody's any more, and its mapping still names the frame (`abandoned`) |
//! | `forsake` | stays | stays | is out of our hands and maps the frame for good (`forsaken`) |

use std::collections::HashMap;

use crate::fingerprint::{Digest, Fingerprint};
use crate::frames::{BLOCK, Frames, Planner, block_of};
use crate::page::FrameId;
use crate::rmap::{Rmap, StableNode};
use crate::sync::ThreadId;

/// What a domain's lock guards.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    pub(crate) rmap: Rmap,
    pub(crate) frames: Frames,
    /// Frames to look at again when whoever planned them is done, and those that
    /// nobody did but could not be given back when last tried.
    loose: Vec<(FrameId, Planner)>,
    /// Frames whose memory is given back just now, each with who does.
    punching: Vec<(FrameId, ThreadId)>,
    /// Frames that are being filled, each for a content that no other has: no more than
    /// there are planners.
    in_the_making: Vec<(FrameId, Digest)>,
    /// Sharers that are out of our hands for good: what they map is never given
    /// back.
    pub(crate) forsaken: HashMap<FrameId, u32>,
    /// Frames that nobody may come to map, though pages did when they were last
    /// looked at.
    pub(crate) sealed: Vec<FrameId>,
    /// Blocks of equal frames, by their first number.
    pub(crate) blocks: HashMap<FrameId, Block>,
    /// The frames of each content that has, or had, more than one.
    equals: HashMap<Fingerprint, Vec<FrameId>>,
}

/// Frames in a row that hold one content, so that a stretch of pages of that
/// content is one mapping. Its numbers come and go together, its frames one by
/// one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// How many of its numbers have a node.
    pub(crate) nodes: u32,
}

impl Sharing {
    /// A node for a number just allotted by `planner`. From here on a sweep gives
    /// it back, whatever happens.
    pub(crate) fn add_loose(
        &mut self,
        frame: FrameId,
        fingerprint: Fingerprint,
        in_block: bool,
        planner: Planner,
    ) {
        self.rmap.add_node(frame, fingerprint, in_block);
        if in_block && let Some(block) = self.blocks.get_mut(&block_of(frame)) {
            block.nodes += 1;
        }
        self.make_loose(frame, planner);
    }

    /// Whether somebody is about to put a frame of that content into the stable tree.
    pub(crate) fn is_in_the_making(&self, content: &Digest) -> bool {
        self.in_the_making.iter().any(|(_, other)| other == content)
    }

    /// Notes that `frame` is about to be filled, and put into the stable tree.
    pub(crate) fn begin_making(&mut self, frame: FrameId, content: Digest) {
        self.in_the_making.push((frame, content));
    }

    /// It was, or will not be.
    pub(crate) fn end_making(&mut self, frame: FrameId) {
        self.in_the_making.retain(|(other, _)| *other != frame);
    }

    /// An empty block: to be given back, or filled.
    pub(crate) fn add_block(&mut self) -> Option<FrameId> {
        let first = self.frames.allot_block()?;
        self.blocks.insert(first, Block { nodes: 0 });
        Some(first)
    }

    /// Notes that a frame is to be looked at again, by its planner if it has one.
    pub(crate) fn make_loose(&mut self, frame: FrameId, planner: Planner) {
        if !self.rmap.set_loose(frame, true) {
            self.loose.push((frame, planner));
        }
    }

    /// Takes frames that `is_mine` says of whom, to be looked at: `max` at the most.
    pub(crate) fn take_loose(
        &mut self,
        is_mine: impl Fn(Planner) -> bool,
        max: usize,
    ) -> Vec<FrameId> {
        let mine = |entry: &mut (FrameId, Planner)| is_mine(entry.1);
        let taken: Vec<_> = self.loose.extract_if(.., mine).take(max).collect();
        for &(frame, _) in &taken {
            self.rmap.set_loose(frame, false);
        }
        taken.into_iter().map(|(frame, _)| frame).collect()
    }

    /// Notes that `by` gives the memory of `frames` back, none of which is live. They
    /// keep their numbers until it is done.
    pub(crate) fn begin_punching(&mut self, frames: &[FrameId], by: ThreadId) {
        for &frame in frames {
            self.rmap.set_punching(frame, true);
            self.punching.push((frame, by));
        }
    }

    /// It is done with `frames`, which are sorted. What `is_empty` has no memory, and
    /// the others are for the next sweep.
    pub(crate) fn end_punching(&mut self, frames: &[FrameId], is_empty: impl Fn(FrameId) -> bool) {
        self.punching
            .retain(|(frame, _)| frames.binary_search(frame).is_err());
        for &frame in frames {
            self.rmap.set_punching(frame, false);
            if is_empty(frame) {
                self.free_number(frame);
            } else {
                self.make_loose(frame, None);
            }
        }
    }

    /// Whatever a thread was giving back that is gone for good is for the next sweep.
    pub(crate) fn end_punching_after(&mut self, dead: ThreadId) {
        let left = self.punching.iter().filter(|(_, by)| *by == dead);
        let mut left: Vec<_> = left.map(|&(frame, _)| frame).collect();
        left.sort_unstable();
        self.end_punching(&left, |_| false);
    }

    /// Gives a frame's number back if nothing holds it.
    pub(crate) fn free_number(&mut self, frame: FrameId) {
        let held = |node: &StableNode| node.live || node.named > 0 || node.loose || node.punching;
        let Some(node) = self.rmap.node(frame).copied().filter(|node| !held(node)) else {
            return;
        };
        self.rmap.remove_node(frame);
        self.end_making(frame);
        if let Some(equals) = self.equals.get_mut(&node.fingerprint) {
            equals.retain(|equal| *equal != frame);
            if equals.is_empty() {
                self.equals.remove(&node.fingerprint);
            }
        }
        if node.in_block {
            let first = block_of(frame);
            if let Some(block) = self.blocks.get_mut(&first) {
                block.nodes -= 1;
            }
            self.free_block_if_empty(first);
        } else {
            self.frames.release(frame);
        }
    }

    pub(crate) fn free_block_if_empty(&mut self, first: FrameId) {
        if self
            .blocks
            .get(&first)
            .is_some_and(|block| block.nodes == 0)
        {
            self.blocks.remove(&first);
            for number in 0..BLOCK {
                self.frames.release(first.plus(number));
            }
        }
    }

    /// Notes that `copy` is to hold what `frame` holds.
    pub(crate) fn note_copy(&mut self, fingerprint: Fingerprint, frame: FrameId, copy: FrameId) {
        let equals = self.equals.entry(fingerprint).or_default();
        for frame in [frame, copy] {
            if !equals.contains(&frame) {
                equals.push(frame);
            }
        }
    }

    /// Another live frame of the content of one that is not live any more.
    pub(crate) fn heir(&self, node: &StableNode) -> Option<FrameId> {
        let is_heir = |heir: &&FrameId| {
            let heir = self.rmap.node(**heir);
            heir.is_some_and(|heir| heir.live && heir.fingerprint == node.fingerprint)
        };
        let equals = self.equals.get(&node.fingerprint)?;
        equals.iter().find(is_heir).copied()
    }
}
