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
    /// Frames to look at again when the window is done: just allotted, or not
    /// to be punched when last tried.
    pub(crate) loose: Vec<FrameId>,
    /// Blocks of equal frames, by their first number.
    pub(crate) blocks: HashMap<FrameId, Block>,
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
}

impl Sharing {
    /// A node for a number just allotted. From here on a sweep gives it back,
    /// whatever happens.
    pub(crate) fn add_loose(&mut self, frame: FrameId, fingerprint: Fingerprint, in_block: bool) {
        self.rmap.add_node(frame, fingerprint, in_block);
        if in_block && let Some(block) = self.blocks.get_mut(&block_of(frame)) {
            block.nodes += 1;
        }
        self.make_loose(frame);
    }

    pub(crate) fn make_loose(&mut self, frame: FrameId) {
        if !self.rmap.set_loose(frame, true) {
            self.loose.push(frame);
        }
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

    /// Another live frame of the content of `frame`, one of a block.
    pub(crate) fn heir(&self, frame: FrameId, node: &StableNode) -> Option<FrameId> {
        let block = self
            .blocks
            .get(&block_of(frame))
            .filter(|_| node.in_block)?;
        let first = block_of(frame);
        let siblings = (0..BLOCK).map(|number| first.plus(number));
        siblings.chain([block.original]).find(|&heir| {
            let heir = self.rmap.node(heir);
            heir.is_some_and(|heir| heir.live && heir.fingerprint == node.fingerprint)
        })
    }
}
