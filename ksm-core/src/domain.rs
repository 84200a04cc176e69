//! A trust domain: which content has which frame. Nothing here knows where
//! guests keep their pages; nothing is shared between two domains.

use crate::backend::{Backend, FrameStore};
use crate::error::BackendError;
use crate::fingerprint::{Digest, Fingerprint, Keys};
use crate::frames::Frames;
use crate::page::{FrameId, FrameRange, PageBuf, PageIndex};
use crate::region::{DomainId, RegionId};
use crate::rmap::{ItemId, Rmap};
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

#[derive(Debug, Default)]
struct Sharing {
    rmap: Rmap,
    frames: Frames,
    /// Frames to look at again when the window is done: just allotted, or not
    /// to be punched when last tried.
    loose: Vec<FrameId>,
}

/// What the domain's sharing amounts to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shared {
    pub(crate) pages_shared: u64,
    pub(crate) pages_sharing: u64,
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
            sharing.rmap.add_node(frame, fingerprint, digest);
            // From here on a sweep gives the frame back, whatever happens.
            sharing.loose.push(frame);
            frame
        };
        self.store.reserve(FrameRange::one(frame))?;
        self.store.fill(frame, content)?;
        self.sharing.lock().rmap.set_live(frame, true);
        self.stable.insert(fingerprint, digest, frame);
        Ok(frame)
    }

    /// Gives back planned frames that no page came to map.
    pub(crate) fn sweep(&self) {
        let mut sharing = self.sharing.lock();
        for frame in std::mem::take(&mut sharing.loose) {
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
    pub(crate) fn unshare(&self, item: ItemId) {
        let mut sharing = self.sharing.lock();
        let (frame, left) = sharing.rmap.remove(item);
        if left == 0 {
            self.retire(&mut sharing, frame);
        }
    }

    /// The mapping of a page names `frame` no longer.
    pub(crate) fn unname(&self, frame: FrameId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.unname(frame) == 0 {
            Self::free_number(&mut sharing, frame);
        }
    }

    /// A copied page's region is gone, and its mapping still names `frame`.
    pub(crate) fn abandon(&self, frame: FrameId) {
        self.sharing.lock().rmap.abandon(frame);
    }

    /// Undoes a [`Self::reserve`] for a mapping that did not come about, or is
    /// gone with its page.
    pub(crate) fn release(&self, item: ItemId) {
        let frame = self.sharing.lock().rmap.item(item).map(|(frame, ..)| frame);
        self.unshare(item);
        if let Some(frame) = frame {
            self.unname(frame);
        }
    }

    /// Nobody sees the frame any more: gives its memory back, and its number
    /// too unless a copied page still names it.
    fn retire(&self, sharing: &mut Sharing, frame: FrameId) {
        let Some(node) = sharing.rmap.node(frame).copied() else {
            return;
        };
        if node.live {
            self.stable.remove(node.fingerprint, &node.digest);
            sharing.rmap.set_live(frame, false);
        }
        if self.store.punch(FrameRange::one(frame)).is_err() {
            sharing.loose.push(frame);
            return;
        }
        if node.named == 0 {
            Self::free_number(sharing, frame);
        }
    }

    fn free_number(sharing: &mut Sharing, frame: FrameId) {
        let dead = |node: &crate::rmap::StableNode| !node.live && node.named == 0;
        if sharing.rmap.node(frame).is_some_and(dead) && !sharing.loose.contains(&frame) {
            sharing.rmap.remove_node(frame);
            sharing.frames.release(frame);
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
        let live = self.stable.len();
        let trees = (self.stable.bytes() + self.unstable.bytes()) as u64;
        Shared {
            pages_shared: sharing.rmap.pages_shared(),
            pages_sharing: sharing.rmap.pages_sharing(),
            frames_lingering: sharing.frames.taken().saturating_sub(live as u64),
            metadata_bytes: sharing.rmap.bytes() + trees,
        }
    }

    /// Checks that trees, rmap and store agree. `named` says for every frame
    /// how often the regions' records name it and map it as shared.
    pub(crate) fn check(
        &self,
        named: &std::collections::HashMap<FrameId, (u32, u32)>,
    ) -> Result<(), String> {
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
            let found = self.stable.find_exact(node.fingerprint, &node.digest);
            if node.live != (found == Some(frame)) {
                return Err(format!(
                    "{frame}: live is {}, the stable tree says {found:?}",
                    node.live
                ));
            }
            if node.live {
                live += 1;
                self.store
                    .read(frame, &mut buf)
                    .map_err(|error| error.to_string())?;
                if self.keys.digest(&buf) != node.digest {
                    return Err(format!("{frame}: its content is not what was merged"));
                }
            }
            if sharing.frames.is_free(frame.0) {
                return Err(format!("{frame}: has a node, but its number is free"));
            }
        }
        let nodes = sharing.rmap.nodes().count() as u64;
        if nodes != sharing.frames.taken() || live != self.stable.len() {
            return Err(format!(
                "{nodes} nodes, {} numbers taken, {live} live, {} in the tree",
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
