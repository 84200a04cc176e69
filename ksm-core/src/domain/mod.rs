//! A trust domain: which content has which frame. Nothing here knows where
//! guests keep their pages; nothing is shared between two domains.

mod blocks;
mod check;
mod plan;

pub(crate) use plan::Plan;

use crate::backend::{Backend, FrameStore};
use crate::fingerprint::{Digest, Fingerprint, Keys};
use crate::frames::Planner;
use crate::page::{FrameId, FrameRange};
use crate::region::{AnonVmas, DomainId, Place, WalkCost};
use crate::rmap::{ItemId, StableNode};
use crate::sharing::Sharing;
use crate::stable::{Found, StableTree};
use crate::sync::{Mutex, ThreadId, current};
use crate::unstable::UnstableTree;

/// Frames that are given back under one hold of the lock.
const SWEPT_AT_ONCE: usize = 32;

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

    /// Gives back frames that nobody planned and no page maps.
    pub(crate) fn sweep(&self) {
        self.give_back(|planner| planner.is_none());
    }

    /// Gives back what a thread planned that is gone for good.
    pub(crate) fn sweep_after(&self, dead: ThreadId) {
        self.sharing.lock().frames.leave_plot(Some(dead));
        self.give_back(|planner| planner.is_none() || planner == Some(dead));
    }

    fn give_back(&self, is_mine: impl Fn(Planner) -> bool) {
        let loose = self.sharing.lock().take_loose(is_mine);
        // Whoever has stopped pages may want the lock: it is not held for long.
        for some in loose.chunks(SWEPT_AT_ONCE) {
            let mut sharing = self.sharing.lock();
            for &frame in some {
                let node = sharing.rmap.node(frame);
                if node.is_some_and(|node| node.sharers == 0 && !node.loose) {
                    self.retire(&mut sharing, frame);
                }
            }
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
            sharing.make_loose(frame, None);
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
                Err(_) => sharing.make_loose(frame, None),
            }
        }
    }

    /// Takes care that nobody comes to map the frame any more.
    fn bury(&self, sharing: &mut Sharing, frame: FrameId, node: &StableNode) {
        sharing.rmap.set_live(frame, false);
        if let Some(digest) = self.stable.digest_of(node.fingerprint, frame) {
            self.stable.remove(node.fingerprint, &digest);
            if let Some(heir) = sharing.heir(node) {
                self.stable.insert(node.fingerprint, digest, heir);
            }
        }
    }

    /// The first frame from `frame` on that pages share.
    pub(crate) fn shared_from(&self, frame: FrameId) -> Option<FrameId> {
        self.sharing.lock().rmap.shared_from(frame)
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
