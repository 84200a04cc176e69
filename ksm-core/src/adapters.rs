//! The nodes of the two trees, and how intrusive-collections finds the links in
//! them.
//!
//! The adapters are here, apart from everything else, because the macro that
//! makes them expands to `unsafe`: it is the one place outside the Linux backend
//! where that is allowed. What it asserts is that `link` is a field of the node,
//! which it computes from the field's name.
#![allow(unsafe_code)]

use intrusive_collections::{KeyAdapter, RBTreeLink, intrusive_adapter};

use crate::fingerprint::{Digest, Fingerprint};
use crate::page::FrameId;
use crate::region::Place;
use crate::sharded::Node;

/// A frame in the stable tree.
#[derive(Debug)]
pub(crate) struct StableNode {
    link: RBTreeLink,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) digest: Digest,
    pub(crate) frame: FrameId,
}

impl StableNode {
    pub(crate) fn new(fingerprint: Fingerprint, digest: Digest, frame: FrameId) -> Box<Self> {
        Box::new(Self {
            link: RBTreeLink::new(),
            fingerprint,
            digest,
            frame,
        })
    }
}

intrusive_adapter!(pub(crate) StableAdapter = Box<StableNode>: StableNode { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for StableAdapter {
    type Key = (Fingerprint, Digest);

    fn get_key(&self, node: &'a StableNode) -> Self::Key {
        (node.fingerprint, node.digest)
    }
}

impl Node for StableNode {
    type Key = (Fingerprint, Digest);
    type Adapter = StableAdapter;

    fn fingerprint(key: &Self::Key) -> Fingerprint {
        key.0
    }
}

/// A page in the unstable tree.
#[derive(Debug)]
pub(crate) struct UnstableNode {
    link: RBTreeLink,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) item: Place,
}

impl UnstableNode {
    pub(crate) fn new(fingerprint: Fingerprint, item: Place) -> Box<Self> {
        Box::new(Self {
            link: RBTreeLink::new(),
            fingerprint,
            item,
        })
    }
}

intrusive_adapter!(
    pub(crate) UnstableAdapter = Box<UnstableNode>: UnstableNode { link => RBTreeLink }
);

impl<'a> KeyAdapter<'a> for UnstableAdapter {
    type Key = Fingerprint;

    fn get_key(&self, node: &'a UnstableNode) -> Self::Key {
        node.fingerprint
    }
}

impl Node for UnstableNode {
    type Key = Fingerprint;
    type Adapter = UnstableAdapter;

    fn fingerprint(key: &Self::Key) -> Fingerprint {
        *key
    }
}
