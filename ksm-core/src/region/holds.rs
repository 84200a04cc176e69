//! Going through many records of a region: their mutex is held for some of them at a
//! time, so that whoever needs it waits for no more than that.

use super::{PageTable, Region};
use crate::backend::Backend;
use crate::page::PageRange;

/// Chunks of records that are gone through under one hold: 4096 pages.
const HOLD_CHUNKS: usize = 8;

impl<B: Backend> Region<B> {
    /// The stretches of `range` whose pages stand over frames, in order. The
    /// records are held for short only, however many there are: what nobody's lease
    /// holds still may change in between.
    pub(crate) fn frame_runs(&self, range: PageRange) -> Vec<PageRange> {
        let mut runs = Vec::new();
        self.by_holds(range, |pages, part| pages.frame_runs(part, &mut runs));
        runs
    }

    /// Forgets the pages of `range`, the records held for short only.
    pub(crate) fn forget(&self, range: PageRange) {
        self.by_holds(range, PageTable::forget);
    }

    /// Shows the records of `range` part by part, in order, each under a hold of its
    /// own. To take another lock in `each` is to let others wait for that one, too.
    pub(crate) fn by_holds(
        &self,
        range: PageRange,
        mut each: impl FnMut(&mut PageTable, PageRange),
    ) {
        let mut rest = range;
        while !rest.is_empty() {
            let mut pages = self.pages();
            let part = pages.first_hold(rest);
            each(&mut pages, part);
            rest.start = part.end;
            drop(pages);
            if !rest.is_empty() {
                // Whoever waits is to have a chance before it is taken again.
                std::thread::yield_now();
            }
        }
    }
}

impl PageTable {
    /// The first part of `range`, with as many records as may be gone through under
    /// one hold of the table's mutex; all of it if it has fewer.
    fn first_hold(&self, range: PageRange) -> PageRange {
        let mut behind = self.chunk_starts(range).skip(HOLD_CHUNKS);
        let end = behind.next().unwrap_or(range.end);
        PageRange { end, ..range }
    }

    /// Adds the stretches of `range` whose pages stand over frames to `runs`, in
    /// order; one that goes on where `runs` end is part of the last.
    fn frame_runs(&self, range: PageRange, runs: &mut Vec<PageRange>) {
        for (page, record) in self.seen(range) {
            if record.frame.is_none() {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == page => run.end = page.plus(1),
                _ => runs.push(PageRange::one(page)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{FrameId, PageIndex};
    use crate::region::Record;

    fn over_frame() -> Record {
        Record {
            frame: Some(FrameId(1)),
            ..Record::UNSEEN
        }
    }

    #[test]
    fn frame_runs_join_neighbours_across_chunks() {
        let mut table = PageTable::default();
        for page in [510, 511, 512, 514, 5_000_000] {
            table.set(PageIndex(page), over_frame());
        }
        let mut runs = Vec::new();
        table.frame_runs(PageRange::new(PageIndex(0), 1 << 40), &mut runs);
        let runs: Vec<_> = runs.iter().map(|run| (run.start.0, run.len())).collect();
        assert_eq!(runs, [(510, 3), (514, 1), (5_000_000, 1)]);
    }

    #[test]
    fn no_hold_goes_through_more_records_than_it_may() {
        let mut table = PageTable::default();
        // Dense at first, then far apart.
        let dense = (100..20_000).step_by(2);
        let sparse = (0..50).map(|place| (1 << 30) + (place << 20));
        for page in dense.chain(sparse) {
            table.set(PageIndex(page), over_frame());
        }
        let whole = PageRange::new(PageIndex(0), 1 << 40);
        let (mut rest, mut holds, mut runs) = (whole, 0, Vec::new());
        while !rest.is_empty() {
            let hold = table.first_hold(rest);
            assert_eq!(hold.start, rest.start);
            let chunks = table.chunk_starts(hold).count();
            assert!(chunks <= HOLD_CHUNKS, "{chunks} chunks in {hold}");
            table.frame_runs(hold, &mut runs);
            rest.start = hold.end;
            holds += 1;
        }
        assert_eq!(holds, (20_000_u64.div_ceil(512) + 50).div_ceil(8));
        let mut at_once = Vec::new();
        table.frame_runs(whole, &mut at_once);
        assert_eq!(runs, at_once);
    }
}
