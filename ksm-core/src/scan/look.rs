//! What the page map says of a window, and the records with it.

use super::{Sight, Window};
use crate::backend::{Backend, PageRun, PageState};
use crate::outcome::Outcome;
use crate::page::PageIndex;
use crate::region::{Class, Record};

impl<B: Backend> Window<'_, '_, B> {
    /// Forgets pages that were populated once and are holes now (the kernel:
    /// `remove_trailing_rmap_items`). A merged page that nobody has touched since
    /// is a hole too, and so is a zero page: those stay.
    pub(super) fn forget_absent(&self, sight: &Sight) {
        let mut runs = sight.runs.iter().map(|run| run.range).peekable();
        // The records there may be many more than the populated pages.
        self.region.by_holds(sight.range, |pages, part| {
            let mut gone = Vec::new();
            for (page, record) in pages.seen(part) {
                while runs.next_if(|run| run.end <= page).is_some() {}
                let populated = runs.peek().is_some_and(|run| run.contains(page));
                if !populated && record.frame.is_none() && record.class != Class::Zero {
                    gone.push(page);
                }
            }
            for page in gone {
                pages.set(page, Record::UNSEEN);
            }
        });
    }

    /// Brings the records up to date with the page map. Returns the pages that
    /// are worth reading.
    pub(super) fn look(&mut self, runs: &[PageRun]) -> Vec<PageIndex> {
        let mut candidates = Vec::new();
        for run in runs {
            self.findings.scanned += run.range.len();
            let mut rest = run.range;
            while let Some(page) = rest.iter().next() {
                if run.state == PageState::File {
                    // Most pages, once all is merged: there is nothing to note.
                    let merged = self.region.pages().merged_from(rest);
                    self.findings.outcomes[Outcome::Unchanged] += merged;
                    rest.start = page.plus(merged);
                    if merged > 0 {
                        continue;
                    }
                }
                rest.start = page.plus(1);
                match self.look_at(page, run.state) {
                    Some(outcome) => self.done(page, outcome),
                    None => candidates.push(page),
                }
            }
        }
        candidates
    }

    /// What became of a page that is not to be read; `None` if it is.
    fn look_at(&self, page: PageIndex, state: PageState) -> Option<Outcome> {
        let record = self.region.pages().get(page);
        let own_bytes = match state {
            PageState::Private | PageState::Swapped => true,
            PageState::File => record.frame.is_none(),
            PageState::Zero => false,
        };
        match record.class {
            Class::Merged(_) if own_bytes => self.guard.note_cow_break(page),
            Class::Zero if own_bytes => self.region.pages().update(page, |record| {
                record.class = Class::Volatile;
                record.fingerprint = None;
            }),
            // It was dropped, and read since.
            Class::Volatile | Class::Unshared
                if state == PageState::Zero && record.frame.is_none() =>
            {
                self.region.pages().set(page, Record::UNSEEN);
            }
            _ => {}
        }
        match state {
            PageState::File if record.frame.is_some() => Some(Outcome::Unchanged),
            PageState::Zero => Some(Outcome::Unchanged),
            _ if self.pinned.contains(page) => Some(Outcome::Pinned),
            PageState::Swapped => Some(Outcome::Swapped),
            PageState::Private | PageState::File => {
                let guarded = self.region.options.dma_guarded;
                (record.frame.is_some() && !guarded).then_some(Outcome::CopiedUnguarded)
            }
        }
    }
}
