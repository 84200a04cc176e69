//! What guests wrote: a list of contents, which knows nothing of merging.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::page::{PageBuf, PageIndex, PageRange};

/// A page, as its guest knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    /// Never written, or discarded through the engine: reads zero.
    Absent,
    /// Reads zero, and may or may not be a zero page of the engine's making.
    Dropped,
    /// Holds these bytes.
    Written(Arc<PageBuf>),
}

/// One region's pages.
#[derive(Clone, Debug)]
pub(super) struct Oracle(Vec<Cell>);

fn at(page: PageIndex) -> usize {
    usize::try_from(page.0).expect("a page of a guest that is held in memory")
}

impl Oracle {
    pub(super) fn new(pages: u64) -> Self {
        Self(vec![Cell::Absent; at(PageIndex(pages))])
    }

    pub(super) fn range(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.0.len() as u64)
    }

    pub(super) fn cell(&self, page: PageIndex) -> &Cell {
        &self.0[at(page)]
    }

    pub(super) fn set(&mut self, page: PageIndex, cell: Cell) {
        self.0[at(page)] = cell;
    }

    /// The page has bytes of its own now: whatever it read before.
    pub(super) fn materialise(&mut self, page: PageIndex) {
        if !matches!(self.cell(page), Cell::Written(_)) {
            self.set(page, Cell::Written(Arc::from(PageBuf::zeroed())));
        }
    }

    /// Nothing was ever written.
    pub(super) fn clear(&mut self) {
        self.0.fill(Cell::Absent);
    }

    /// Who made zero pages is not known any more.
    pub(super) fn blur_all(&mut self) {
        self.range().iter().for_each(|page| self.blur(page));
    }

    /// The page reads zero, but who made it so is not known any more.
    pub(super) fn blur(&mut self, page: PageIndex) {
        if self.reads(page, &PageBuf::zeroed()) {
            self.set(page, Cell::Dropped);
        }
    }

    /// Whether the page must read as `bytes`.
    pub(super) fn reads(&self, page: PageIndex, bytes: &PageBuf) -> bool {
        match self.cell(page) {
            Cell::Absent | Cell::Dropped => bytes.is_zero(),
            Cell::Written(written) => **written == *bytes,
        }
    }
}

/// What the counters of a domain must come to once it has settled.
#[derive(Debug, Default)]
pub(super) struct Census<'a> {
    /// Mergeable pages that are not all zero, by content.
    contents: HashMap<&'a [u8], u64>,
    /// Zero pages that the engine must have made.
    pub(super) zeros: u64,
    /// Zero pages that it may have made.
    pub(super) perhaps_zeros: u64,
    /// Written pages that cannot be merged for now.
    pub(super) unfit: u64,
    /// Their contents.
    unfit_contents: HashSet<&'a [u8]>,
}

impl<'a> Census<'a> {
    pub(super) fn count(&mut self, cell: &'a Cell, fit: bool) {
        match cell {
            Cell::Absent => {}
            Cell::Dropped => self.perhaps_zeros += 1,
            Cell::Written(bytes) if !fit => {
                self.unfit += 1;
                self.unfit_contents.insert(bytes.bytes());
            }
            Cell::Written(bytes) if bytes.is_zero() => self.zeros += 1,
            Cell::Written(bytes) => *self.contents.entry(bytes.bytes()).or_default() += 1,
        }
    }

    /// How many pages have this content.
    pub(super) fn equals(&self, bytes: &PageBuf) -> u64 {
        let equals = self.contents.get(&bytes.bytes()[..]);
        equals.copied().unwrap_or(0)
    }

    /// Pages whose content is there twice at least.
    pub(super) fn duplicates(&self) -> u64 {
        self.contents.values().filter(|&&pages| pages > 1).sum()
    }

    /// Pages whose content is there once.
    pub(super) fn singles(&self) -> u64 {
        let ones = self.contents.values().filter(|&&pages| pages == 1);
        ones.count() as u64
    }

    /// Those of them whose only equals are unfit: they are matched with those
    /// again and again, in vain.
    pub(super) fn courting(&self) -> u64 {
        let unfit = self.unfit_contents.iter();
        unfit
            .filter(|bytes| self.contents.get(*bytes) == Some(&1))
            .count() as u64
    }
}
