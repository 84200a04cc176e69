//! One registered or unregistered piece of guest memory of the model.

use std::sync::Arc;

use super::page::{Below, Hold, Page, SimPageState, Write};
use crate::backend::{Backing, RegionOptions};
use crate::page::{PageBuf, PageIndex, PageRange};

/// A write that waits for its page.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) page: PageIndex,
    pub(super) write: Write,
    /// The storm's vCPU that waits, or somebody else.
    pub(super) vcpu: Option<u32>,
}

/// A piece of guest memory.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) pages: Vec<Page>,
    pub(super) options: Option<RegionOptions>,
    /// No vCPU runs: the storm neither writes, nor reads, nor drops.
    pub(super) paused: bool,
    /// What was discarded last of what mapped frames.
    pub(super) discarded: PageRange,
    /// In how many parts it is attached.
    pub(super) attached: u32,
    /// The one store whose frames it maps.
    pub(super) store: Option<usize>,
    /// In the order in which they came.
    pub(super) waiters: Vec<Waiter>,
    /// What was made of pages while there was a storm, in order; nothing where
    /// they were dropped.
    pub(super) log: Vec<(PageIndex, Option<Arc<PageBuf>>)>,
}

/// A page's place in `Region::pages`.
pub(super) fn at(page: PageIndex) -> usize {
    usize::try_from(page.0).expect("a page of a simulated guest, which fits in memory")
}

impl Region {
    pub(super) fn new(pages: u64) -> Self {
        Self {
            pages: vec![Page::absent(); at(PageIndex(pages))],
            options: None,
            paused: false,
            discarded: PageRange::default(),
            attached: 0,
            store: None,
            waiters: Vec::new(),
            log: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.pages.len() as u64
    }

    pub(super) fn page(&self, page: PageIndex) -> &Page {
        &self.pages[at(page)]
    }

    pub(super) fn page_mut(&mut self, page: PageIndex) -> &mut Page {
        &mut self.pages[at(page)]
    }

    /// The pages of `range`, with their indexes.
    pub(super) fn each(&self, range: PageRange) -> impl Iterator<Item = (PageIndex, &Page)> {
        range.iter().map(|page| (page, self.page(page)))
    }

    /// The first page of `range` that is as `wanted`, and its state.
    pub(super) fn find(
        &self,
        range: PageRange,
        wanted: impl Fn(&Page) -> bool,
    ) -> Option<(PageIndex, SimPageState)> {
        let mut pages = self.each(range);
        let (page, place) = pages.find(|(_, page)| wanted(page))?;
        Some((page, place.state()))
    }

    /// Whether a write to `page` waits: since it is held, or since another
    /// write to it does.
    pub(super) fn write_waits(&self, page: PageIndex) -> bool {
        self.page(page).hold != Hold::Free || self.waiters.iter().any(|waiter| waiter.page == page)
    }

    /// Whether a read of `page` waits.
    pub(super) fn read_waits(&self, page: PageIndex) -> bool {
        matches!(self.page(page).hold, Hold::Out | Hold::Gone)
    }

    /// Takes the writes that wait for pages of `range`.
    pub(super) fn take_waiters(&mut self, range: PageRange) -> Vec<Waiter> {
        let waiters = std::mem::take(&mut self.waiters);
        let (woken, rest) = waiters.into_iter().partition(|w| range.contains(w.page));
        self.waiters = rest;
        woken
    }

    /// How many VMAs begin in `range` or right after it, leaving out the
    /// region's first, if the pages of `range` had `below` beneath them.
    pub(super) fn vma_starts(&self, range: PageRange, below: impl Fn(PageIndex) -> Below) -> u64 {
        let look = |page| match range.contains(page) {
            true => below(page),
            false => self.page(page).below,
        };
        let last = range.end.0.min(self.len() - 1);
        let starts = (range.start.0.max(1)..=last)
            .filter(|&page| !continues(look(PageIndex(page - 1)), look(PageIndex(page))));
        starts.count() as u64
    }
}

/// Whether `page` lies in the VMA of the page before it.
fn continues(before: Below, page: Below) -> bool {
    match (before, page) {
        (None, None) => true,
        (Some((store, frame)), Some((other, next))) => store == other && frame.plus(1) == next,
        _ => false,
    }
}

impl Page {
    pub(super) const fn backing(&self) -> Backing {
        match self.below {
            None => Backing::Own,
            Some(_) => Backing::Frame,
        }
    }
}
