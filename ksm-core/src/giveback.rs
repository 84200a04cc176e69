//! Giving mappings back, where what they were made for is mostly gone.
//!
//! A guest's write to a merged page leaves the mapping below it as it is: a stretch
//! of memory whose pages were rewritten costs as many mappings as ever and saves
//! next to nothing. So where others would save more with them ([`budget`](crate::budget)),
//! mappings with more copies than merged pages are given back: the merged ones get
//! copies, and then all of them become the guest's own memory again, one mapping
//! with what is beside it.
//!
//! This comes to rest: each time, copies that the guest's writes made turn into
//! pages of its own, and a mapping that is fresh has none. (So mappings without a
//! copy stay even where nobody else shares their frames any more: a page whose
//! equal is held back would be merged and given back for ever.)

use std::cmp::Ordering;
use std::ops::Deref;

use crate::backend::Backend;
use crate::error::BackendError;
use crate::fault::{self, Step};
use crate::outcome::Outcome;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Class, NoLease, PageTable, Region, RegionGuard, is_seam};
use crate::unshare;

/// The most pages of a stretch: what is longer saves a lot, or costs a lot to copy.
const STRETCH_PAGES: u64 = 1024;

/// Neighbouring mappings of frames that can be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) range: PageRange,
    /// Pages of it that share their frames with others.
    pub(crate) sharing: u64,
    /// Mappings fewer once it is the guest's own memory, at least 1.
    pub(crate) gained: u64,
}

impl Stretch {
    /// Orders by the pages lost for a mapping gained.
    pub(crate) fn by_price(&self, other: &Self) -> Ordering {
        (self.sharing * other.gained).cmp(&(other.sharing * self.gained))
    }
}

/// Pages over consecutive frames: one mapping.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    range: PageRange,
    merged: u64,
    /// What its last page stands over.
    last: FrameId,
}

impl Mapping {
    const fn is_broken(&self) -> bool {
        2 * self.merged < self.range.len()
    }
}

/// Stretches of mappings that are mostly broken, as a region is gone through.
#[derive(Debug, Default)]
struct Broken {
    found: Vec<PageRange>,
    /// That of the last page over a frame, as far as it was come by.
    mapping: Option<Mapping>,
}

impl Broken {
    /// Looks at the pages of `part`, which are behind those that were looked at.
    fn look(&mut self, pages: &PageTable, part: PageRange) {
        for (page, record) in pages.seen(part) {
            if let Some(frame) = record.frame {
                self.add(page, frame, record.class);
            }
        }
    }

    fn add(&mut self, page: PageIndex, frame: FrameId, class: Class) {
        let goes_on = |mapping: &&mut Mapping| {
            mapping.range.end == page && !is_seam(Some(mapping.last), Some(frame))
        };
        let merged = u64::from(matches!(class, Class::Merged(_)));
        match self.mapping.as_mut().filter(goes_on) {
            Some(mapping) => {
                mapping.range.end = page.plus(1);
                mapping.merged += merged;
                mapping.last = frame;
            }
            None => {
                self.end_mapping();
                self.mapping = Some(Mapping {
                    range: PageRange::one(page),
                    merged,
                    last: frame,
                });
            }
        }
    }

    fn end_mapping(&mut self) {
        let fits = |mapping: &Mapping| mapping.range.len() <= STRETCH_PAGES;
        let mapping = self.mapping.take().filter(Mapping::is_broken).filter(fits);
        let Some(Mapping { range, .. }) = mapping else {
            return;
        };
        match self.found.last_mut() {
            Some(last) if last.end == range.start && last.len() + range.len() <= STRETCH_PAGES => {
                last.end = range.end;
            }
            _ => self.found.push(range),
        }
    }

    fn end(mut self) -> Vec<PageRange> {
        self.end_mapping();
        self.found
    }
}

/// What could be given back of a region. However large it is, its records are held for
/// short only, and no frame is asked after meanwhile.
pub(crate) fn stretches<B: Backend>(region: &Region<B>) -> Vec<Stretch> {
    if region.pages().counts().copied == 0 {
        return Vec::new();
    }
    let mut broken = Broken::default();
    region.by_holds(region.range(), |pages, part| broken.look(pages, part));
    let shares = |frame| region.domain.sharers(frame) > 1;
    let stretch = |range| stretch(|| region.pages(), range, shares);
    broken.end().into_iter().filter_map(stretch).collect()
}

/// What giving `range` back would bring; `None` if that is nothing. Whether a frame has
/// more than one sharer is asked with no records held.
fn stretch<P: Deref<Target = PageTable>>(
    pages: impl Fn() -> P,
    range: PageRange,
    shares: impl Fn(FrameId) -> bool,
) -> Option<Stretch> {
    let (gained, frames) = {
        let pages = pages();
        let seen = pages.seen(range);
        let merged = seen.filter(|(_, record)| matches!(record.class, Class::Merged(_)));
        let frames: Vec<_> = merged.filter_map(|(_, record)| record.frame).collect();
        (gained(&pages, range), frames)
    };
    let sharing = frames.into_iter().filter(|&frame| shares(frame)).count();
    (gained > 0).then_some(Stretch {
        range,
        sharing: sharing as u64,
        gained,
    })
}

/// How many mappings fewer there are once `range` is the guest's own memory.
fn gained(pages: &PageTable, range: PageRange) -> u64 {
    let frame = |page: PageIndex| pages.get(page).frame;
    let last = PageIndex(range.end.0 - 1);
    let inside = range.iter().zip(range.iter().skip(1));
    let mut now = inside
        .filter(|&(left, right)| is_seam(frame(left), frame(right)))
        .count() as u64;
    let mut then = 0;
    if let Some(left) = range.start.0.checked_sub(1).map(PageIndex) {
        now += u64::from(is_seam(frame(left), frame(range.start)));
        then += u64::from(is_seam(frame(left), None));
    }
    if let Some(right) = pages.after(last) {
        now += u64::from(is_seam(frame(last), frame(right)));
        then += u64::from(is_seam(None, frame(right)));
    }
    now.saturating_sub(then)
}

/// Gives `stretch` back, at most `cap` pages under one lease, as long as it
/// `is_registered`. A stretch in use by a device, or by somebody else, is left as
/// it is. Returns how many mappings there are fewer.
pub(crate) fn give_back<B: Backend>(
    region: &Region<B>,
    stretch: &Stretch,
    cap: u64,
    is_registered: impl Fn() -> bool,
) -> Result<u64, NoLease> {
    let seams = || region.pages().seams();
    let (mut gained, mut lost) = (0_u64, 0_u64);
    let mut given_back = 0;
    for chunk in stretch.range.chunks(cap) {
        let guard = match region.try_lock() {
            Ok(Some(guard)) => guard,
            Ok(None) | Err(NoLease::Gone(_)) => break,
            Err(held) => return Err(held),
        };
        let rest = PageRange {
            start: chunk.start,
            end: stretch.range.end,
        };
        if !is_registered() || region.pinned(rest).len() > 0 {
            break;
        }
        let before = seams();
        let done = take_off_frames(&guard, chunk);
        let after = seams();
        gained += before.saturating_sub(after);
        lost += after.saturating_sub(before);
        // Under the lease: what is counted of a region after others have taken its
        // place is lost.
        let now = gained.saturating_sub(lost).max(given_back);
        region.tally().vmas_given_back += now - given_back;
        given_back = now;
        if done.is_err() {
            break;
        }
    }
    Ok(given_back)
}

/// Puts private pages in place of all pages of `chunk` that stand over frames.
fn take_off_frames<B: Backend>(
    guard: &RegionGuard<'_, B>,
    chunk: PageRange,
) -> Result<(), BackendError> {
    let region = guard.region();
    let merged = unshare::merged_runs(guard, chunk);
    let (_, left, error) = unshare::break_cow(guard, chunk);
    fault::point(Step::Unshared);
    if left > 0 {
        return Err(error.unwrap_or(BackendError::Again));
    }
    let frames = region.frame_runs(chunk);
    let done = unshare::restore_runs(guard, &frames);
    let kept: u64 = region.frame_runs(chunk).iter().map(|run| run.len()).sum();
    let taken: u64 = frames.iter().map(|run| run.len()).sum();
    region.tally().pages_given_back += taken.saturating_sub(kept);
    for page in merged.into_iter().flat_map(PageRange::iter) {
        region.note_outcome(page, Outcome::VmaBudget);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Record;
    use crate::rmap::ItemId;
    use std::cell::RefCell;

    /// A table of `len` pages: for each page from 2 on a frame, or none; merged
    /// where it is even, copied where it is odd.
    fn table(len: u64, frames: &[Option<u32>]) -> PageTable {
        let mut table = PageTable::new(len);
        for (page, frame) in (2..).map(PageIndex).zip(frames) {
            let Some(frame) = frame else { continue };
            let class = match frame % 2 {
                0 => Class::Merged(ItemId(1)),
                _ => Class::Volatile,
            };
            let frame = Some(FrameId(*frame));
            table.set(
                page,
                Record {
                    frame,
                    class,
                    ..Record::UNSEEN
                },
            );
        }
        table
    }

    fn found(len: u64, frames: &[Option<u32>]) -> Vec<(u64, u64, u64, u64)> {
        let table = RefCell::new(table(len, frames));
        // Frame 8 has one sharer only.
        let shares = |frame| {
            assert!(table.try_borrow_mut().is_ok(), "the records are held");
            frame != FrameId(8)
        };
        let mut broken = Broken::default();
        // Wherever it is cut, what is found is the same.
        for part in PageRange::new(PageIndex(0), len).chunks(3) {
            broken.look(&table.borrow(), part);
        }
        let stretch = |range| stretch(|| table.borrow_mut(), range, shares);
        let mut found: Vec<_> = broken.end().into_iter().filter_map(stretch).collect();
        found.sort_by(Stretch::by_price);
        found
            .iter()
            .map(|stretch| {
                let Stretch {
                    range,
                    sharing,
                    gained,
                } = *stretch;
                (range.start.0, range.len(), sharing, gained)
            })
            .collect()
    }

    #[test]
    fn copies_alone_are_given_back_and_merged_pages_are_not() {
        assert_eq!(found(100, &[Some(5)]), [(2, 1, 0, 2)]);
        assert_eq!(found(100, &[Some(6)]), []);
        // At the end of the region there is no seam.
        assert_eq!(found(3, &[Some(5)]), [(2, 1, 0, 1)]);
    }

    #[test]
    fn neighbours_are_given_back_together() {
        // Three mappings of a page, then one of its own.
        let frames = [Some(5), Some(5), Some(5), None, Some(9)];
        assert_eq!(found(100, &frames), [(2, 3, 0, 4), (6, 1, 0, 2)]);
    }

    #[test]
    fn a_mapping_half_of_which_is_merged_stays() {
        assert_eq!(found(100, &[Some(5), Some(6)]), []);
        assert_eq!(found(100, &[Some(5), Some(6), Some(7)]), [(2, 3, 1, 2)]);
    }

    #[test]
    fn between_mappings_that_stay_nothing_is_gained() {
        let frames = [Some(4), Some(9), Some(6)];
        assert_eq!(found(100, &frames), []);
        let frames = [Some(4), Some(9), Some(13), Some(6)];
        assert_eq!(found(100, &frames), [(3, 2, 0, 1)]);
    }

    #[test]
    fn cheap_ones_come_first() {
        let frames = [Some(5), Some(6), Some(7), None, Some(5)];
        assert_eq!(found(100, &frames), [(6, 1, 0, 2), (2, 3, 1, 2)]);
    }

    #[test]
    fn a_page_that_nobody_shares_costs_nothing() {
        assert_eq!(found(100, &[Some(7), Some(8), Some(9)]), [(2, 3, 0, 2)]);
        assert_eq!(found(100, &[Some(8)]), [], "but it is not broken");
    }
}
