//! A trust domain: which content has which frame. Nothing here knows where
//! guests keep their pages; nothing is shared between two domains.

mod blocks;
mod check;
mod plan;
mod seal;
mod unseen;

pub(crate) use plan::Plan;

use crate::backend::Backend;
use crate::fingerprint::{Digest, Fingerprint, Keys};
use crate::page::FrameId;
use crate::region::{AnonVmas, DomainId, Place, WalkCost};
use crate::rmap::ItemId;
use crate::sharing::Sharing;
use crate::stable::{Found, StableTree};
use crate::sync::{Mutex, current};
use crate::unstable::UnstableTree;

/// Frames that are looked at under one hold of the lock.
const LOOKED_AT_AT_ONCE: u32 = 4096;

/// One domain's secrets, trees, frames and reverse map.
#[derive(Debug)]
pub(crate) struct Domain<B: Backend> {
    pub(crate) id: DomainId,
    pub(crate) keys: Keys,
    pub(crate) store: B::Store,
    pub(crate) stable: StableTree,
    pub(crate) unstable: UnstableTree,
    pub(crate) anon_vmas: AnonVmas,
    sharing: Mutex<Sharing>,
    walks: Mutex<Walks>,
}

/// What walks over the reverse map have cost.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Walks {
    pub(crate) walks: u64,
    pub(crate) cost: WalkCost,
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
            anon_vmas: AnonVmas::default(),
            sharing: Mutex::default(),
            walks: Mutex::default(),
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

    /// A plan: see [`Plan`].
    pub(crate) fn plan(&self) -> Plan<'_, B> {
        Plan {
            domain: self,
            planner: Some(current().id()),
        }
    }

    /// A merged page is out of our hands for good: its frame stays, and so does its
    /// mapping of it.
    pub(crate) fn forsake(&self, frame: FrameId) {
        let mut sharing = self.sharing.lock();
        sharing.rmap.abandon(frame);
        *sharing.forsaken.entry(frame).or_default() += 1;
    }

    /// Counts the page at `place` among those that map and name `frame`, ahead
    /// of the mapping, so that the frame cannot go away meanwhile. `None` if it
    /// has gone, or heads `max_items` already.
    /// Where other regions have pages at `place` (it `has_clones`), one item stands
    /// for all that map the frame.
    pub(crate) fn reserve(
        &self,
        frame: FrameId,
        place: Place,
        max_items: u32,
        has_clones: bool,
    ) -> Option<ItemId> {
        let rmap = &mut self.sharing.lock().rmap;
        if has_clones && rmap.node(frame).is_some_and(|node| node.live) {
            let mut items = rmap.items_of(frame);
            let same = items
                .find(|(_, other)| *other == place)
                .map(|(item, _)| item);
            drop(items);
            if let Some(item) = same {
                rmap.add_clone(frame, item);
                return Some(item);
            }
        }
        rmap.add(frame, place, max_items)
    }

    /// The items of `frame`, as they are now. No more than
    /// [`Config::max_page_sharing`](crate::Config::max_page_sharing).
    pub(crate) fn items_of(&self, frame: FrameId) -> Vec<(ItemId, Place)> {
        self.sharing.lock().rmap.items_of(frame).collect()
    }

    /// The same for pages of a clone, at the places of `items`, which are of the
    /// frames from `first` on.
    pub(crate) fn add_clones(&self, first: FrameId, items: &[ItemId]) {
        let mut sharing = self.sharing.lock();
        for (frame, &item) in (first.0..).map(FrameId).zip(items) {
            sharing.rmap.add_clone(frame, item);
        }
    }

    /// The mapping of a page names `frame` no longer.
    pub(crate) fn unname(&self, frame: FrameId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.unname(frame) == 0 {
            sharing.free_number(frame);
        }
    }

    /// A page's region is gone, and its mapping still names `frame`: one that was
    /// copied, or of that `item`. Frames that nobody sees any more are left to the
    /// next [sweep](Self::sweep).
    pub(crate) fn abandon(&self, frame: FrameId, item: Option<ItemId>) {
        let mut sharing = self.sharing.lock();
        sharing.rmap.abandon(frame);
        if item.is_some_and(|item| sharing.rmap.remove(frame, item) == 0) {
            sharing.make_loose(frame, None);
        }
    }

    /// Undoes a [`Self::reserve`] for a mapping that did not come about, or is
    /// gone with its page. A frame that nobody sees any more is left to the next
    /// [sweep](Self::sweep), as other pages may be about to map it: so this asks nothing of
    /// the host, and may be called with pages stopped.
    pub(crate) fn release(&self, frame: FrameId, item: ItemId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.remove(frame, item) == 0 {
            sharing.make_loose(frame, None);
        }
        if sharing.rmap.unname(frame) == 0 {
            sharing.free_number(frame);
        }
    }

    /// The first frame from `frame` on that pages share. However far it is, the lock
    /// is held for short only.
    pub(crate) fn shared_from(&self, mut frame: FrameId) -> Option<FrameId> {
        loop {
            let sharing = self.sharing.lock();
            let some = sharing.rmap.frames_from(frame, LOOKED_AT_AT_ONCE);
            let found = sharing.rmap.shared_in(some);
            if found.is_some() || some.len == 0 {
                return found;
            }
            frame = frame.plus(some.len);
        }
    }

    pub(crate) fn note_walk(&self, cost: WalkCost) {
        let mut walks = self.walks.lock();
        walks.walks += 1;
        walks.cost.add(cost);
    }

    pub(crate) fn walks(&self) -> Walks {
        *self.walks.lock()
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
}
