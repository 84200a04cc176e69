//! The frames of a domain and who maps them: numbers, blocks, reverse map.

use std::collections::HashMap;

use crate::fingerprint::Fingerprint;
use crate::frames::{BLOCK, Frames, block_of};
use crate::page::FrameId;
use crate::rmap::{Rmap, StableNode};

/// What a domain's lock guards.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    pub(crate) rmap: Rmap,
    pub(crate) frames: Frames,
    /// Frames to look at again when whoever planned them is done, and those that
    /// nobody did but could not be given back when last tried.
    loose: Vec<(FrameId, Planner)>,
    /// The number of the next plan.
    plans: u64,
    /// Blocks of equal frames, by their first number.
    pub(crate) blocks: HashMap<FrameId, Block>,
    /// How many were made.
    blocks_made: u64,
}

/// Frames in a row that hold one content, so that a stretch of pages of that
/// content is one mapping. Its numbers come and go together, its frames one by
/// one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// How many of its numbers have a node.
    pub(crate) nodes: u32,
    /// The frame that the content had before.
    pub(crate) original: FrameId,
    /// How many blocks had been made before.
    pub(crate) made: u64,
}

/// Whose frames they are that no page maps yet: those of the plan of that number,
/// or nobody's.
pub(crate) type Planner = Option<u64>;

impl Sharing {
    /// A number for a plan.
    pub(crate) fn new_planner(&mut self) -> Planner {
        self.plans += 1;
        Some(self.plans)
    }

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

    /// A block for a content that has the frame `original` already. It is empty:
    /// to be given back, or filled.
    pub(crate) fn add_block(&mut self, original: FrameId) -> Option<FrameId> {
        let first = self.frames.allot_block()?;
        let block = Block {
            nodes: 0,
            original,
            made: self.blocks_made,
        };
        self.blocks_made += 1;
        self.blocks.insert(first, block);
        Some(first)
    }

    /// Notes that a frame is to be looked at again, by its planner if it has one.
    pub(crate) fn make_loose(&mut self, frame: FrameId, planner: Planner) {
        if !self.rmap.set_loose(frame, true) {
            self.loose.push((frame, planner));
        }
    }

    /// Takes the frames that `is_mine` says of whom, to be looked at.
    pub(crate) fn take_loose(&mut self, is_mine: impl Fn(Planner) -> bool) -> Vec<FrameId> {
        let mine = |entry: &mut (FrameId, Planner)| is_mine(entry.1);
        let taken: Vec<_> = self.loose.extract_if(.., mine).collect();
        for &(frame, _) in &taken {
            self.rmap.set_loose(frame, false);
        }
        taken.into_iter().map(|(frame, _)| frame).collect()
    }

    /// Gives a frame's number back if nothing holds it.
    pub(crate) fn free_number(&mut self, frame: FrameId) {
        let held = |node: &StableNode| node.live || node.named > 0 || node.loose;
        let Some(node) = self.rmap.node(frame).copied().filter(|node| !held(node)) else {
            return;
        };
        self.rmap.remove_node(frame);
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

    /// Another live frame of the content of `frame`, which is one of a block: of
    /// that block, or of those that the content had before.
    pub(crate) fn heir(&self, frame: FrameId, node: &StableNode) -> Option<FrameId> {
        let is_heir = |heir: FrameId| {
            let heir = self.rmap.node(heir);
            heir.is_some_and(|heir| heir.live && heir.fingerprint == node.fingerprint)
        };
        let mut first = block_of(frame);
        let mut block = self.blocks.get(&first).filter(|_| node.in_block)?;
        loop {
            let siblings = (0..BLOCK).map(|number| first.plus(number));
            let heir = siblings.chain([block.original]).find(|&heir| is_heir(heir));
            if heir.is_some() {
                return heir;
            }
            // Blocks come and go, and numbers with them: each is older than the
            // one that names it, or the chain ends.
            let older = self.blocks.get(&block_of(block.original))?;
            if older.made >= block.made {
                return None;
            }
            (first, block) = (block_of(block.original), older);
        }
    }
}
