//! Random unmerge, discard, unregister and re-register, while guests work and
//! their memory is being merged.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Context as _;
use ksm_core::page::bytes_in;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::dedup::Dedup;
use crate::discard::Discard;
use crate::guest::GuestSide;
use crate::ram::{Ram, page_address};

/// The longest range that is unmerged or discarded at once, in pages.
const MAX_PAGES: u64 = 512;
/// The longest rest between two disturbances, in milliseconds.
const MAX_PAUSE_MILLISECS: u64 = 40;
/// How long a guest may take to agree to a discard.
const PATIENCE: Duration = Duration::from_secs(2);

/// What was done.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct ChaosTally {
    /// Ranges unmerged.
    pub(crate) unmerges: u64,
    /// Pages that stopped being shared by that.
    pub(crate) pages_unmerged: u64,
    /// Guests unmerged as a whole.
    pub(crate) guests_unmerged: u64,
    /// Ranges discarded.
    pub(crate) discards: u64,
    /// Pages discarded.
    pub(crate) pages_discarded: u64,
    /// Regions unregistered and registered again.
    pub(crate) reregistrations: u64,
}

/// One guest, as far as it is disturbed.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Its memory.
    pub(crate) ram: Ram,
    /// Its pages that may be discarded.
    pub(crate) discardable: Range<u64>,
    /// Where discards are agreed on.
    pub(crate) side: Arc<GuestSide>,
}

/// Disturbs `targets` until `stop` is set.
pub(crate) fn disturb(
    dedup: &Dedup,
    targets: &[Target],
    seed: u64,
    stop: &AtomicBool,
) -> anyhow::Result<ChaosTally> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut tally = ChaosTally::default();
    while !stop.load(Ordering::Relaxed) {
        let index = rng.random_range(0..targets.len());
        let target = &targets[index];
        match rng.random_range(0..100) {
            0..40 => {
                let range = some_pages(&mut rng, 0..target.ram.pages());
                let (start, bytes) = address_range(&range);
                tally.pages_unmerged += dedup
                    .guest(index)
                    .unmerge(start, bytes)
                    .with_context(|| format!("unmerge of pages {range:?}, guest {index}"))?;
                tally.unmerges += 1;
            }
            40..43 => {
                tally.pages_unmerged += dedup
                    .guest(index)
                    .unmerge_all()
                    .with_context(|| format!("unmerge of guest {index}"))?;
                tally.guests_unmerged += 1;
            }
            43..90 => discard(dedup, index, target, &mut rng, &mut tally)?,
            _ => {
                reregister(dedup, index, target, &mut rng)?;
                tally.reregistrations += 1;
            }
        }
        sleep(Duration::from_millis(
            rng.random_range(0..=MAX_PAUSE_MILLISECS),
        ));
    }
    Ok(tally)
}

/// A range inside `within`, which is not empty.
fn some_pages(rng: &mut StdRng, within: Range<u64>) -> Range<u64> {
    let start = rng.random_range(within.clone());
    let longest = MAX_PAGES.min(within.end - start);
    start..start + rng.random_range(1..=longest)
}

fn address_range(pages: &Range<u64>) -> (vm_memory::GuestAddress, u64) {
    (page_address(pages.start), bytes_in(pages.end - pages.start))
}

fn discard(
    dedup: &Dedup,
    index: usize,
    target: &Target,
    rng: &mut StdRng,
    tally: &mut ChaosTally,
) -> anyhow::Result<()> {
    if target.discardable.is_empty() {
        return Ok(());
    }
    let pages = some_pages(rng, target.discardable.clone());
    if !target.side.desk.ask(&pages, PATIENCE) {
        return Ok(());
    }
    let (start, bytes) = address_range(&pages);
    dedup
        .guest(index)
        .discard(start, bytes)
        .with_context(|| format!("discard of pages {pages:?}, guest {index}"))?;
    tally.discards += 1;
    tally.pages_discarded += pages.end - pages.start;
    target.side.desk.set(Discard::Done(pages));
    Ok(())
}

/// Takes one region of a guest out of the engine's hands, and gives it back.
fn reregister(
    dedup: &Dedup,
    index: usize,
    target: &Target,
    rng: &mut StdRng,
) -> anyhow::Result<()> {
    let work = &target.ram.work;
    let at = rng.random_range(0..work.num_regions());
    let gone = work.iter().nth(at).expect("chosen among them");
    let (rest, _) = work.remove_region(gone.start_addr(), gone.len())?;
    let mut guest = dedup.guest(index);
    guest
        .sync_with(&rest, Ram::source)
        .with_context(|| format!("unregister region {at} of guest {index}"))?;
    sleep(Duration::from_millis(rng.random_range(0..10)));
    guest
        .sync_with(work, Ram::source)
        .with_context(|| format!("register region {at} of guest {index}"))?;
    Ok(())
}
