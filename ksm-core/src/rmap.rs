//! Reverse map: which pages map a frame.
//!
//! A frame's stable node heads a list of rmap_items. An item names a page by
//! anon_vma and linear page index, not by address, so that it stays right when
//! the region moves. Clones of a region have no items of their own: their pages
//! are found through the anon_vma, and an item that stands for several pages
//! says for how many. Items live in a slab and are linked by index: 16 bytes each.

use crate::fingerprint::Fingerprint;
use crate::page::{FrameId, FrameRange};
use crate::region::Place;

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
    /// How many pages map it as shared.
    pub(crate) sharers: u32,
    /// How many items it heads, which stand for those pages.
    pub(crate) items: u32,
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
    /// Whether a thread gives its memory back just now.
    pub(crate) punching: bool,
    head: u32,
}

/// The stable nodes and rmap_items of one domain.
#[derive(Debug)]
pub(crate) struct Rmap {
    nodes: Vec<Option<StableNode>>,
    items: Vec<RmapItem>,
    free: u32,
    /// For how many pages beside its first each item stands; short where none of
    /// the last ones stands for more.
    clones: Vec<u32>,
    /// Pages that map a frame as shared.
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
            clones: Vec::new(),
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
            items: 0,
            named: 0,
            abandoned: 0,
            live: false,
            in_block,
            loose: false,
            punching: false,
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

    /// Marks the frame as one whose memory is being given back.
    pub(crate) fn set_punching(&mut self, frame: FrameId, punching: bool) {
        self.node_mut(frame.0).punching = punching;
    }

    /// Forgets a frame that nothing maps or names.
    pub(crate) fn remove_node(&mut self, frame: FrameId) {
        let node = self.nodes[frame.0 as usize].take();
        self.known -= u64::from(node.is_some());
        debug_assert!(node.is_none_or(|node| node.named == 0 && node.sharers == 0));
    }

    /// Adds the page at `place` to those that map and name `frame`. `None` if the
    /// frame is not live, or heads `max_items` already, or 4 billion items exist.
    pub(crate) fn add(&mut self, frame: FrameId, place: Place, max_items: u32) -> Option<ItemId> {
        let node = self.node(frame)?;
        let head = node.head;
        if !node.live || node.items >= max_items {
            return None;
        }
        let item = RmapItem {
            place: Some(place),
            next: head,
            previous: NONE,
        };
        let id = self.take_slot(item)?;
        if head != NONE {
            self.items[head as usize].previous = id;
        }
        let node = self.node_mut(frame.0);
        node.head = id;
        node.items += 1;
        self.count_sharer(frame);
        Some(ItemId(id))
    }

    /// Another page at the place of `item` comes to map and name `frame`: that
    /// of a clone.
    pub(crate) fn add_clone(&mut self, frame: FrameId, item: ItemId) {
        let place = item.0 as usize;
        if self.clones.len() <= place {
            grow(&mut self.clones, place + 1);
            self.clones.resize(place + 1, 0);
        }
        self.clones[place] += 1;
        self.count_sharer(frame);
    }

    fn count_sharer(&mut self, frame: FrameId) {
        let node = self.node_mut(frame.0);
        node.sharers += 1;
        node.named += 1;
        let first = node.sharers == 1;
        self.sharers += 1;
        self.shared += u64::from(first);
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

    /// One page that `item` stands for no longer maps `frame`, which its mapping
    /// still names. Returns how many sharers are left.
    pub(crate) fn remove(&mut self, frame: FrameId, item: ItemId) -> u32 {
        match self.clones.get_mut(item.0 as usize) {
            Some(clones) if *clones > 0 => *clones -= 1,
            _ => self.unlink(frame, item),
        }
        let node = self.node_mut(frame.0);
        node.sharers -= 1;
        let left = node.sharers;
        self.sharers -= 1;
        self.shared -= u64::from(left == 0);
        left
    }

    fn unlink(&mut self, frame: FrameId, item: ItemId) {
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
        self.node_mut(frame.0).items -= 1;
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

    /// The items of `frame`, and the places that they stand for.
    pub(crate) fn items_of(&self, frame: FrameId) -> impl Iterator<Item = (ItemId, Place)> + '_ {
        let head = self.node(frame).map_or(NONE, |node| node.head);
        let item = |id: u32| (id != NONE).then(|| (ItemId(id), &self.items[id as usize]));
        std::iter::successors(item(head), move |(_, current)| item(current.next))
            .filter_map(|(id, item)| Some((id, item.place?)))
    }

    /// For how many pages an item stands.
    pub(crate) fn pages_of(&self, item: ItemId) -> u32 {
        1 + self.clones.get(item.0 as usize).copied().unwrap_or(0)
    }

    /// The frames from `start` on that may have a node, at most `len`.
    pub(crate) fn frames_from(&self, start: FrameId, len: u32) -> FrameRange {
        let behind = self.nodes.len().saturating_sub(start.0 as usize);
        let len = u32::try_from(behind).map_or(len, |behind| behind.min(len));
        FrameRange { start, len }
    }

    /// The first of `frames` that has sharers.
    pub(crate) fn shared_in(&self, frames: FrameRange) -> Option<FrameId> {
        let has_sharers = |frame| self.node(frame).is_some_and(|node| node.sharers > 0);
        frames.iter().find(|&frame| has_sharers(frame))
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
        let clones = self.clones.capacity() * size_of::<u32>();
        (nodes + items + clones) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PageIndex;
    use crate::region::AnonVmaId;

    fn rmap() -> Rmap {
        let mut rmap = Rmap::default();
        rmap.add_node(FrameId(4), Fingerprint(1), false);
        rmap.set_live(FrameId(4), true);
        rmap
    }

    fn place(page: u64) -> Place {
        Place::new(AnonVmaId(1), PageIndex(page))
    }

    fn add(rmap: &mut Rmap, page: u64) -> ItemId {
        rmap.add(FrameId(4), place(page), u32::MAX).unwrap()
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
        let places: Vec<_> = rmap.items_of(FrameId(4)).collect();
        assert_eq!(places, [(items[2], place(3)), (items[0], place(1))]);
        assert_eq!(rmap.remove(FrameId(4), items[2]), 1);
        assert_eq!(rmap.remove(FrameId(4), items[0]), 0);
        assert_eq!((rmap.pages_shared(), rmap.pages_sharing()), (0, 0));
        assert_eq!(rmap.node(FrameId(4)).unwrap().named, 3);
        assert_eq!(rmap.unname(FrameId(4)), 2);
        let again = add(&mut rmap, 9);
        assert_eq!(again, items[0], "a freed item is used again");
    }

    #[test]
    fn shared_frames_are_looked_for_piece_by_piece() {
        let mut rmap = rmap();
        add(&mut rmap, 1);
        rmap.add_node(FrameId(9), Fingerprint(2), false);
        let range = |start, len| FrameRange {
            start: FrameId(start),
            len,
        };
        assert_eq!(rmap.frames_from(FrameId(0), 3), range(0, 3));
        assert_eq!(rmap.frames_from(FrameId(6), 100), range(6, 4));
        assert_eq!(rmap.frames_from(FrameId(10), 3).len, 0);
        assert_eq!(rmap.shared_in(range(0, 4)), None);
        assert_eq!(rmap.shared_in(range(0, 5)), Some(FrameId(4)));
        assert_eq!(rmap.shared_in(range(5, 5)), None, "known, but not shared");
    }

    #[test]
    fn a_frame_that_is_not_live_cannot_be_mapped() {
        let mut rmap = rmap();
        rmap.set_live(FrameId(4), false);
        assert_eq!(rmap.add(FrameId(4), place(1), u32::MAX), None);
        assert_eq!(rmap.add(FrameId(5), place(1), u32::MAX), None);
    }

    #[test]
    fn a_frame_has_no_more_items_than_it_may() {
        let mut rmap = rmap();
        let items = [1, 2].map(|page| add(&mut rmap, page));
        assert_eq!(rmap.add(FrameId(4), place(3), 2), None);
        rmap.remove(FrameId(4), items[0]);
        assert!(rmap.add(FrameId(4), place(3), 2).is_some());
    }

    #[test]
    fn an_item_stays_until_the_last_page_that_it_stands_for_is_gone() {
        let mut rmap = rmap();
        let item = add(&mut rmap, 1);
        rmap.add_clone(FrameId(4), item);
        rmap.add_clone(FrameId(4), item);
        assert_eq!((rmap.pages_shared(), rmap.pages_sharing()), (1, 2));
        assert_eq!(rmap.pages_of(item), 3);
        assert_eq!(rmap.remove(FrameId(4), item), 2);
        assert_eq!(rmap.remove(FrameId(4), item), 1);
        assert_eq!(rmap.items_of(FrameId(4)).count(), 1);
        assert_eq!(rmap.remove(FrameId(4), item), 0);
        assert_eq!(rmap.items_of(FrameId(4)).count(), 0);
        assert_eq!(rmap.node(FrameId(4)).unwrap().named, 3);
    }
}
