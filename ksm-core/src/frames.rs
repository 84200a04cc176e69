//! Which frame numbers are taken, and which one to take next so that runs of
//! pages become runs of frames.

use std::collections::BTreeMap;

use crate::page::FrameId;

/// A new run starts only where this many numbers are free in a row, so that it
/// has room to grow.
const ROOM: u32 = 64;

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
}

impl Frames {
    /// Takes a number: the one after `previous` if it is free, so that
    /// neighbouring pages get neighbouring frames and share a mapping. `None`
    /// when all 2^32 - 1 are taken.
    pub(crate) fn allot(&mut self, previous: Option<FrameId>) -> Option<FrameId> {
        let next = previous.map(|frame| frame.0 + 1);
        let number = match next {
            Some(next) if next == self.end || self.is_free(next) => next,
            _ => self.roomy(),
        };
        if number == u32::MAX {
            return self.any();
        }
        self.take(number);
        Some(FrameId(number))
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
        let (mut start, mut len) = (frame.0, 1);
        if let Some(after) = self.free.remove(&(start + 1)) {
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
        u64::from(self.end) - self.free.values().map(|&len| u64::from(len)).sum::<u64>()
    }

    pub(crate) fn is_free(&self, number: u32) -> bool {
        let before = self.free.range(..=number).next_back();
        before.is_some_and(|(&start, &len)| number - start < len)
    }

    /// Where a new run may start.
    fn roomy(&self) -> u32 {
        let roomy = self.free.iter().find(|&(_, &len)| len >= ROOM);
        roomy.map_or(self.end, |(&start, _)| start)
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
        let a = frames.allot(None).unwrap();
        let b = frames.allot(Some(a)).unwrap();
        let c = frames.allot(Some(b)).unwrap();
        assert_eq!((a, b, c), (FrameId(0), FrameId(1), FrameId(2)));
        // A short gap is not where a run starts, but a run may grow into it.
        frames.release(b);
        assert_eq!(frames.allot(None), Some(FrameId(3)));
        assert_eq!(frames.allot(Some(a)), Some(b));
        assert_eq!(frames.taken(), 4);
    }

    #[test]
    fn blocks_are_aligned_and_leave_nothing_lost() {
        let mut frames = Frames::default();
        let one = frames.allot(None).unwrap();
        assert_eq!(frames.allot_block(), Some(FrameId(BLOCK)));
        assert_eq!(frames.taken(), 1 + u64::from(BLOCK));
        // What was skipped for alignment is free.
        assert_eq!(frames.allot(Some(one)), Some(FrameId(1)));
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
            previous = frames.allot(previous);
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
            previous = frames.allot(previous);
        }
        for number in (1..=ROOM).rev() {
            frames.release(FrameId(number));
        }
        assert_eq!(frames.free.len(), 1);
        assert_eq!(frames.allot(None), Some(FrameId(1)));
    }
}
