//! The engine's record of every page that it has seen populated: 16 bytes a
//! page, in chunks that exist only where there was something to see.

use std::collections::BTreeMap;

use crate::backend::Backing;
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::rmap::ItemId;

/// Pages in a chunk: 2 MiB of guest memory, 8 KiB of records.
pub(super) const CHUNK_PAGES: u64 = CHUNK_LEN as u64;
const CHUNK_LEN: usize = 512;

/// What a page is to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Not mergeable now: seen for the first time, or changing.
    Volatile,
    /// Stable, in the unstable tree of this pass or the last.
    Unshared,
    /// A zero page of the engine's making, as far as is known.
    Zero,
    /// Maps a frame, through this rmap_item.
    Merged(ItemId),
}

/// One page's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// What it looked like when a pass last read it; `None` before that.
    pub(crate) fingerprint: Option<Fingerprint>,
    /// The frame that its mapping names, whether it shows or is copied over.
    pub(crate) frame: Option<FrameId>,
    pub(crate) class: Class,
    /// For how many passes the fingerprint has stayed the same, saturating.
    pub(crate) age: u8,
    /// What became of it in the pass that last looked at it.
    pub(crate) outcome: Outcome,
}

impl Record {
    pub(crate) const UNSEEN: Self = Self {
        fingerprint: None,
        frame: None,
        class: Class::Volatile,
        age: 0,
        outcome: Outcome::Unseen,
    };

    pub(crate) const fn backing(&self) -> Backing {
        match self.frame {
            Some(_) => Backing::Frame,
            None => Backing::Own,
        }
    }

    /// Merged once, written to since, and still over a frame's mapping.
    pub(crate) const fn is_copied(&self) -> bool {
        self.frame.is_some() && !matches!(self.class, Class::Merged(_))
    }
}

/// A [`Record`] in 16 bytes.
///
/// `fingerprint` 0 and `frame` `u32::MAX` mean none. `tag` is an item's number
/// or, from [`Packed::NO_ITEM`] on, class, age and outcome in a byte each.
#[derive(Clone, Copy, Debug)]
struct Packed {
    fingerprint: u64,
    frame: u32,
    tag: u32,
}

impl Packed {
    const NO_FRAME: u32 = u32::MAX;
    const NO_ITEM: u32 = 0xff00_0000;
    const UNSEEN: Self = Self {
        fingerprint: 0,
        frame: Self::NO_FRAME,
        tag: Self::NO_ITEM,
    };

    fn pack(record: &Record) -> Self {
        let class = match record.class {
            Class::Volatile => 0,
            Class::Unshared => 1,
            Class::Zero => 2,
            Class::Merged(item) => {
                debug_assert!(item.0 < Self::NO_ITEM);
                return Self::with_tag(record, item.0);
            }
        };
        let tag = class << 16 | u32::from(record.age) << 8 | u32::from(record.outcome as u8);
        Self::with_tag(record, Self::NO_ITEM | tag)
    }

    fn with_tag(record: &Record, tag: u32) -> Self {
        Self {
            fingerprint: record.fingerprint.map_or(0, |fingerprint| fingerprint.0),
            frame: record.frame.map_or(Self::NO_FRAME, |frame| frame.0),
            tag,
        }
    }

    const fn is_merged(&self) -> bool {
        self.tag < Self::NO_ITEM
    }

    fn unpack(self) -> Record {
        let [outcome, age, class, _] = self.tag.to_le_bytes();
        let merged = self.is_merged();
        Record {
            fingerprint: (self.fingerprint != 0).then_some(Fingerprint(self.fingerprint)),
            frame: (self.frame != Self::NO_FRAME).then_some(FrameId(self.frame)),
            class: match class {
                _ if merged => Class::Merged(ItemId(self.tag)),
                1 => Class::Unshared,
                2 => Class::Zero,
                _ => Class::Volatile,
            },
            age: if merged { u8::MAX } else { age },
            outcome: if merged {
                Outcome::Merged
            } else {
                Outcome::ALL[usize::from(outcome)]
            },
        }
    }
}

/// How many pages are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) seen: u64,
    pub(crate) merged: u64,
    pub(crate) zero: u64,
    pub(crate) unshared: u64,
    pub(crate) volatile: u64,
    pub(crate) copied: u64,
}

impl Counts {
    fn of(record: &Record) -> Self {
        let one = |is: bool| u64::from(is);
        let seen = *record != Record::UNSEEN;
        Self {
            seen: one(seen),
            merged: one(matches!(record.class, Class::Merged(_))),
            zero: one(record.class == Class::Zero),
            unshared: one(record.class == Class::Unshared),
            volatile: one(seen && record.class == Class::Volatile),
            copied: one(record.is_copied()),
        }
    }

    fn replace(&mut self, old: Self, new: Self) {
        let swap = |sum: &mut u64, old: u64, new: u64| *sum = *sum + new - old;
        swap(&mut self.seen, old.seen, new.seen);
        swap(&mut self.merged, old.merged, new.merged);
        swap(&mut self.zero, old.zero, new.zero);
        swap(&mut self.unshared, old.unshared, new.unshared);
        swap(&mut self.volatile, old.volatile, new.volatile);
        swap(&mut self.copied, old.copied, new.copied);
    }
}

/// Whether neighbours that name these frames need two mappings.
pub(crate) fn is_seam(left: Option<FrameId>, right: Option<FrameId>) -> bool {
    match (left, right) {
        (None, None) => false,
        (Some(left), Some(right)) => left.plus(1) != right,
        _ => true,
    }
}

type Chunk = Box<[Packed; CHUNK_LEN]>;

fn fresh_chunk() -> Chunk {
    Box::new([Packed::UNSEEN; CHUNK_LEN])
}

/// The records of one region.
#[derive(Debug, Default)]
pub(crate) struct PageTable {
    chunks: BTreeMap<u64, Chunk>,
    counts: Counts,
    /// Pairs of neighbours that no single mapping can hold.
    seams: u64,
    /// One past the last page; `None` for no end.
    end: Option<PageIndex>,
}

impl PageTable {
    /// For a region of `pages` pages.
    pub(crate) fn new(pages: u64) -> Self {
        Self {
            end: Some(PageIndex(pages)),
            ..Self::default()
        }
    }

    fn place(page: PageIndex) -> (u64, usize) {
        // Less than CHUNK_PAGES, so it fits.
        #[allow(clippy::cast_possible_truncation)]
        let slot = (page.0 % CHUNK_PAGES) as usize;
        (page.0 / CHUNK_PAGES, slot)
    }

    pub(crate) fn get(&self, page: PageIndex) -> Record {
        let (chunk, slot) = Self::place(page);
        match self.chunks.get(&chunk) {
            Some(records) => records[slot].unpack(),
            None => Record::UNSEEN,
        }
    }

    pub(crate) fn set(&mut self, page: PageIndex, record: Record) {
        self.move_seams(page, record.frame);
        let (chunk, slot) = Self::place(page);
        let records = self.chunks.entry(chunk).or_insert_with(fresh_chunk);
        let old = std::mem::replace(&mut records[slot], Packed::pack(&record));
        self.counts
            .replace(Counts::of(&old.unpack()), Counts::of(&record));
    }

    /// Counts the seams anew around a page whose mapping comes to name `frame`.
    fn move_seams(&mut self, page: PageIndex, frame: Option<FrameId>) {
        let old = self.get(page).frame;
        if old == frame {
            return;
        }
        let frame_of = |page| self.get(page).frame;
        let before = page.0.checked_sub(1).map(PageIndex).map(frame_of);
        let after = self.after(page).map(frame_of);
        let seams = |here| {
            let left = before.is_some_and(|before| is_seam(before, here));
            let right = after.is_some_and(|after| is_seam(here, after));
            u64::from(left) + u64::from(right)
        };
        self.seams = self.seams + seams(frame) - seams(old);
    }

    /// The page behind `page`, if the region has one.
    pub(crate) fn after(&self, page: PageIndex) -> Option<PageIndex> {
        let next = page.plus(1);
        (self.end != Some(next)).then_some(next)
    }

    /// How many mappings the host needs for this region beyond the first, as far
    /// as the engine's doing goes.
    pub(crate) const fn seams(&self) -> u64 {
        self.seams
    }

    /// Changes a page's record in place.
    pub(crate) fn update(&mut self, page: PageIndex, change: impl FnOnce(&mut Record)) {
        let mut record = self.get(page);
        change(&mut record);
        self.set(page, record);
    }

    /// Forgets the pages of `range`, and gives chunks back that lie in it whole.
    pub(crate) fn forget(&mut self, range: PageRange) {
        let pages: Vec<_> = self.seen(range).map(|(page, _)| page).collect();
        for page in pages {
            self.set(page, Record::UNSEEN);
        }
        let (first, end) = (
            range.start.0.div_ceil(CHUNK_PAGES),
            range.end.0 / CHUNK_PAGES,
        );
        let whole = self.chunks.range(first..end.max(first));
        let whole: Vec<_> = whole.map(|(&chunk, _)| chunk).collect();
        for chunk in whole {
            self.chunks.remove(&chunk);
        }
    }

    /// How many of the first pages of `range` are merged.
    pub(crate) fn merged_from(&self, range: PageRange) -> u64 {
        let mut merged = 0;
        while merged < range.len() {
            let (chunk, slot) = Self::place(range.start.plus(merged));
            let Some(records) = self.chunks.get(&chunk) else {
                break;
            };
            let records = records[slot..].iter();
            let here = records.take_while(|record| record.is_merged()).count();
            merged += here as u64;
            if slot + here < CHUNK_LEN {
                break;
            }
        }
        merged.min(range.len())
    }

    /// Takes over the records of `range` from `other`, whose pages are numbered
    /// alike: merged ones, over consecutive frames. Here they were never seen.
    pub(crate) fn take_run(&mut self, other: &Self, range: PageRange) {
        let last = PageIndex(range.end.0 - 1);
        // A run has no seams inside: those at its ends come with its ends.
        for page in [range.start, last] {
            self.set(page, other.get(page));
        }
        let inside = PageRange {
            start: range.start.plus(1),
            end: last,
        };
        for (&chunk, records) in other.chunks_of(inside) {
            let first = PageIndex(chunk * CHUNK_PAGES);
            let part = PageRange::new(first, CHUNK_PAGES).intersection(inside);
            let here = self.chunks.entry(chunk).or_insert_with(fresh_chunk);
            for page in part.iter() {
                let slot = Self::place(page).1;
                here[slot] = records[slot];
            }
            self.counts.seen += part.len();
            self.counts.merged += part.len();
        }
        // The neighbours of the ends were not there when those were set.
        if !inside.is_empty() {
            self.seams -= 2;
        }
    }

    /// Where the chunks start that have records of `range`.
    pub(super) fn chunk_starts(&self, range: PageRange) -> impl Iterator<Item = PageIndex> {
        let chunks = self.chunks_of(range);
        chunks.map(|(&chunk, _)| PageIndex(chunk * CHUNK_PAGES))
    }

    fn chunks_of(&self, range: PageRange) -> impl Iterator<Item = (&u64, &Chunk)> {
        let first = range.start.0 / CHUNK_PAGES;
        let last = range.end.0.div_ceil(CHUNK_PAGES).max(first);
        self.chunks.range(first..last)
    }

    /// Gives up the records from `page` on, as those of a table of their own, and
    /// ends before them.
    pub(crate) fn split_off(&mut self, page: PageIndex) -> Self {
        let end = self.end.map_or(PageIndex(u64::MAX), |end| end);
        let rest = PageRange { start: page, end };
        let mut split = Self {
            end: self.end.map(|end| PageIndex(end.0 - page.0)),
            ..Self::default()
        };
        for (at, record) in self.seen(rest) {
            split.set(PageIndex(at.0 - page.0), record);
        }
        self.forget(rest);
        // The last page has no neighbour any more.
        let last = self.get(PageIndex(page.0 - 1)).frame;
        self.seams -= u64::from(is_seam(last, None));
        self.end = Some(page);
        split
    }

    /// The records of `range` that are not [`Record::UNSEEN`], in order; pages
    /// that were never seen cost nothing.
    pub(crate) fn seen(&self, range: PageRange) -> impl Iterator<Item = (PageIndex, Record)> + '_ {
        self.chunks_of(range)
            .flat_map(move |(&chunk, records)| {
                let start = PageIndex(chunk * CHUNK_PAGES);
                let pages = PageRange::new(start, CHUNK_PAGES).intersection(range);
                pages
                    .iter()
                    .map(|page| (page, records[Self::place(page).1]))
            })
            .map(|(page, packed)| (page, packed.unpack()))
            .filter(|(_, record)| *record != Record::UNSEEN)
    }

    pub(crate) const fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn bytes(&self) -> u64 {
        let chunk = size_of::<Packed>() as u64 * CHUNK_PAGES;
        self.chunks.len() as u64 * chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(frame: u32) -> Record {
        Record {
            fingerprint: Some(Fingerprint(7)),
            frame: Some(FrameId(frame)),
            class: Class::Merged(ItemId(3)),
            age: u8::MAX,
            outcome: Outcome::Merged,
        }
    }

    #[test]
    fn a_record_survives_packing() {
        for outcome in Outcome::ALL {
            for class in [Class::Volatile, Class::Unshared, Class::Zero] {
                let record = Record {
                    fingerprint: Some(Fingerprint(u64::MAX)),
                    frame: Some(FrameId(9)),
                    class,
                    age: 200,
                    outcome,
                };
                assert_eq!(Packed::pack(&record).unpack(), record);
            }
        }
        assert_eq!(Packed::pack(&merged(1)).unpack(), merged(1));
        assert_eq!(Packed::UNSEEN.unpack(), Record::UNSEEN);
        assert_eq!(size_of::<Packed>(), 16);
    }

    #[test]
    fn counts_follow_the_records() {
        let mut table = PageTable::default();
        table.set(PageIndex(5), merged(1));
        table.set(PageIndex(100_000), merged(2));
        table.update(PageIndex(5), |record| record.class = Class::Volatile);
        let counts = table.counts();
        assert_eq!((counts.merged, counts.copied, counts.seen), (1, 1, 2));
        table.forget(PageRange::new(PageIndex(0), 200_000));
        assert_eq!(table.counts(), Counts::default());
        assert_eq!(table.bytes(), 0);
    }

    #[test]
    fn seams_are_counted_where_mappings_end() {
        let mut table = PageTable::default();
        // An island of two frames in a row, one that is not, and the first page.
        for (page, frame) in [(0, 50), (10, 4), (11, 5), (12, 5)] {
            table.set(PageIndex(page), merged(frame));
        }
        assert_eq!(table.seams(), 1 + 3);
        table.set(PageIndex(12), merged(6));
        assert_eq!(table.seams(), 1 + 2);
        table.forget(PageRange::new(PageIndex(0), 100));
        assert_eq!(table.seams(), 0);
    }

    #[test]
    fn the_ends_of_a_region_are_no_seams() {
        let mut table = PageTable::new(3);
        for (page, seams) in [(2, 1), (0, 2), (1, 0)] {
            let frame = u32::try_from(page).expect("small");
            table.set(PageIndex(page), merged(frame));
            assert_eq!(table.seams(), seams);
        }
    }

    #[test]
    fn merged_pages_are_counted_across_chunks() {
        let mut table = PageTable::new(3000);
        for page in 500..1200 {
            table.set(PageIndex(page), merged(1));
        }
        table.update(PageIndex(1100), |record| record.class = Class::Volatile);
        let from = |start, len| table.merged_from(PageRange::new(PageIndex(start), len));
        assert_eq!((from(500, 10), from(500, 2000), from(499, 5)), (10, 600, 0));
        assert_eq!((from(1101, 2000), from(1023, 2), from(2000, 5)), (99, 2, 0));
    }

    #[test]
    fn a_run_is_taken_over_with_its_seams() {
        let mut table = PageTable::new(3000);
        for page in 400..1500 {
            table.set(PageIndex(page), merged(u32::try_from(page).expect("small")));
        }
        for (start, len) in [(400, 1100), (400, 1), (499, 2), (511, 2), (700, 800)] {
            let mut clone = PageTable::new(3000);
            let range = PageRange::new(PageIndex(start), len);
            clone.take_run(&table, range);
            assert_eq!((clone.seams(), clone.counts().merged), (2, len));
            assert_eq!(clone.counts().seen, len);
            let records: Vec<_> = clone.seen(PageRange::new(PageIndex(0), 3000)).collect();
            assert_eq!(records, table.seen(range).collect::<Vec<_>>());
            let behind = PageRange::new(range.end, 1500 - range.end.0);
            if !behind.is_empty() {
                clone.take_run(&table, behind);
                assert_eq!(clone.seams(), 2, "two runs that are one");
            }
        }
    }

    #[test]
    fn a_table_is_split_with_its_seams() {
        let mut table = PageTable::new(2000);
        // A run over the cut, pages alone, and one right behind the cut.
        for (page, frame) in [(3, 90), (698, 4), (699, 5), (700, 6), (702, 9), (1999, 30)] {
            table.set(PageIndex(page), merged(frame));
        }
        let rest = table.split_off(PageIndex(700));
        let pages = |table: &PageTable| -> Vec<_> {
            let all = PageRange::new(PageIndex(0), 2000);
            table.seen(all).map(|(page, _)| page.0).collect()
        };
        assert_eq!(pages(&table), [3, 698, 699]);
        assert_eq!(pages(&rest), [0, 2, 1299]);
        assert_eq!((table.seams(), rest.seams()), (3, 1 + 2 + 1));
        assert_eq!((table.counts().merged, rest.counts().merged), (3, 3));
        assert_eq!(table.after(PageIndex(699)), None);
        assert_eq!(rest.after(PageIndex(1299)), None);
    }
}
