//! Handles on private parts, for the project's own benchmarks and fuzz targets
//! and nobody else: may change at any time.

pub mod trees;

use crate::backend::Backend;
use crate::engine::Ksm;
use crate::error::Error;
use crate::fingerprint::{Digest, Fingerprint, Keys};
use crate::page::{FrameId, PageBuf, PageIndex};
use crate::region::{AnonVmaId, Lease, Place, RegionId};
use crate::stable::{Found, StableTree};
use crate::unstable::UnstableTree;
use crate::walk::Reach;

/// Fingerprints and digests.
#[derive(Debug)]
pub struct Hashing(Keys);

impl Hashing {
    /// With keys made from `seed`.
    #[must_use]
    pub fn new(seed: [u8; 32]) -> Self {
        Self(Keys::from_seed(seed))
    }

    /// A page's fingerprint.
    #[must_use]
    pub fn fingerprint(&self, page: &PageBuf) -> u64 {
        self.0.fingerprint(page).0
    }

    /// A page's digest.
    #[must_use]
    pub fn digest(&self, page: &PageBuf) -> [u8; 16] {
        self.0.digest(page).0
    }
}

/// The stable tree.
#[derive(Debug)]
pub struct Stable(StableTree);

impl Stable {
    /// Bytes of a node.
    pub const NODE_BYTES: usize = StableTree::node_bytes();

    /// An empty one.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        Self(StableTree::new(shards))
    }

    /// Puts a frame in.
    pub fn insert(&self, fingerprint: u64, frame: u32) {
        let fingerprint = Fingerprint(fingerprint);
        self.0.insert(fingerprint, Digest::MIN, FrameId(frame));
    }

    /// Whether a frame has this fingerprint.
    #[must_use]
    pub fn find(&self, fingerprint: u64) -> bool {
        self.0.find(Fingerprint(fingerprint)) != Found::None
    }

    /// Cuts it anew for `expected` frames.
    pub fn reshard(&self, expected: usize) {
        self.0.reshard(expected);
    }
}

/// The unstable tree.
#[derive(Debug)]
pub struct Unstable(UnstableTree);

impl Unstable {
    /// Bytes of a node.
    pub const NODE_BYTES: usize = UnstableTree::node_bytes();

    /// An empty one.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        Self(UnstableTree::new(shards))
    }

    /// Whether a page has this fingerprint; puts one in if not.
    pub fn find_or_insert(&self, fingerprint: u64, page: u64) -> bool {
        let item = Place::new(AnonVmaId(0), PageIndex(page));
        let stands = self.0.find_or_insert(Fingerprint(fingerprint), item);
        stands.is_some()
    }

    /// Takes all pages out.
    pub fn clear(&self) {
        self.0.clear();
    }
}

/// A region's lease.
#[derive(Debug)]
pub struct Leased(Lease<()>);

impl Default for Leased {
    fn default() -> Self {
        Self(Lease::new())
    }
}

impl Leased {
    /// Calls `work` with the lease held. Whether it could be had.
    pub fn with(&self, work: impl FnOnce()) -> bool {
        let guard = self.0.lock();
        work();
        guard.is_ok()
    }
}

/// What one walk over the reverse map cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkFigures {
    /// Pages that map the frame.
    pub sharers: u64,
    /// Regions that were found in interval trees.
    pub intervals: u64,
    /// Nodes of interval trees that were looked at.
    pub nodes: u64,
    /// How often the lock of a tree was taken.
    pub holds: u64,
    /// The most nodes looked at under one hold.
    pub longest_hold: u64,
    /// Regions in the anon_vma of the page.
    pub regions: u64,
    /// Depth of its interval tree.
    pub depth: u64,
}

/// Walks over the pages that map the frame of `page`: at exactly its linear
/// index, or over the `whole` index space, comparing.
///
/// # Errors
/// As [`Ksm::sharers`].
pub fn walk<B: Backend>(
    ksm: &Ksm<B>,
    region: RegionId,
    page: PageIndex,
    whole: bool,
) -> Result<WalkFigures, Error> {
    ksm.walk_figures(
        region,
        page,
        if whole { Reach::Whole } else { Reach::Exact },
    )
}
