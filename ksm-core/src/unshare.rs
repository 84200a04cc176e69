//! Break-COW: giving pages copies of their own, and mappings back.

use std::sync::Arc;

use crate::backend::{Backend, Backing, Memory, PageState};
use crate::crew::share_out;
use crate::error::{BackendError, Error};
use crate::fault::{self, Step};
use crate::page::{PageIndex, PageRange};
use crate::region::{Change, Class, Region, RegionGuard};

/// Pages whose copies are made under one hold of the lease, those in between that
/// are not merged among them.
const CHUNK_PAGES: u64 = 1024;

/// Pages whose copies one thread makes at a time.
const PIECE_PAGES: u64 = 256;

/// How often a range is tried in a row without getting further.
const TRIES: u32 = 16;

/// Gives every merged page of `range` a copy of its own, zero pages left as they
/// are. Returns how many pages it unshared.
///
/// A copy that was asked for may not come about: the host refuses, or a fault
/// is in its way. So the page map decides, and the question is asked again until
/// it says that nothing is shared (the kernel's `break_ksm` loops for the same
/// reason). From `parallel_pages` on, copies are made with the help of the rayon pool
/// that this is called in.
pub(crate) fn unmerge<B: Backend>(
    region: &Arc<Region<B>>,
    range: PageRange,
    parallel_pages: u32,
) -> Result<u64, Error> {
    let mut unshared = 0;
    let runs = {
        // A merge under way is written down before its lease is free.
        let _guard = region.lock()?;
        region.frame_runs(range)
    };
    for chunk in chunks(&runs) {
        let mut tries = 0;
        loop {
            let guard = region.lock()?;
            let (broken, left, error) = break_cow_by(&guard, chunk, |runs| {
                match pages_of(runs) < u64::from(parallel_pages) {
                    true => populate(guard.memory(), runs),
                    false => populate_together(region, runs),
                }
            });
            unshared += broken;
            if left == 0 {
                break;
            }
            tries = if broken > 0 { 0 } else { tries + 1 };
            if tries == TRIES {
                let source = error.unwrap_or(BackendError::Again);
                return Err(Error::StillShared {
                    pages: left,
                    source,
                });
            }
        }
    }
    Ok(unshared)
}

/// Cuts `runs` into chunks: short ones that stand near one another are in one.
fn chunks(runs: &[PageRange]) -> Vec<PageRange> {
    let mut chunks: Vec<PageRange> = Vec::new();
    for piece in runs.iter().flat_map(|run| run.chunks(CHUNK_PAGES)) {
        match chunks.last_mut() {
            Some(chunk) if piece.end.0 - chunk.start.0 <= CHUNK_PAGES => chunk.end = piece.end,
            _ => chunks.push(piece),
        }
    }
    chunks
}

/// One try. Returns how many pages got a copy, how many are left, and what the
/// host said.
pub(crate) fn break_cow<B: Backend>(
    guard: &RegionGuard<'_, B>,
    chunk: PageRange,
) -> (u64, u64, Option<BackendError>) {
    break_cow_by(guard, chunk, |runs| populate(guard.memory(), runs))
}

/// The same, where `copy` has the host copy the pages of runs.
fn break_cow_by<B: Backend>(
    guard: &RegionGuard<'_, B>,
    chunk: PageRange,
    copy: impl FnOnce(&[PageRange]) -> Option<BackendError>,
) -> (u64, u64, Option<BackendError>) {
    let runs = merged_runs(guard, chunk);
    let before = pages_of(&runs);
    let mut error = copy(&runs);
    if let Err(unread) = note_copies(guard, &runs) {
        error = Some(unread);
    }
    let left = merged(guard, chunk);
    (before - left, left, error)
}

/// Has the host copy pages. Returns what it said last.
fn populate(memory: &impl Memory, runs: &[PageRange]) -> Option<BackendError> {
    let said = runs.iter().filter_map(|&run| memory.populate(run).err());
    said.last()
}

/// The same, in pieces.
fn populate_together<B: Backend>(
    region: &Arc<Region<B>>,
    runs: &[PageRange],
) -> Option<BackendError> {
    let pieces = runs.iter().flat_map(|run| run.chunks(PIECE_PAGES));
    let region = Arc::clone(region);
    let said = share_out(pieces.collect(), 1, move |piece| {
        populate(region.memory(), piece)
    });
    said.into_iter().flatten().last()
}

fn pages_of(runs: &[PageRange]) -> u64 {
    runs.iter().map(|run| run.len()).sum()
}

/// Gives one merged page a copy of its own.
///
/// # Errors
/// What the host says, and it is merged still.
pub(crate) fn unmerge_page<B: Backend>(
    guard: &RegionGuard<'_, B>,
    page: PageIndex,
) -> Result<(), BackendError> {
    let mut said = None;
    for _ in 0..TRIES {
        let (_, left, error) = break_cow(guard, PageRange::one(page));
        if left == 0 {
            return Ok(());
        }
        said = error.or(said);
    }
    Err(said.unwrap_or(BackendError::Again))
}

fn merged<B: Backend>(guard: &RegionGuard<'_, B>, range: PageRange) -> u64 {
    pages_of(&merged_runs(guard, range))
}

/// The stretches of `range` whose pages are merged, as far as is known. Pages
/// are only ever populated here: one that was never merged is not touched.
pub(crate) fn merged_runs<B: Backend>(
    guard: &RegionGuard<'_, B>,
    range: PageRange,
) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    for (page, record) in guard.region().pages().seen(range) {
        match (record.class, runs.last_mut()) {
            (Class::Merged(_), Some(run)) if run.end == page => run.end = page.plus(1),
            (Class::Merged(_), _) => runs.push(PageRange::one(page)),
            _ => {}
        }
    }
    runs
}

/// Notes which pages of `merged` have copies of their own.
fn note_copies<B: Backend>(
    guard: &RegionGuard<'_, B>,
    merged: &[PageRange],
) -> Result<(), BackendError> {
    let mut runs = Vec::new();
    for &run in merged {
        let mut rest = run;
        while !rest.is_empty() {
            rest.start = guard.memory().populated(rest, rest.len(), &mut runs)?;
        }
    }
    let copied = runs
        .iter()
        .filter(|run| matches!(run.state, PageState::Private | PageState::Swapped));
    guard.note_all_copied(copied.flat_map(|run| run.range.iter()));
    Ok(())
}

/// Puts private pages in place of the copied pages of `range`, so that no
/// mapping of a frame is left. All DMA to the region must be guarded.
pub(crate) fn restore<B: Backend>(region: &Region<B>, range: PageRange) -> Result<(), Error> {
    let cap = region.max_stop();
    let runs = region.frame_runs(range);
    for chunk in runs.into_iter().flat_map(|run| run.chunks(cap)) {
        let mut tries = 0;
        loop {
            let guard = region.lock()?;
            let left = region.frame_runs(chunk);
            if left.is_empty() {
                guard.memory().rest();
                break;
            }
            if let Err(source) = restore_runs(&guard, &left) {
                tries += 1;
                if tries == TRIES {
                    return Err(source.into());
                }
            }
        }
    }
    Ok(())
}

/// Puts private pages in place of the copied pages of each of `runs`.
pub(crate) fn restore_runs<B: Backend>(
    guard: &RegionGuard<'_, B>,
    runs: &[PageRange],
) -> Result<(), BackendError> {
    for &run in runs {
        let landing = guard.take_off(run, Backing::Frame, Vec::new());
        fault::point(Step::Stopping);
        let held = guard.memory().stop(run, Backing::Frame)?;
        fault::point(Step::Stopped);
        for range in held.held {
            guard.change(Change::Restore(range), || guard.memory().restore(range))?;
        }
        drop(landing);
        guard.region().domain.sweep();
        fault::point(Step::Lifted);
        if !held.refused.is_empty() {
            return Err(BackendError::Again);
        }
    }
    Ok(())
}

/// Drops the content of `range`: the guest reads zeros from here on.
pub(crate) fn discard<B: Backend>(region: &Region<B>, range: PageRange) -> Result<(), Error> {
    let guard = region.lock()?;
    if region.pinned(range).len() > 0 {
        return Err(Error::Pinned { region: region.id });
    }
    Ok(discard_held(&guard, range)?)
}

/// The same, under the lease, for pages that no guard holds.
pub(crate) fn discard_held<B: Backend>(
    guard: &RegionGuard<'_, B>,
    range: PageRange,
) -> Result<(), BackendError> {
    let mut from = range.start;
    let frames = guard.region().frame_runs(range);
    for run in frames {
        discard_run(guard, from, run.start, Backing::Own)?;
        discard_run(guard, run.start, run.end, Backing::Frame)?;
        from = run.end;
    }
    discard_run(guard, from, range.end, Backing::Own)
}

/// Lets memory that nobody uses any more show no frame: drops it, or, where the
/// host refuses that, copies it. What is left to be named is named for good.
pub(crate) fn give_up<B: Backend>(guard: &RegionGuard<'_, B>) {
    let region = guard.region();
    let refused = (0..TRIES).all(|_| discard_held(guard, region.range()).is_err());
    if refused {
        copy_all(guard);
    }
    region.abandon();
}

/// Lets memory that is out of our hands from here on keep its bytes: by copies of
/// frames, or, where the host refuses one, by a frame that stays for good.
pub(crate) fn keep_bytes<B: Backend>(guard: &RegionGuard<'_, B>) {
    copy_all(guard);
    guard.region().forsake();
}

/// Gives every merged page a copy of its own, unless the host refuses it. Where one
/// gets none, others may.
fn copy_all<B: Backend>(guard: &RegionGuard<'_, B>) {
    for chunk in guard.region().range().chunks(CHUNK_PAGES) {
        let mut tries = 0;
        while tries < TRIES {
            let (broken, left, _) = break_cow(guard, chunk);
            if left == 0 {
                break;
            }
            tries = if broken > 0 { 0 } else { tries + 1 };
        }
    }
}

fn discard_run<B: Backend>(
    guard: &RegionGuard<'_, B>,
    start: PageIndex,
    end: PageIndex,
    backing: Backing,
) -> Result<(), BackendError> {
    let range = PageRange { start, end };
    match range.is_empty() {
        true => Ok(()),
        false => guard.discard(range, backing),
    }
}
