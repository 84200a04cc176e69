//! The stable tree: one node for every frame of a trust domain.
//!
//! Its keys are what a frame was known by when it was filled. Frames are never
//! written while they stand here, so no guest can put the tree out of order, and
//! a fingerprint that two frames share costs a digest, never a wrong merge.

use intrusive_collections::Bound;

use crate::adapters::StableNode;
use crate::fingerprint::{Digest, Fingerprint};
use crate::page::FrameId;
use crate::sharded::ShardedTree;

/// What stands under a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No frame.
    None,
    /// One frame, with its digest.
    One(FrameId, Digest),
    /// Several: only a digest can tell which.
    Many,
}

/// Frames by what their content is known by.
#[derive(Debug)]
pub(crate) struct StableTree(ShardedTree<StableNode>);

impl StableTree {
    /// An empty tree of about `shards` shards.
    pub(crate) fn new(shards: usize) -> Self {
        Self(ShardedTree::new(shards))
    }

    /// Puts a frame in, unless one of its content stands there: then returns that.
    pub(crate) fn insert(
        &self,
        fingerprint: Fingerprint,
        digest: Digest,
        frame: FrameId,
    ) -> Option<FrameId> {
        self.0.find_or_insert(
            &(fingerprint, digest),
            || StableNode::new(fingerprint, digest, frame),
            |node| node.frame,
        )
    }

    /// The frames of a fingerprint.
    pub(crate) fn find(&self, fingerprint: Fingerprint) -> Found {
        let first = (fingerprint, Digest::MIN);
        self.0.look(&first, |tree| {
            let mut cursor = tree.lower_bound(Bound::Included(&first));
            let mut next = || {
                let node = cursor.get().filter(|node| node.fingerprint == fingerprint);
                cursor.move_next();
                node
            };
            match (next(), next()) {
                (None, _) => Found::None,
                (Some(node), None) => Found::One(node.frame, node.digest),
                (Some(_), Some(_)) => Found::Many,
            }
        })
    }

    /// The digest under which `frame` stands; `None` if another frame stands for
    /// its content, or none.
    pub(crate) fn digest_of(&self, fingerprint: Fingerprint, frame: FrameId) -> Option<Digest> {
        let first = (fingerprint, Digest::MIN);
        self.0.look(&first, |tree| {
            let mut cursor = tree.lower_bound(Bound::Included(&first));
            while let Some(node) = cursor.get().filter(|node| node.fingerprint == fingerprint) {
                if node.frame == frame {
                    return Some(node.digest);
                }
                cursor.move_next();
            }
            None
        })
    }

    /// The frame of a content.
    pub(crate) fn find_exact(&self, fingerprint: Fingerprint, digest: &Digest) -> Option<FrameId> {
        let key = (fingerprint, *digest);
        self.0.look(&key, |tree| Some(tree.find(&key).get()?.frame))
    }

    /// Takes the frame of a content out.
    pub(crate) fn remove(&self, fingerprint: Fingerprint, digest: &Digest) -> Option<FrameId> {
        Some(self.0.remove(&(fingerprint, *digest))?.frame)
    }

    /// How many frames there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Calls `each` with every frame, in order.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn for_each(&self, mut each: impl FnMut(Fingerprint, &Digest, FrameId)) {
        self.0
            .for_each(|node| each(node.fingerprint, &node.digest, node.frame));
    }

    /// Makes shards for `expected` frames: see [`ShardedTree::reshard`].
    pub(crate) fn reshard(&self, expected: usize) {
        self.0.reshard(expected);
    }

    /// Bytes that one node takes.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) const fn node_bytes() -> usize {
        size_of::<StableNode>()
    }

    /// Bytes that the whole tree takes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Checks the tree: see [`ShardedTree::check`].
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.check()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::internals::trees;

    proptest! {
        #[test]
        fn behaves_as_a_sorted_map(
            ops in prop::collection::vec(any::<[u8; trees::BYTES_PER_OP]>(), 1..400)
        ) {
            prop_assert_eq!(trees::stable(&trees::decode(&ops.concat())), Ok(()));
        }
    }

    #[test]
    fn a_content_has_one_frame() {
        let tree = StableTree::new(1);
        let put = |frame| tree.insert(Fingerprint(1), Digest::MIN, FrameId(frame));
        assert_eq!(put(0), None);
        assert_eq!(put(1), Some(FrameId(0)));
        assert_eq!(tree.len(), 1);
    }

    #[test]
    fn a_node_is_smaller_than_the_kernels() {
        // struct ksm_stable_node, mm/ksm.c: 64 bytes.
        assert_eq!(StableTree::node_bytes(), 56);
    }
}
