//! Reverse map: which pages map a frame.
//!
//! A frame's stable node heads a list of rmap_items, one for each page that
//! maps it as shared. An item names its page by region and linear page index,
//! not by address, so that it stays right when the region moves. Items live in
//! a slab and are linked by index: 16 bytes each.

use crate::fingerprint::Fingerprint;
use crate::page::{FrameId, PageIndex};
use crate::region::{Place, RegionId};

/// An rmap_item's number. Below 0xff00_0000, so that a page's record can hold
/// it beside other tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ItemId(pub(crate) u32);

const NONE: u32 = u32::MAX;
const ITEM_LIMIT: usize = 0xff00_0000;

#[derive(Clone, Copy, Debug)]
struct RmapItem {
    /// `None` in a free item.
    place: Option<Place>,
    /// In a free item, the next free one.
    next: u32,
    previous: u32,
}

/// Makes room for `len` entries, an eighth more if that needs memory: records
/// are to stay small beside what they save, and doubling would waste half.
fn grow<T>(slab: &mut Vec<T>, len: usize) {
    if slab.capacity() < len {
        slab.reserve_exact(len + len / 8 + 64 - slab.len());
    }
}

/// What is known of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StableNode {
    pub(crate) fingerprint: Fingerprint,
    /// How many items it heads.
    pub(crate) sharers: u32,
    /// How many pages' mappings name it: its sharers, and pages copied since.
    pub(crate) named: u32,
    /// How many of those mappings belong to regions that are gone, so that the
    /// frame's number is never free again.
    pub(crate) abandoned: u32,
    /// Whether its memory is filled and pages may come to map it.
    pub(crate) live: bool,
    /// Whether it is one of a block of frames of equal content.
    pub(crate) in_block: bool,
    /// Whether it is to be looked at again when the window is done.
    pub(crate) loose: bool,
    head: u32,
}

/// The stable nodes and rmap_items of one domain.
#[derive(Debug)]
pub(crate) struct Rmap {
    nodes: Vec<Option<StableNode>>,
    items: Vec<RmapItem>,
    free: u32,
    /// Items in use.
    sharers: u64,
    /// Nodes with at least one.
    shared: u64,
    /// Nodes that are live.
    live: u64,
    /// Nodes in all.
    known: u64,
}

impl Default for Rmap {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            items: Vec::new(),
            free: NONE,
            sharers: 0,
            shared: 0,
            live: 0,
            known: 0,
        }
    }
}

impl Rmap {
    /// A node for a frame that was just allotted, not live yet.
    pub(crate) fn add_node(&mut self, frame: FrameId, fingerprint: Fingerprint, in_block: bool) {
        let place = frame.0 as usize;
        if self.nodes.len() <= place {
            grow(&mut self.nodes, place + 1);
            self.nodes.resize(place + 1, None);
        }
        debug_assert!(self.nodes[place].is_none());
        self.known += 1;
        self.nodes[place] = Some(StableNode {
            fingerprint,
            sharers: 0,
            named: 0,
            abandoned: 0,
            live: false,
            in_block,
            loose: false,
            head: NONE,
        });
    }

    pub(crate) fn node(&self, frame: FrameId) -> Option<&StableNode> {
        self.nodes.get(frame.0 as usize)?.as_ref()
    }

    fn node_mut(&mut self, frame: u32) -> &mut StableNode {
        self.nodes[frame as usize]
            .as_mut()
            .expect("an item or a record names only frames that have a node")
    }

    /// Whether pages may come to map the frame.
    pub(crate) fn set_live(&mut self, frame: FrameId, live: bool) {
        let was = std::mem::replace(&mut self.node_mut(frame.0).live, live);
        self.live = self.live + u64::from(live) - u64::from(was);
    }

    /// Marks the frame to be looked at again. Returns whether it was.
    pub(crate) fn set_loose(&mut self, frame: FrameId, loose: bool) -> bool {
        std::mem::replace(&mut self.node_mut(frame.0).loose, loose)
    }

    /// Forgets a frame that nothing maps or names.
    pub(crate) fn remove_node(&mut self, frame: FrameId) {
        let node = self.nodes[frame.0 as usize].take();
        self.known -= u64::from(node.is_some());
        debug_assert!(node.is_none_or(|node| node.named == 0 && node.sharers == 0));
    }

    /// Adds `page` to those that map and name `frame`. `None` if the frame is
    /// not live, or 4 billion items exist.
    pub(crate) fn add(
        &mut self,
        frame: FrameId,
        region: RegionId,
        page: PageIndex,
    ) -> Option<ItemId> {
        let head = self.node(frame).filter(|node| node.live)?.head;
        let item = RmapItem {
            place: Some(Place::new(region, page)),
            next: head,
            previous: NONE,
        };
        let id = self.take_slot(item)?;
        if head != NONE {
            self.items[head as usize].previous = id;
        }
        let node = self.node_mut(frame.0);
        node.head = id;
        node.sharers += 1;
        node.named += 1;
        let first = node.sharers == 1;
        self.sharers += 1;
        self.shared += u64::from(first);
        Some(ItemId(id))
    }

    fn take_slot(&mut self, item: RmapItem) -> Option<u32> {
        if self.free != NONE {
            let id = self.free;
            self.free = self.items[id as usize].next;
            self.items[id as usize] = item;
            return Some(id);
        }
        if self.items.len() >= ITEM_LIMIT {
            return None;
        }
        let len = self.items.len() + 1;
        grow(&mut self.items, len);
        self.items.push(item);
        u32::try_from(self.items.len() - 1).ok()
    }

    /// Takes a page off the list of `frame`, which its mapping still names.
    /// Returns how many sharers are left.
    pub(crate) fn remove(&mut self, frame: FrameId, item: ItemId) -> u32 {
        let RmapItem {
            place,
            next,
            previous,
        } = self.items[item.0 as usize];
        assert!(place.is_some(), "an rmap_item was freed twice");
        if next != NONE {
            self.items[next as usize].previous = previous;
        }
        if previous == NONE {
            let node = self.node_mut(frame.0);
            debug_assert_eq!(node.head, item.0, "the item is of another frame");
            node.head = next;
        } else {
            self.items[previous as usize].next = next;
        }
        self.items[item.0 as usize].place = None;
        self.items[item.0 as usize].next = self.free;
        self.free = item.0;
        let node = self.node_mut(frame.0);
        node.sharers -= 1;
        let left = node.sharers;
        self.sharers -= 1;
        self.shared -= u64::from(left == 0);
        left
    }

    /// One page's mapping no longer names the frame. Returns how many still do.
    pub(crate) fn unname(&mut self, frame: FrameId) -> u32 {
        let node = self.node_mut(frame.0);
        node.named -= 1;
        debug_assert!(node.named >= node.sharers);
        node.named
    }

    /// One copied page goes out of sight, its mapping still naming the frame.
    pub(crate) fn abandon(&mut self, frame: FrameId) {
        self.node_mut(frame.0).abandoned += 1;
    }

    /// The pages that map `frame` as shared.
    pub(crate) fn sharers_of(
        &self,
        frame: FrameId,
    ) -> impl Iterator<Item = (RegionId, PageIndex)> + '_ {
        let head = self.node(frame).map_or(NONE, |node| node.head);
        let item = |id: u32| (id != NONE).then(|| &self.items[id as usize]);
        std::iter::successors(item(head), move |current| item(current.next))
            .filter_map(|item| item.place.map(Place::parts))
    }

    /// Frames with at least one sharer: `pages_shared`.
    pub(crate) const fn pages_shared(&self) -> u64 {
        self.shared
    }

    /// Sharers beyond the first of each frame: `pages_sharing`.
    pub(crate) const fn pages_sharing(&self) -> u64 {
        self.sharers - self.shared
    }

    /// Frames that have a node.
    pub(crate) const fn known(&self) -> u64 {
        self.known
    }

    /// Frames that pages map or may come to map.
    pub(crate) const fn live(&self) -> u64 {
        self.live
    }

    /// Frames that have a node, with it.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (FrameId, &StableNode)> + '_ {
        (0..)
            .map(FrameId)
            .zip(&self.nodes)
            .filter_map(|(frame, node)| Some((frame, node.as_ref()?)))
    }

    pub(crate) fn bytes(&self) -> u64 {
        let nodes = self.nodes.capacity() * size_of::<Option<StableNode>>();
        let items = self.items.capacity() * size_of::<RmapItem>();
        (nodes + items) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rmap() -> Rmap {
        let mut rmap = Rmap::default();
        rmap.add_node(FrameId(4), Fingerprint(1), false);
        rmap.set_live(FrameId(4), true);
        rmap
    }

    fn add(rmap: &mut Rmap, page: u64) -> ItemId {
        rmap.add(FrameId(4), RegionId(1), PageIndex(page)).unwrap()
    }

    #[test]
    fn records_are_small() {
        assert_eq!(size_of::<RmapItem>(), 16);
        assert_eq!(size_of::<Option<StableNode>>(), 32);
    }

    #[test]
    fn items_come_and_go_in_any_order() {
        let mut rmap = rmap();
        let items = [1, 2, 3].map(|page| add(&mut rmap, page));
        assert_eq!((rmap.pages_shared(), rmap.pages_sharing()), (1, 2));
        assert_eq!(rmap.remove(FrameId(4), items[1]), 2);
        let pages: Vec<_> = rmap
            .sharers_of(FrameId(4))
            .map(|(_, page)| page.0)
            .collect();
        assert_eq!(pages, [3, 1]);
        assert_eq!(rmap.remove(FrameId(4), items[2]), 1);
        assert_eq!(rmap.remove(FrameId(4), items[0]), 0);
        assert_eq!((rmap.pages_shared(), rmap.pages_sharing()), (0, 0));
        assert_eq!(rmap.node(FrameId(4)).unwrap().named, 3);
        assert_eq!(rmap.unname(FrameId(4)), 2);
        let again = add(&mut rmap, 9);
        assert_eq!(again, items[0], "a freed item is used again");
    }

    #[test]
    fn a_frame_that_is_not_live_cannot_be_mapped() {
        let mut rmap = rmap();
        rmap.set_live(FrameId(4), false);
        assert_eq!(rmap.add(FrameId(4), RegionId(1), PageIndex(1)), None);
        assert_eq!(rmap.add(FrameId(5), RegionId(1), PageIndex(1)), None);
    }
}
