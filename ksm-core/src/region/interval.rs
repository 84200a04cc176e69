//! [`IntervalTree`]: ranges of pages by number, found by what they overlap.
//!
//! An AVL tree ordered by where the ranges begin, each node knowing the furthest
//! end below it (the kernel's `interval_tree_generic.h`). Nodes live in a slab
//! and are linked by index. A lookup of one page among ranges that do not overlap
//! walks one path; others cost what there is to find besides.

use std::ops::ControlFlow;

use crate::page::{PageIndex, PageRange};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node<V> {
    range: PageRange,
    value: V,
    /// The furthest end in the subtree.
    max_end: PageIndex,
    height: u8,
    /// In a free node, the next free one.
    left: u32,
    right: u32,
}

/// Ranges, each with a value that tells it from others with the same range.
#[derive(Debug)]
pub(crate) struct IntervalTree<V> {
    nodes: Vec<Node<V>>,
    root: u32,
    free: u32,
    len: usize,
}

/// What a lookup cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Visits {
    /// Nodes whose range was looked at.
    pub(crate) nodes: u64,
    /// Ranges that overlap.
    pub(crate) intervals: u64,
}

impl<V> Default for IntervalTree<V> {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            root: NONE,
            free: NONE,
            len: 0,
        }
    }
}

impl<V: Copy + Ord> IntervalTree<V> {
    /// How many ranges there are.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The longest path from the root.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn depth(&self) -> u8 {
        self.height(self.root)
    }

    /// Puts a range in.
    ///
    /// # Panics
    /// If it is empty, or 4 billion are in.
    pub(crate) fn insert(&mut self, range: PageRange, value: V) {
        assert!(!range.is_empty(), "an empty range overlaps nothing");
        let node = Node {
            range,
            value,
            max_end: range.end,
            height: 1,
            left: NONE,
            right: NONE,
        };
        let new = self.take_slot(node);
        self.root = self.insert_below(self.root, new);
        self.len += 1;
    }

    /// Takes a range out. Returns whether it was in.
    pub(crate) fn remove(&mut self, range: PageRange, value: V) -> bool {
        let (root, removed) = self.remove_below(self.root, (range.start, value));
        self.root = root;
        if removed == NONE {
            return false;
        }
        debug_assert_eq!(self.node(removed).range, range);
        self.node_mut(removed).left = self.free;
        self.free = removed;
        self.len -= 1;
        true
    }

    /// Shows the ranges that overlap `range` to `visit`, in order, until it
    /// breaks; only those behind `after`, if that is given.
    pub(crate) fn overlapping(
        &self,
        range: PageRange,
        after: Option<(PageIndex, V)>,
        mut visit: impl FnMut(PageRange, V) -> ControlFlow<()>,
    ) -> Visits {
        let mut visits = Visits::default();
        if !range.is_empty() {
            let _ = self.walk(self.root, range, after, &mut visits, &mut visit);
        }
        visits
    }

    fn walk(
        &self,
        at: u32,
        range: PageRange,
        after: Option<(PageIndex, V)>,
        visits: &mut Visits,
        visit: &mut impl FnMut(PageRange, V) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let reaches = |at: u32| at != NONE && self.node(at).max_end > range.start;
        if !reaches(at) {
            return ControlFlow::Continue(());
        }
        let node = self.node(at);
        visits.nodes += 1;
        let is_behind = after.is_none_or(|after| after < key(node));
        if is_behind && reaches(node.left) {
            self.walk(node.left, range, after, visits, visit)?;
        }
        if node.range.start >= range.end {
            return ControlFlow::Continue(());
        }
        if is_behind && node.range.end > range.start {
            visits.intervals += 1;
            visit(node.range, node.value)?;
        }
        self.walk(node.right, range, after, visits, visit)
    }

    fn node(&self, at: u32) -> &Node<V> {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node<V> {
        &mut self.nodes[at as usize]
    }

    fn height(&self, at: u32) -> u8 {
        if at == NONE { 0 } else { self.node(at).height }
    }

    fn take_slot(&mut self, node: Node<V>) -> u32 {
        if self.free != NONE {
            let slot = self.free;
            self.free = self.node(slot).left;
            *self.node_mut(slot) = node;
            return slot;
        }
        let slot = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        assert_ne!(slot, NONE, "too many ranges");
        self.nodes.push(node);
        slot
    }

    /// Hangs the node `new` in below `at`. Returns what stands there then.
    fn insert_below(&mut self, at: u32, new: u32) -> u32 {
        if at == NONE {
            return new;
        }
        if key(self.node(new)) < key(self.node(at)) {
            self.node_mut(at).left = self.insert_below(self.node(at).left, new);
        } else {
            self.node_mut(at).right = self.insert_below(self.node(at).right, new);
        }
        self.balance(at)
    }

    /// Unhangs the node of that key. Returns what stands at `at` then, and the
    /// node.
    fn remove_below(&mut self, at: u32, wanted: (PageIndex, V)) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        let Node { left, right, .. } = *self.node(at);
        let removed = match wanted.cmp(&key(self.node(at))) {
            std::cmp::Ordering::Less => {
                let (left, removed) = self.remove_below(left, wanted);
                self.node_mut(at).left = left;
                removed
            }
            std::cmp::Ordering::Greater => {
                let (right, removed) = self.remove_below(right, wanted);
                self.node_mut(at).right = right;
                removed
            }
            std::cmp::Ordering::Equal if right == NONE => return (left, at),
            std::cmp::Ordering::Equal => {
                let (right, heir) = self.take_first(right);
                self.node_mut(heir).left = left;
                self.node_mut(heir).right = right;
                return (self.balance(heir), at);
            }
        };
        (self.balance(at), removed)
    }

    /// Unhangs the first node below `at`. Returns what stands there then, and
    /// the node.
    fn take_first(&mut self, at: u32) -> (u32, u32) {
        let Node { left, right, .. } = *self.node(at);
        if left == NONE {
            return (right, at);
        }
        let (left, first) = self.take_first(left);
        self.node_mut(at).left = left;
        (self.balance(at), first)
    }

    /// Brings a node up to date whose subtrees differ in height by two at most,
    /// and turns it so that they differ by one at most.
    fn balance(&mut self, at: u32) -> u32 {
        let Node { left, right, .. } = *self.node(at);
        if self.height(left) > self.height(right) + 1 {
            let Node {
                left: outer,
                right: inner,
                ..
            } = *self.node(left);
            if self.height(inner) > self.height(outer) {
                self.node_mut(at).left = self.turn_left(left);
            }
            return self.turn_right(at);
        }
        if self.height(right) > self.height(left) + 1 {
            let Node {
                left: inner,
                right: outer,
                ..
            } = *self.node(right);
            if self.height(inner) > self.height(outer) {
                self.node_mut(at).right = self.turn_right(right);
            }
            return self.turn_left(at);
        }
        self.update(at);
        at
    }

    fn turn_left(&mut self, at: u32) -> u32 {
        let top = self.node(at).right;
        self.node_mut(at).right = self.node(top).left;
        self.node_mut(top).left = at;
        self.update(at);
        self.update(top);
        top
    }

    fn turn_right(&mut self, at: u32) -> u32 {
        let top = self.node(at).left;
        self.node_mut(at).left = self.node(top).right;
        self.node_mut(top).right = at;
        self.update(at);
        self.update(top);
        top
    }

    fn update(&mut self, at: u32) {
        let Node {
            range, left, right, ..
        } = *self.node(at);
        let ends = [left, right].into_iter().filter(|&child| child != NONE);
        let max_end = ends.map(|child| self.node(child).max_end).max();
        let height = 1 + self.height(left).max(self.height(right));
        let node = self.node_mut(at);
        node.max_end = range.end.max(max_end.unwrap_or(range.end));
        node.height = height;
    }

    /// Checks order, heights, and furthest ends.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (count, _) = self.check_below(self.root)?;
        if count == self.len {
            return Ok(());
        }
        Err(format!("{count} ranges, counted {}", self.len))
    }

    fn check_below(&self, at: u32) -> Result<(usize, PageIndex), String> {
        if at == NONE {
            return Ok((0, PageIndex(0)));
        }
        let node = self.node(at);
        let (left, left_end) = self.check_below(node.left)?;
        let (right, right_end) = self.check_below(node.right)?;
        let in_order = (node.left == NONE || key(self.node(node.left)) < key(node))
            && (node.right == NONE || key(node) < key(self.node(node.right)));
        let (high, low) = (self.height(node.left), self.height(node.right));
        let sound = in_order
            && high.abs_diff(low) <= 1
            && node.height == 1 + high.max(low)
            && node.max_end == node.range.end.max(left_end).max(right_end);
        if !sound {
            return Err(format!("the node of {} is not sound", node.range));
        }
        Ok((left + right + 1, node.max_end))
    }
}

fn key<V: Copy>(node: &Node<V>) -> (PageIndex, V) {
    (node.range.start, node.value)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIndex(start), len)
    }

    #[cfg(any(test, feature = "internals"))]
    proptest::proptest! {
        /// Against a sorted map, after each step.
        #[test]
        fn it_finds_what_a_map_finds(
            ops in proptest::collection::vec(
                proptest::prelude::any::<[u8; crate::internals::trees::BYTES_PER_OP]>(),
                1..400,
            )
        ) {
            use crate::internals::trees;
            let ops = trees::decode(&ops.concat());
            proptest::prop_assert_eq!(trees::intervals(&ops), Ok(()));
        }
    }

    /// The case that an imprecise walk took 228 ms for.
    #[test]
    fn one_page_of_many_ranges_costs_one_path() {
        let mut tree = IntervalTree::default();
        for number in 0..22_169_u32 {
            tree.insert(range(u64::from(number) * 3, 2), number);
        }
        assert_eq!(tree.len(), 22_169);
        for number in [0_u32, 1, 11_000, 22_168] {
            let within = range(u64::from(number) * 3 + 1, 1);
            let visits = tree.overlapping(within, None, |_, value| {
                assert_eq!(value, number);
                ControlFlow::Continue(())
            });
            assert_eq!(visits.intervals, 1);
            assert!(visits.nodes <= u64::from(tree.depth()), "{visits:?}");
        }
        assert!(tree.depth() <= 21, "{}", tree.depth());
    }
}
