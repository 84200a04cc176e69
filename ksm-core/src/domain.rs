//! A trust domain: which content has which frame. Nothing here knows where
//! guests keep their pages; nothing is shared between two domains.

use std::collections::HashMap;

use crate::backend::{Backend, FrameStore};
use crate::error::BackendError;
use crate::fingerprint::{Digest, Fingerprint, Keys};
use crate::frames::{BLOCK, block_of};
use crate::page::{FrameId, FrameRange, PageBuf, PageIndex};
use crate::region::{DomainId, RegionId};
use crate::rmap::{ItemId, StableNode};
use crate::sharing::{Block, Sharing};
use crate::stable::{Found, StableTree};
use crate::sync::Mutex;
use crate::unstable::UnstableTree;

/// One domain's secrets, trees, frames and reverse map.
#[derive(Debug)]
pub(crate) struct Domain<B: Backend> {
    pub(crate) id: DomainId,
    pub(crate) keys: Keys,
    pub(crate) store: B::Store,
    pub(crate) stable: StableTree,
    pub(crate) unstable: UnstableTree,
    sharing: Mutex<Sharing>,
}

/// What the domain's sharing amounts to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shared {
    pub(crate) pages_shared: u64,
    pub(crate) pages_sharing: u64,
    pub(crate) stable_node_dups: u64,
    pub(crate) frames_lingering: u64,
    pub(crate) metadata_bytes: u64,
}

impl<B: Backend> Domain<B> {
    pub(crate) fn new(id: DomainId, keys: Keys, store: B::Store) -> Self {
        Self {
            id,
            keys,
            store,
            stable: StableTree::new(1),
            unstable: UnstableTree::new(1),
            sharing: Mutex::default(),
        }
    }

    /// A new pass: the unstable tree is rebuilt from nothing, and both trees get
    /// as many shards as the last pass has shown to be right.
    pub(crate) fn start_pass(&self) {
        let expected = self.unstable.len();
        self.unstable.clear();
        self.unstable.reshard(expected);
        self.stable.reshard(self.stable.len());
    }

    /// The live frame that a page of this fingerprint should be compared with, if
    /// there is one. `digest` of the page is only asked for where several frames
    /// have its fingerprint.
    pub(crate) fn find(
        &self,
        fingerprint: Fingerprint,
        digest: impl FnOnce() -> Option<Digest>,
    ) -> Option<FrameId> {
        match self.stable.find(fingerprint) {
            Found::None => None,
            Found::One(frame, _) => Some(frame),
            Found::Many => self.stable.find_exact(fingerprint, &digest()?),
        }
    }

    /// Allots a frame, the one after `previous` if it is free, fills it with
    /// `content` and puts it into the stable tree. It stays if a page is merged
    /// with it before [`Self::sweep`].
    pub(crate) fn plan_frame(
        &self,
        previous: Option<FrameId>,
        fingerprint: Fingerprint,
        content: &PageBuf,
    ) -> Result<FrameId, BackendError> {
        let digest = self.keys.digest(content);
        if let Some(frame) = self.stable.find_exact(fingerprint, &digest) {
            return Ok(frame);
        }
        let frame = {
            let mut sharing = self.sharing.lock();
            let frame = sharing.frames.allot(previous);
            let frame = frame.ok_or(BackendError::OutOfMemory)?;
            sharing.add_loose(frame, fingerprint, false);
            frame
        };
        self.fill(frame, content)?;
        self.stable.insert(fingerprint, digest, frame);
        Ok(frame)
    }

    /// Fills a frame that was just allotted, so that pages may come to map it.
    fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        self.store.reserve(FrameRange::one(frame))?;
        self.store.fill(frame, content)?;
        self.sharing.lock().rmap.set_live(frame, true);
        Ok(())
    }

    /// A frame of the content of `frame` behind which there is room for more of
    /// the same, so that a stretch of that content needs one mapping for many
    /// pages: the first of a block of equal frames, made now if there is none.
    /// `frame` itself where that cannot be.
    pub(crate) fn stretch(&self, frame: FrameId) -> FrameId {
        let made = {
            let mut sharing = self.sharing.lock();
            let node = sharing.rmap.node(frame).copied();
            let Some(node) = node.filter(|node| node.live) else {
                return frame;
            };
            if node.in_block {
                None
            } else {
                let Some(first) = sharing.frames.allot_block() else {
                    return frame;
                };
                let block = Block {
                    nodes: 0,
                    original: frame,
                };
                sharing.blocks.insert(first, block);
                Some((node, first))
            }
        };
        let Some((node, first)) = made else {
            let first = block_of(frame);
            return self.replica(frame, first).unwrap_or(frame);
        };
        let replica = self.replica(frame, first);
        if replica.is_some() {
            // Later pages of this content are to find the block.
            if let Some(digest) = self.stable.digest_of(node.fingerprint, frame) {
                self.stable.remove(node.fingerprint, &digest);
                self.stable.insert(node.fingerprint, digest, first);
            }
        } else {
            let mut sharing = self.sharing.lock();
            sharing.free_block_if_empty(first);
        }
        replica.unwrap_or(frame)
    }

    /// The frame behind `previous`, if that is one of a block of the content that
    /// `fingerprint` stands for, and the block goes on.
    pub(crate) fn extend(&self, previous: FrameId, fingerprint: Fingerprint) -> Option<FrameId> {
        let next = previous.plus(1);
        let node = self.sharing.lock().rmap.node(previous).copied()?;
        let same = node.live && node.in_block && node.fingerprint == fingerprint;
        if !same || block_of(next) != block_of(previous) {
            return None;
        }
        self.replica(previous, next)
    }

    /// Makes sure that `to`, a number of a block, holds what `from` holds.
    fn replica(&self, from: FrameId, to: FrameId) -> Option<FrameId> {
        let fingerprint = {
            let mut sharing = self.sharing.lock();
            if let Some(node) = sharing.rmap.node(to) {
                return node.live.then_some(to);
            }
            let node = sharing.rmap.node(from).copied()?;
            sharing.add_loose(to, node.fingerprint, true);
            node.fingerprint
        };
        let mut buf = PageBuf::zeroed();
        self.store.read(from, &mut buf).ok()?;
        // `from` may have been given back meanwhile.
        let whole = self.keys.fingerprint(&buf) == fingerprint;
        (whole && self.fill(to, &buf).is_ok()).then_some(to)
    }

    /// Gives back planned frames that no page came to map.
    pub(crate) fn sweep(&self) {
        let mut sharing = self.sharing.lock();
        for frame in std::mem::take(&mut sharing.loose) {
            sharing.rmap.set_loose(frame, false);
            if sharing
                .rmap
                .node(frame)
                .is_some_and(|node| node.sharers == 0)
            {
                self.retire(&mut sharing, frame);
            }
        }
    }

    /// Counts `page` among those that map and name `frame`, ahead of the
    /// mapping, so that the frame cannot go away meanwhile. `None` if it has
    /// gone.
    pub(crate) fn reserve(
        &self,
        frame: FrameId,
        region: RegionId,
        page: PageIndex,
    ) -> Option<ItemId> {
        self.sharing.lock().rmap.add(frame, region, page)
    }

    /// The page of `item` got a copy of its own; its mapping still names the
    /// frame.
    pub(crate) fn unshare(&self, frame: FrameId, item: ItemId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.remove(frame, item) == 0 {
            self.retire(&mut sharing, frame);
        }
    }

    /// The same for many pages at once: frames in a row that nobody sees any more
    /// are given back by one call.
    pub(crate) fn unshare_all(&self, pages: &[(FrameId, ItemId)]) {
        let mut sharing = self.sharing.lock();
        let mut unseen: Vec<FrameId> = pages
            .iter()
            .filter(|&&(frame, item)| sharing.rmap.remove(frame, item) == 0)
            .map(|&(frame, _)| frame)
            .collect();
        unseen.sort_unstable();
        for run in unseen.chunk_by(|left, right| left.plus(1) == *right) {
            self.retire_run(&mut sharing, run);
        }
    }

    /// The mapping of a page names `frame` no longer.
    pub(crate) fn unname(&self, frame: FrameId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.unname(frame) == 0 {
            sharing.free_number(frame);
        }
    }

    /// A copied page's region is gone, and its mapping still names `frame`.
    pub(crate) fn abandon(&self, frame: FrameId) {
        self.sharing.lock().rmap.abandon(frame);
    }

    /// Undoes a [`Self::reserve`] for a mapping that did not come about, or is
    /// gone with its page.
    pub(crate) fn release(&self, frame: FrameId, item: ItemId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.remove(frame, item) == 0 {
            // The sweep decides: other pages may be about to map it.
            sharing.make_loose(frame);
        }
        drop(sharing);
        self.unname(frame);
    }

    /// Nobody sees the frame any more.
    fn retire(&self, sharing: &mut Sharing, frame: FrameId) {
        self.retire_run(sharing, &[frame]);
    }

    /// Nobody sees these frames, which are in a row, any more: gives their memory
    /// back, and their numbers too unless a copied page still names them.
    fn retire_run(&self, sharing: &mut Sharing, run: &[FrameId]) {
        for &frame in run {
            let node = sharing.rmap.node(frame).copied();
            if let Some(node) = node.filter(|node| node.live) {
                self.bury(sharing, frame, &node);
            }
        }
        let (Some(&start), Ok(len)) = (run.first(), u32::try_from(run.len())) else {
            return;
        };
        let punched = self.store.punch(FrameRange { start, len });
        for &frame in run {
            match punched {
                Ok(()) => sharing.free_number(frame),
                Err(_) => sharing.make_loose(frame),
            }
        }
    }

    /// Takes care that nobody comes to map the frame any more.
    fn bury(&self, sharing: &mut Sharing, frame: FrameId, node: &StableNode) {
        sharing.rmap.set_live(frame, false);
        if let Some(digest) = self.stable.digest_of(node.fingerprint, frame) {
            self.stable.remove(node.fingerprint, &digest);
            if let Some(heir) = sharing.heir(frame, node) {
                self.stable.insert(node.fingerprint, digest, heir);
            }
        }
    }

    /// How many pages share `frame`.
    pub(crate) fn sharers(&self, frame: FrameId) -> u64 {
        let sharing = self.sharing.lock();
        sharing
            .rmap
            .node(frame)
            .map_or(0, |node| u64::from(node.sharers))
    }

    pub(crate) fn shared(&self) -> Shared {
        let sharing = self.sharing.lock();
        let trees = (self.stable.bytes() + self.unstable.bytes()) as u64;
        Shared {
            pages_shared: sharing.rmap.pages_shared(),
            pages_sharing: sharing.rmap.pages_sharing(),
            stable_node_dups: sharing.rmap.live() - self.stable.len() as u64,
            frames_lingering: sharing.rmap.known() - sharing.rmap.live(),
            metadata_bytes: sharing.rmap.bytes() + trees,
        }
    }

    /// Checks that trees, rmap and store agree. `named` says for every frame
    /// how often the regions' records name it and map it as shared.
    pub(crate) fn check(&self, named: &HashMap<FrameId, (u32, u32)>) -> Result<(), String> {
        self.stable.check()?;
        self.unstable.check()?;
        let sharing = self.sharing.lock();
        let mut buf = PageBuf::zeroed();
        let mut live = 0;
        for (frame, node) in sharing.rmap.nodes() {
            let (names, sharers) = named.get(&frame).copied().unwrap_or_default();
            let names = names + node.abandoned;
            if (names, sharers) != (node.named, node.sharers) {
                return Err(format!(
                    "{frame}: named {} shared {}, the records say {names} {sharers}",
                    node.named, node.sharers
                ));
            }
            let listed = sharing.rmap.sharers_of(frame).count();
            if listed != node.sharers as usize {
                return Err(format!(
                    "{frame}: {} sharers, {listed} on its list",
                    node.sharers
                ));
            }
            let stands = self.stable.digest_of(node.fingerprint, frame);
            if stands.is_some() && !node.live {
                return Err(format!("{frame}: not live, but in the stable tree"));
            }
            if node.live {
                live += usize::from(stands.is_some());
                self.store
                    .read(frame, &mut buf)
                    .map_err(|error| error.to_string())?;
                let digest = self.keys.digest(&buf);
                let whole = self.keys.fingerprint(&buf) == node.fingerprint
                    && stands.is_none_or(|stands| stands == digest);
                if !whole {
                    return Err(format!("{frame}: its content is not what was merged"));
                }
                if self.stable.find_exact(node.fingerprint, &digest).is_none() {
                    return Err(format!("{frame}: live, but nobody can find its content"));
                }
            }
            if sharing.frames.is_free(frame.0) {
                return Err(format!("{frame}: has a node, but its number is free"));
            }
        }
        let outside = sharing.rmap.nodes().filter(|(_, node)| !node.in_block);
        let numbers = outside.count() as u64 + sharing.blocks.len() as u64 * u64::from(BLOCK);
        if numbers != sharing.frames.taken() || live != self.stable.len() {
            return Err(format!(
                "{numbers} numbers in use, {} taken, {live} contents live, {} in the tree",
                sharing.frames.taken(),
                self.stable.len()
            ));
        }
        match named
            .keys()
            .find(|&&frame| sharing.rmap.node(frame).is_none())
        {
            Some(frame) => Err(format!("{frame}: named by a record, has no node")),
            None => Ok(()),
        }
    }
}
