//! A red-black tree cut into shards by fingerprint: what the stable and the
//! unstable tree have in common.
//!
//! A search costs a cache miss or two a level, so many shallow trees beat a deep
//! one, and they are locked one by one. A shard holds the keys whose fingerprints
//! start with its number: fingerprints are evenly spread whatever the guests
//! hold, and shards in a row are in key order, which makes [`ShardedTree::reshard`]
//! a single walk without a comparison.

use std::fmt;

use intrusive_collections::rbtree::{Entry, LinkOps};
use intrusive_collections::{Adapter, DefaultPointerOps, KeyAdapter, RBTree};

use crate::fingerprint::Fingerprint;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, RwLock};

/// Nodes of a shard that [`ShardedTree::reshard`] aims at, at most: measured
/// (`cargo bench -p ksm-benches --bench trees`), smaller ones gain nothing more,
/// and at this size a shard costs each of its nodes 2 to 6 bytes. Few under
/// test and while fuzzing, so that resharding is common there.
const SHARD_NODES: usize = if cfg!(any(test, fuzzing)) { 4 } else { 16 };

/// At most 2^20 shards: full at 64 GiB of frames, crowded from 128 GiB on.
const MAX_BITS: u32 = 20;

/// What stands in a [`ShardedTree`].
pub(crate) trait Node: Sized + Send {
    /// What nodes are ordered by: a fingerprint first, whatever follows.
    type Key: Copy + Ord + fmt::Debug;
    /// How its link is found, and its key.
    type Adapter: Adapter<LinkOps = LinkOps, PointerOps = DefaultPointerOps<Box<Self>>>
        + for<'a> KeyAdapter<'a, Key = Self::Key>
        + Clone
        + Default
        + Send;

    /// The fingerprint that a key starts with.
    fn fingerprint(key: &Self::Key) -> Fingerprint;
}

/// One shard.
type Tree<N> = RBTree<<N as Node>::Adapter>;

/// The shards: 2^`bits` of them.
struct Shards<N: Node> {
    bits: u32,
    trees: Box<[Mutex<Tree<N>>]>,
}

/// See the module. All calls but [`ShardedTree::reshard`] run beside one another.
pub(crate) struct ShardedTree<N: Node> {
    shards: RwLock<Shards<N>>,
    len: AtomicUsize,
}

impl<N: Node> Shards<N> {
    fn new(bits: u32) -> Self {
        let trees = (0..1_usize << bits).map(|_| Mutex::new(Tree::<N>::default()));
        Self {
            bits,
            trees: trees.collect(),
        }
    }

    fn number_of(&self, fingerprint: Fingerprint) -> usize {
        // Two shifts, because a shift by all 64 bits overflows.
        let number = fingerprint.0 >> 1 >> (u64::BITS - 1 - self.bits);
        usize::try_from(number).expect("fewer than 2^MAX_BITS shards")
    }

    fn tree_of(&self, key: &N::Key) -> &Mutex<Tree<N>> {
        &self.trees[self.number_of(N::fingerprint(key))]
    }
}

impl<N: Node> ShardedTree<N> {
    /// An empty tree of `shards` shards, rounded up to a power of two.
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            shards: RwLock::new(Shards::new(bits_for(shards))),
            len: AtomicUsize::new(0),
        }
    }

    /// Puts in the node that `make` makes for `key`, unless one stands there:
    /// then returns what `look` sees in that one.
    pub(crate) fn find_or_insert<R>(
        &self,
        key: &N::Key,
        make: impl FnOnce() -> Box<N>,
        look: impl FnOnce(&N) -> R,
    ) -> Option<R> {
        let shards = self.shards.read();
        let mut tree = shards.tree_of(key).lock();
        match tree.entry(key) {
            Entry::Occupied(cursor) => cursor.get().map(look),
            Entry::Vacant(place) => {
                place.insert(make());
                self.len.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// What `look` sees in the shard of `key`.
    pub(crate) fn look<R>(&self, key: &N::Key, look: impl FnOnce(&Tree<N>) -> R) -> R {
        look(&self.shards.read().tree_of(key).lock())
    }

    /// Takes the node of `key` out.
    pub(crate) fn remove(&self, key: &N::Key) -> Option<Box<N>> {
        let shards = self.shards.read();
        let mut tree = shards.tree_of(key).lock();
        let node = tree.find_mut(key).remove()?;
        self.len.fetch_sub(1, Ordering::Relaxed);
        Some(node)
    }

    /// Takes all nodes out and frees them.
    pub(crate) fn clear(&self) {
        for tree in &self.shards.read().trees {
            let tree = tree.lock().take();
            self.len
                .fetch_sub(tree.into_iter().count(), Ordering::Relaxed);
        }
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// How many shards there are.
    pub(crate) fn shards(&self) -> usize {
        self.shards.read().trees.len()
    }

    /// Bytes that the tree takes: its nodes and its shards.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * size_of::<N>() + self.shards() * size_of::<Mutex<Tree<N>>>()
    }

    /// Cuts the tree anew if it is far from right for `expected` nodes: shards
    /// twice as full as they should be, or nearly empty. The others wait
    /// meanwhile, so it is for the end of a pass.
    pub(crate) fn reshard(&self, expected: usize) {
        let mut shards = self.shards.write();
        let count = shards.trees.len();
        let bits = bits_for(expected.div_ceil(SHARD_NODES));
        let crowded = expected > 2 * SHARD_NODES * count;
        let sparse = expected < SHARD_NODES / 4 * count;
        if bits == shards.bits || !(crowded || sparse) {
            return;
        }
        let old = std::mem::replace(&mut *shards, Shards::new(bits));
        for tree in old.trees {
            for node in tree.into_inner() {
                let key = N::Adapter::default().get_key(&node);
                let number = shards.number_of(N::fingerprint(&key));
                // Before the end, that is: last. Nodes come in order.
                let mut tree = shards.trees[number].lock();
                tree.cursor_mut().insert_before(node);
            }
        }
    }

    /// Calls `each` with every node, in order. Each shard is locked meanwhile.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn for_each(&self, mut each: impl FnMut(&N)) {
        for tree in &self.shards.read().trees {
            tree.lock().iter().for_each(&mut each);
        }
    }

    /// Checks order, shards and count: for tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub(crate) fn check(&self) -> Result<(), String> {
        let shards = self.shards.read();
        let (mut last, mut count) = (None, 0);
        for (number, tree) in shards.trees.iter().enumerate() {
            for node in tree.lock().iter() {
                let key = N::Adapter::default().get_key(node);
                let right = shards.number_of(N::fingerprint(&key));
                if right != number {
                    return Err(format!("{key:?} stands in shard {number}, not {right}"));
                }
                if last.is_some_and(|last| last >= key) {
                    return Err(format!("{key:?} stands after {last:?}"));
                }
                last = Some(key);
                count += 1;
            }
        }
        match self.len() {
            len if len == count => Ok(()),
            len => Err(format!(
                "{count} nodes stand in the tree, {len} were counted"
            )),
        }
    }
}

impl<N: Node> fmt::Debug for ShardedTree<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedTree")
            .field("shards", &self.shards())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// log2 of the count of shards, for at least `shards`.
fn bits_for(shards: usize) -> u32 {
    shards.next_power_of_two().ilog2().min(MAX_BITS)
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::page::PageIndex;
    use crate::region::{AnonVmaId, Place};
    use crate::unstable::UnstableTree;

    fn item(page: u64) -> Place {
        Place::new(AnonVmaId(0), PageIndex(page))
    }

    /// Two threads bring equal pages while the tree is cut anew: one stands, the
    /// other finds it, and nothing is lost.
    #[test]
    fn loom_of_two_equal_pages_one_finds_the_other() {
        loom::model(|| {
            let tree = Arc::new(UnstableTree::new(1));
            let threads = [1, 2].map(|page| {
                let tree = Arc::clone(&tree);
                thread::spawn(move || tree.find_or_insert(Fingerprint(u64::MAX), item(page)))
            });
            tree.reshard(3 * SHARD_NODES);
            let found = threads.map(|thread| thread.join().unwrap());
            assert!(found == [None, Some(item(1))] || found == [Some(item(2)), None]);
            assert_eq!(tree.check(), Ok(()));
            assert_eq!(tree.len(), 1);
        });
    }
}
