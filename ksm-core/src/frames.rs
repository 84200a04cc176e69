//! Which frame numbers are taken, and which one to take next so that runs of
//! pages become runs of frames.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::page::FrameId;
use crate::sync::ThreadId;

/// A new run starts only where this many numbers are free in a row, so that it
/// has room to grow.
const ROOM: u32 = 64;

/// Numbers that are set apart for whoever starts a run, so that it grows while
/// others start theirs.
const PLOT: u32 = 1024;

/// Whose frames they are that no page maps yet: those of the plan of that thread,
/// or nobody's. A thread has one plan at a time.
pub(crate) type Planner = Option<ThreadId>;

/// Numbers in a block. Blocks start at multiples of it.
pub(crate) const BLOCK: u32 = 64;

/// The first number of the block that `frame` lies in.
pub(crate) const fn block_of(frame: FrameId) -> FrameId {
    FrameId(frame.0 - frame.0 % BLOCK)
}

/// Frame numbers of one store.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// Free stretches below `end`: first number to length; never two adjacent.
    free: BTreeMap<u32, u32>,
    /// No number from here on was ever taken.
    end: u32,
    /// Set apart: what is left of each planner's plot. In no free stretch.
    plots: HashMap<Planner, Range<u32>>,
}

impl Frames {
    /// Takes a number for `planner`: the one after `previous` if it is free, so that
    /// neighbouring pages get neighbouring frames and share a mapping. Otherwise one
    /// behind the planner's last, where no other planner starts a run. `None` when
    /// all 2^32 - 1 are taken.
    pub(crate) fn allot(&mut self, previous: Option<FrameId>, planner: Planner) -> Option<FrameId> {
        let next = previous.map(|frame| frame.0 + 1);
        let number = next.and_then(|next| self.go_on(next, planner));
        let number = number.or_else(|| self.start(planner));
        number.map(FrameId).or_else(|| self.any())
    }

    /// Takes `next`, with which a run goes on, if that is free. It may have been set
    /// apart for just that, whoever is the first to come by the run's next page.
    fn go_on(&mut self, next: u32, planner: Planner) -> Option<u32> {
        if self.is_free(next) {
            self.take(next);
            return Some(next);
        }
        if next == self.end {
            self.leave_plot(planner);
            let plot = self.plot_at(next);
            self.plots.insert(planner, plot);
        }
        let mut plots = self.plots.values_mut().filter(|plot| plot.start < plot.end);
        plots.find(|plot| plot.start == next)?.next()
    }

    /// Takes the number with which the planner's next run starts.
    fn start(&mut self, planner: Planner) -> Option<u32> {
        if self.plot(planner).is_empty() {
            let plot = self.roomy();
            self.plots.insert(planner, plot);
        }
        self.plots.get_mut(&planner)?.next()
    }

    /// What is left of a planner's plot.
    fn plot(&self, planner: Planner) -> Range<u32> {
        self.plots.get(&planner).cloned().unwrap_or(0..0)
    }

    /// A planner starts no more runs for now: others may where it would have.
    pub(crate) fn leave_plot(&mut self, planner: Planner) {
        let plot = self.plots.remove(&planner);
        if let Some(plot) = plot.filter(|plot| !plot.is_empty()) {
            self.free(plot);
        }
    }

    /// Takes a block: [`BLOCK`] numbers in a row. `None` when there is none.
    pub(crate) fn allot_block(&mut self) -> Option<FrameId> {
        let aligned = |start: u32| start.checked_next_multiple_of(BLOCK);
        let inside = self.free.iter().find_map(|(&start, &len)| {
            let first = aligned(start)?;
            (first - start + BLOCK <= len).then_some(first)
        });
        let first = inside.or_else(|| aligned(self.end))?;
        first.checked_add(BLOCK).filter(|&end| end != u32::MAX)?;
        if first > self.end {
            self.free.insert(self.end, first - self.end);
            self.end = first;
        }
        for number in first..first + BLOCK {
            self.take(number);
        }
        Some(FrameId(first))
    }

    /// Takes the lowest free number, if there is one below `frame`.
    pub(crate) fn allot_below(&mut self, frame: FrameId) -> Option<FrameId> {
        let lowest = self.free.keys().next().copied();
        let number = lowest.filter(|&number| number < frame.0)?;
        self.take(number);
        Some(FrameId(number))
    }

    /// Gives a number back.
    pub(crate) fn release(&mut self, frame: FrameId) {
        debug_assert!(frame.0 < self.end && !self.is_free(frame.0));
        self.free(frame.0..frame.0 + 1);
    }

    /// Makes a free stretch of `numbers`, with what is free beside them.
    fn free(&mut self, numbers: Range<u32>) {
        let (mut start, mut len) = (numbers.start, numbers.end - numbers.start);
        if let Some(after) = self.free.remove(&numbers.end) {
            len += after;
        }
        let before = self.free.range(..start).next_back();
        if let Some((&before, &before_len)) = before
            && before + before_len == start
        {
            start = before;
            len += before_len;
        }
        self.free.insert(start, len);
    }

    /// How many numbers are taken.
    pub(crate) fn taken(&self) -> u64 {
        let free = self.free.values().copied();
        let plots = self.plots.values().map(|plot| plot.end - plot.start);
        u64::from(self.end) - free.chain(plots).map(u64::from).sum::<u64>()
    }

    pub(crate) fn is_free(&self, number: u32) -> bool {
        let before = self.free.range(..=number).next_back();
        before.is_some_and(|(&start, &len)| number - start < len)
    }

    /// Sets numbers apart where a new run may start.
    fn roomy(&mut self) -> Range<u32> {
        let at_end = |start: u32, len: u32| start + len == self.end;
        let mut stretches = self.free.iter().map(|(&start, &len)| (start, len));
        let roomy = stretches.find(|&(start, len)| len >= ROOM || at_end(start, len));
        self.plot_at(roomy.map_or(self.end, |(start, _)| start))
    }

    /// Sets numbers apart from `start` on, which is free or the end. None where no
    /// number is left behind the end.
    fn plot_at(&mut self, start: u32) -> Range<u32> {
        let len = self.free.remove(&start).unwrap_or(0);
        let mut end = start + len;
        if end == self.end {
            end = end.max(start.saturating_add(PLOT));
            self.end = end;
        }
        let plot = start..end.min(start.saturating_add(PLOT));
        if plot.end < end {
            self.free.insert(plot.end, end - plot.end);
        }
        plot
    }

    /// Any free number, once the end is reached.
    fn any(&mut self) -> Option<FrameId> {
        let number = *self.free.keys().next()?;
        self.take(number);
        Some(FrameId(number))
    }

    fn take(&mut self, number: u32) {
        if number == self.end {
            self.end += 1;
            return;
        }
        let (&start, &len) = self
            .free
            .range(..=number)
            .next_back()
            .expect("the caller saw that the number is free");
        self.free.remove(&start);
        if start < number {
            self.free.insert(start, number - start);
        }
        if number + 1 < start + len {
            self.free.insert(number + 1, start + len - number - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_stay_runs() {
        let mut frames = Frames::default();
        let a = frames.allot(None, None).unwrap();
        let b = frames.allot(Some(a), None).unwrap();
        let c = frames.allot(Some(b), None).unwrap();
        assert_eq!((a, b, c), (FrameId(0), FrameId(1), FrameId(2)));
        // A short gap is not where a run starts, but a run may grow into it.
        frames.release(b);
        assert_eq!(frames.allot(None, None), Some(FrameId(3)));
        assert_eq!(frames.allot(Some(a), None), Some(b));
        assert_eq!(frames.taken(), 4);
    }

    /// Each of several planners gets its numbers in a row, whoever comes in between.
    // Loom's threads are only to be had in a model.
    #[cfg(not(loom))]
    #[test]
    fn planners_do_not_get_in_each_others_way() {
        let mut frames = Frames::default();
        let planners = [(); 3].map(|()| Some(std::thread::spawn(|| ()).thread().id()));
        let mut runs = [(); 3].map(|()| Vec::new());
        for _ in 0..100 {
            for (run, planner) in runs.iter_mut().zip(planners) {
                let number = frames.allot(run.last().copied(), planner).unwrap();
                run.push(number);
            }
        }
        for run in &runs {
            assert!(run.windows(2).all(|pair| pair[0].plus(1) == pair[1]));
        }
        assert_eq!(frames.taken(), 300);
        // Whoever is first with what comes next to one page takes what was set apart.
        let last = runs[0].last().copied();
        assert_eq!(
            frames.allot(last, planners[1]),
            last.map(|last| last.plus(1))
        );
        // Once they are done, nothing is lost.
        for planner in planners {
            frames.leave_plot(planner);
        }
        let all = runs.iter().flatten().copied().chain([runs[0][99].plus(1)]);
        all.for_each(|number| frames.release(number));
        assert_eq!((frames.taken(), frames.free.len()), (0, 1));
        assert_eq!(frames.allot(None, None), Some(FrameId(0)));
    }

    #[test]
    fn blocks_are_aligned_and_leave_nothing_lost() {
        let mut frames = Frames::default();
        let one = frames.allot(None, None).unwrap();
        frames.leave_plot(None);
        assert_eq!(frames.allot_block(), Some(FrameId(BLOCK)));
        assert_eq!(frames.taken(), 1 + u64::from(BLOCK));
        // What was skipped for alignment is free.
        assert_eq!(frames.allot(Some(one), None), Some(FrameId(1)));
        for number in BLOCK..2 * BLOCK {
            frames.release(FrameId(number));
        }
        assert_eq!(frames.allot_block(), Some(FrameId(BLOCK)));
        assert_eq!(block_of(FrameId(2 * BLOCK - 1)), FrameId(BLOCK));
    }

    #[test]
    fn the_lowest_number_is_taken_however_short_the_gap() {
        let mut frames = Frames::default();
        let mut previous = None;
        for _ in 0..10 {
            previous = frames.allot(previous, None);
        }
        for number in [6, 2] {
            frames.release(FrameId(number));
        }
        assert_eq!(frames.allot_below(FrameId(9)), Some(FrameId(2)));
        assert_eq!(frames.allot_below(FrameId(5)), None);
        assert_eq!(frames.allot_below(FrameId(9)), Some(FrameId(6)));
        assert_eq!(frames.allot_below(FrameId(9)), None, "none is free");
        assert_eq!(frames.taken(), 10);
    }

    #[test]
    fn numbers_come_back_joined() {
        let mut frames = Frames::default();
        let mut previous = None;
        for _ in 0..ROOM + 2 {
            previous = frames.allot(previous, None);
        }
        frames.leave_plot(None);
        for number in (1..=ROOM).rev() {
            frames.release(FrameId(number));
        }
        assert_eq!(frames.free.len(), 2);
        assert_eq!(frames.allot(None, None), Some(FrameId(1)));
    }
}
