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
    #[cfg(test)]
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
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Few fingerprints, spread over all shards, and few digests: clashes abound.
    fn key() -> impl Strategy<Value = (Fingerprint, Digest)> {
        (0..64_u64, 0..3_u8)
            .prop_map(|(f, d)| (Fingerprint(f.rotate_right(6) | f), Digest([d; 16])))
    }

    #[derive(Clone, Debug)]
    enum Op {
        Put((Fingerprint, Digest)),
        Take((Fingerprint, Digest)),
        Reshard(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => key().prop_map(Op::Put),
            4 => key().prop_map(Op::Take),
            1 => (0..400_usize).prop_map(Op::Reshard),
        ]
    }

    fn found(model: &BTreeMap<(Fingerprint, Digest), FrameId>, fingerprint: Fingerprint) -> Found {
        let mut all = model.iter().filter(|((f, _), _)| *f == fingerprint);
        match (all.next(), all.next()) {
            (None, _) => Found::None,
            (Some(((_, digest), frame)), None) => Found::One(*frame, *digest),
            _ => Found::Many,
        }
    }

    proptest! {
        #[test]
        fn behaves_as_a_sorted_map(ops in prop::collection::vec(op(), 1..400)) {
            let tree = StableTree::new(1);
            let mut model = BTreeMap::new();
            for (number, op) in (0..).zip(ops) {
                match op {
                    Op::Put((f, d)) => {
                        if tree.find_exact(f, &d).is_none() {
                            tree.insert(f, d, FrameId(number));
                            prop_assert_eq!(model.insert((f, d), FrameId(number)), None);
                        }
                    }
                    Op::Take((f, d)) => {
                        prop_assert_eq!(tree.remove(f, &d), model.remove(&(f, d)));
                        prop_assert_eq!(tree.find_exact(f, &d), None);
                    }
                    Op::Reshard(expected) => tree.reshard(expected),
                }
                prop_assert_eq!(tree.check(), Ok(()));
                prop_assert_eq!(tree.len(), model.len());
            }
            for f in (0..64_u64).map(|f| Fingerprint(f.rotate_right(6) | f)) {
                prop_assert_eq!(tree.find(f), found(&model, f));
            }
            let mut seen = Vec::new();
            tree.for_each(|f, d, frame| seen.push(((f, *d), frame)));
            prop_assert_eq!(seen, model.into_iter().collect::<Vec<_>>());
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
