//! [`Anchors`]: how fresh memory becomes one mapping with the guest's own.
//!
//! The kernel makes neighbouring anonymous mappings one only if the numbers of
//! their pages go on from one to the other, and if both hang on one `anon_vma`. Pages
//! are numbered by the address at which their mapping was made, and keep that when
//! they are moved: so what is filled elsewhere and moved into place stays a mapping
//! of its own for ever.
//!
//! But what was moved *away* from the guest's mapping keeps its numbers as well, and
//! a mapping that grows is numbered on. So an **anchor** is taken from each mapping
//! when it is registered: address space without a page, numbered as the mapping's
//! first pages. A copy of it, grown and cut, is numbered as any pages behind them.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::mm::Advice;

use super::RETRY_PAUSE;
use super::caps::Host;
use super::mapping::{self, Scratch};
use super::memory::LinuxMemory;
use super::span::Span;
use super::staging::copy_page;
use super::uffd::Mode;
use crate::page::{PageBuf, PageRange};

/// Anchors cost a mapping each: a region of more mappings than these has none.
const MAX_ANCHORS: usize = 16;

/// Pages of an anchor. One is copied; were it the only one, the kernel would cut
/// the anchor from its `anon_vma`.
const ANCHOR_PAGES: u64 = 2;

/// An anchor for each of a region's parts, or none at all.
#[derive(Debug, Default)]
pub(super) struct Anchors {
    of_parts: Vec<Anchor>,
    /// The last copy could not be made, for want of mappings or address space.
    broken: AtomicBool,
}

impl Anchors {
    /// Whether what is moved into place becomes one with its neighbours. Where it
    /// did not the last time, this tries anew.
    pub(super) fn hold(&self) -> bool {
        if self.broken.load(Ordering::Relaxed) {
            let far = |anchor: &Anchor| anchor.copy(anchor.pages - 1, 1).is_ok();
            let hold = self.of_parts.iter().all(far);
            self.broken.store(!hold, Ordering::Relaxed);
            return hold;
        }
        !self.of_parts.is_empty()
    }
}

/// Address space without a page, numbered as the first pages of a mapping.
#[derive(Debug)]
struct Anchor {
    span: Span,
    /// Pages of the mapping.
    pages: u64,
}

impl Drop for Anchor {
    fn drop(&mut self) {
        mapping::unmap(self.span);
    }
}

impl Anchor {
    /// Takes an anchor from the mapping of `part`, all of which waits for absent
    /// pages: whoever touches the first page meanwhile waits as well. The part's
    /// bytes are the same afterwards.
    fn take(host: &Host, part: Span, absent: bool) -> Result<Self, Errno> {
        let page = part.part(0, 1);
        // Before its first page a mapping may have no `anon_vma`.
        match host.uffd.zero_page(page) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let away = mapping::move_pages_away(page)?;
        if absent && is_zero(away) {
            let _ = mapping::drop_pages(away);
        }
        let grown = mapping::grow(away, ANCHOR_PAGES);
        // What is moved into place is not one with its neighbours at once: Linux
        // 6.16 to 6.18.5 may make it one with a mapping that has no page yet, and
        // then lose its `anon_vma`. An advice does that right.
        let _ = mapping::advise(grown.unwrap_or(away), Advice::LinuxDoFork);
        move_back(host, grown.map_or(away, |grown| grown.part(0, 1)), page);
        if grown.is_err() {
            mapping::unmap(away);
        }
        let pages = part.pages();
        grown.map(|span| Self { span, pages })
    }

    /// Memory of zeros, numbered as the `pages` pages of the mapping from its
    /// `nth` on.
    fn copy(&self, nth: u64, pages: u64) -> Result<Scratch, Errno> {
        let copy = Scratch::of(mapping::move_pages_away(self.span.part(0, 1))?);
        let grown = mapping::grow(copy.span(), nth + pages)?;
        std::mem::forget(copy); // It has grown.
        if nth > 0 {
            mapping::unmap(grown.part(0, nth));
        }
        Ok(Scratch::of(grown.part(nth, pages)))
    }
}

fn is_zero(page: Span) -> bool {
    let mut buf = PageBuf::zeroed();
    copy_page(page, &mut buf);
    buf.is_zero()
}

/// Moves the page in `from` back to `page`. Does not give up: it is the guest's.
fn move_back(host: &Host, from: Span, page: Span) {
    while mapping::move_pages_over(from, page).is_err() {
        // It may have unmapped its target (design fact 11).
        let copied = mapping::is_mapped(page)
            && matches!(host.uffd.copy_page(page, from), Ok(()) | Err(Errno::EXIST));
        if copied {
            // What is copied from the anchor later is to be zero.
            let _ = mapping::drop_pages(from);
            return;
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

impl LinuxMemory {
    /// Takes an anchor from each part, where copies may be put in place of frames.
    /// Merging does not need them.
    pub(super) fn drop_anchors(&self) -> Anchors {
        // What is copied from a mapping of a file is no memory of zeros.
        let of_file = self.parts.iter().any(|part| part.of_file);
        let wanted = self.options.dma_guarded && !of_file;
        if !wanted || self.parts.len() > MAX_ANCHORS {
            return Anchors::default();
        }
        let of_parts = self.parts.iter().map(|part| self.take_anchor(part.range));
        let of_parts: Result<_, _> = of_parts.collect();
        Anchors {
            of_parts: of_parts.unwrap_or_default(),
            broken: AtomicBool::new(false),
        }
    }

    fn take_anchor(&self, range: PageRange) -> Result<Anchor, Errno> {
        let part = self.span_of(range);
        let page = part.part(0, 1);
        let (mut absent, mut huge) = (true, false);
        self.host.pagemap.populated(page, 1, |run| {
            (absent, huge) = (false, run.is.huge());
        })?;
        if huge && !self.by_move {
            // This would split it. Moving does so with every part that it merges;
            // but where pages are protected, huge ones stay whole.
            return Err(Errno::NOTSUP);
        }
        let uffd = &self.host.uffd;
        let registered = uffd.register(part, Mode::Both);
        let anchor = registered.and_then(|()| Anchor::take(&self.host, part, absent));
        let _ = mapping::advise(page, Advice::LinuxDontFork);
        // This wakes whoever waits, too. To register it with less is not enough:
        // the kernel takes nothing away then.
        self.release(range);
        if !self.by_move {
            let _ = uffd.register(part, Mode::WriteProtect);
        }
        uffd.wake(part);
        anchor
    }

    /// Memory of zeros that becomes one mapping with the guest's own once it is
    /// moved over `range` and carries what that must. `None` if it cannot.
    pub(super) fn anchored(&self, range: PageRange) -> Option<Scratch> {
        let parts = self.parts.iter().zip(&self.anchors.of_parts);
        let mut parts = parts.filter(|(part, _)| part.range.intersection(range) == range);
        let (part, anchor) = parts.next()?;
        let copy = anchor.copy(range.start.0 - part.range.start.0, range.len());
        self.anchors.broken.store(copy.is_err(), Ordering::Relaxed);
        copy.ok()
    }
}
