//! The unstable tree: one page for every content that has been stable for a
//! while and has no frame, waiting for its equal. It lives for one pass.
//!
//! In the kernel's tree pages are compared as they stand, so guests that write
//! put it out of order. Here the key is the fingerprint that was taken when the
//! page was read: the tree stays in order, and what it finds is a promising pair.

use crate::adapters::UnstableNode;
use crate::fingerprint::Fingerprint;
use crate::region::Place;
use crate::sharded::ShardedTree;

/// Pages by their fingerprints, one for each.
#[derive(Debug)]
pub(crate) struct UnstableTree(ShardedTree<UnstableNode>);

impl UnstableTree {
    /// An empty tree of about `shards` shards.
    pub(crate) fn new(shards: usize) -> Self {
        Self(ShardedTree::new(shards))
    }

    /// The page that stands under the fingerprint; if there is none, `item` from
    /// now on.
    pub(crate) fn find_or_insert(&self, fingerprint: Fingerprint, item: Place) -> Option<Place> {
        self.0.find_or_insert(
            &fingerprint,
            || UnstableNode::new(fingerprint, item),
            |node| node.item,
        )
    }

    /// Takes the page of a fingerprint out.
    pub(crate) fn remove(&self, fingerprint: Fingerprint) -> Option<Place> {
        Some(self.0.remove(&fingerprint)?.item)
    }

    /// Takes all pages out.
    pub(crate) fn clear(&self) {
        self.0.clear();
    }

    /// How many pages there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Makes shards for `expected` pages: see [`ShardedTree::reshard`]. Costs
    /// least when the tree is empty.
    pub(crate) fn reshard(&self, expected: usize) {
        self.0.reshard(expected);
    }

    /// Bytes that one node takes.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) const fn node_bytes() -> usize {
        size_of::<UnstableNode>()
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
        fn the_first_of_each_fingerprint_stands(
            ops in prop::collection::vec(any::<[u8; trees::BYTES_PER_OP]>(), 1..400)
        ) {
            prop_assert_eq!(trees::unstable(&trees::decode(&ops.concat())), Ok(()));
        }
    }

    #[test]
    fn a_node_is_smaller_than_the_kernels() {
        // struct ksm_rmap_item, mm/ksm.c: 64 bytes.
        assert_eq!(UnstableTree::node_bytes(), 40);
    }
}
