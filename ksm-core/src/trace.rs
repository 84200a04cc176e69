//! Events for the embedder's `tracing` subscriber: every event of the crate, by
//! name. Without the feature `tracing` they cost nothing and do nothing.
//!
//! A subscriber is the embedder's code. So events are only sent where no page is
//! stopped, and neither a mutex nor a region's lease is held (but by `quiesce`): it
//! may call the engine, take its time, or panic.
#![cfg_attr(
    not(feature = "tracing"),
    allow(unused_variables, reason = "events without a feature to send them")
)]

use crate::error::Error;
#[cfg(feature = "tracing")]
use crate::outcome::Outcome;
use crate::outcome::OutcomeCounts;
use crate::page::PageRange;
use crate::region::{DomainId, RegionId, SpaceId};
use crate::stats::ScanReport;

/// What comes and goes.
#[cfg(feature = "tracing")]
const LAYOUT: &str = "ksm_core::layout";
/// Passes, and the windows that they are made of.
#[cfg(feature = "tracing")]
const PASS: &str = "ksm_core::pass";
/// Pages that are not merged, or no longer.
#[cfg(feature = "tracing")]
const MERGE: &str = "ksm_core::merge";
/// The engine is held still, or cleaned up behind a thread.
#[cfg(feature = "tracing")]
const RECOVERY: &str = "ksm_core::recovery";

/// Sends an event, if there is somebody to send it to.
#[cfg(feature = "tracing")]
macro_rules! event {
    ($level:ident, $target:ident, $($what:tt)+) => {
        tracing::event!(target: $target, tracing::Level::$level, $($what)+)
    };
}

#[cfg(not(feature = "tracing"))]
macro_rules! event {
    ($($what:tt)+) => {
        ()
    };
}

pub(crate) fn domain_made(domain: DomainId) {
    event!(INFO, LAYOUT, %domain, "trust domain made");
}

pub(crate) fn domain_forgotten(domain: DomainId) {
    event!(INFO, LAYOUT, %domain, "trust domain forgotten");
}

pub(crate) fn space_made(space: SpaceId, domain: DomainId) {
    event!(INFO, LAYOUT, %space, %domain, "address space made");
}

pub(crate) fn space_forgotten(space: SpaceId) {
    event!(INFO, LAYOUT, %space, "address space forgotten");
}

pub(crate) fn registered(region: RegionId, space: SpaceId, pages: u64, dma_guarded: bool) {
    event!(INFO, LAYOUT, %region, %space, pages, dma_guarded, "region registered");
}

pub(crate) fn cloned(parent: RegionId, region: RegionId, space: SpaceId) {
    event!(INFO, LAYOUT, %parent, %region, %space, "region cloned");
}

pub(crate) fn moved(old: RegionId, region: RegionId) {
    event!(INFO, LAYOUT, %old, %region, "region moved");
}

pub(crate) fn split(old: RegionId, parts: [RegionId; 2]) {
    event!(INFO, LAYOUT, %old, first = %parts[0], second = %parts[1], "region split");
}

pub(crate) fn unregistered(region: RegionId, done: &Result<(), Error>) {
    match done {
        Ok(()) => event!(INFO, LAYOUT, %region, "region unregistered"),
        // Of two callers, the other one does it.
        Err(Error::NoRegion(_)) => {}
        Err(error) => event!(WARN, LAYOUT, %region, %error, "region stays registered"),
    }
}

/// A call of `scan`: dropped when that is over.
#[derive(Debug)]
pub(crate) struct ScanSpan {
    #[cfg(feature = "tracing")]
    _entered: tracing::span::EnteredSpan,
}

pub(crate) fn scan(budget: u64) -> ScanSpan {
    ScanSpan {
        #[cfg(feature = "tracing")]
        _entered: tracing::debug_span!(target: PASS, "scan", budget).entered(),
    }
}

/// What a pass has come to so far, over several calls of `scan`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PassTally {
    #[cfg(feature = "tracing")]
    pages: u64,
    #[cfg(feature = "tracing")]
    outcomes: OutcomeCounts,
}

impl PassTally {
    pub(crate) fn add(&mut self, report: &ScanReport) {
        #[cfg(feature = "tracing")]
        {
            self.pages += report.pages_scanned;
            self.outcomes.add(&report.outcomes);
        }
    }
}

pub(crate) fn pass_ended(number: u64, tally: &PassTally) {
    event!(
        DEBUG,
        PASS,
        number,
        pages = tally.pages,
        merged = tally.outcomes[Outcome::Merged],
        zeroed = tally.outcomes[Outcome::Zeroed],
        unchanged = tally.outcomes[Outcome::Unchanged],
        "pass ended"
    );
}

pub(crate) fn window(region: RegionId, pages: PageRange, scanned: u64, mergeable: usize) {
    event!(TRACE, PASS, %region, %pages, scanned, mergeable, "window looked at");
}

/// What became of the pages of a region that were to be merged.
pub(crate) fn merges(region: RegionId, outcomes: &OutcomeCounts) {
    #[cfg(feature = "tracing")]
    {
        let of = |outcome| outcomes[outcome];
        let host = of(Outcome::NoVmas) + of(Outcome::NoMemory) + of(Outcome::Refused);
        let devices = of(Outcome::Pinned) + of(Outcome::NotExclusive) + of(Outcome::Huge);
        if host + devices + of(Outcome::VmaBudget) == 0 {
            return;
        }
        event!(
            DEBUG,
            MERGE,
            %region,
            merged = of(Outcome::Merged),
            pinned = of(Outcome::Pinned),
            not_exclusive = of(Outcome::NotExclusive),
            huge = of(Outcome::Huge),
            no_vmas = of(Outcome::NoVmas),
            vma_budget = of(Outcome::VmaBudget),
            no_memory = of(Outcome::NoMemory),
            refused = of(Outcome::Refused),
            "merges refused"
        );
    }
}

pub(crate) fn unmerged(done: &Result<u64, Error>) {
    match done {
        Ok(pages) => event!(DEBUG, MERGE, pages, "pages unmerged"),
        Err(error) => event!(WARN, MERGE, %error, "pages stay merged"),
    }
}

pub(crate) fn quiesced(regions: usize) {
    event!(DEBUG, RECOVERY, regions, "engine held still");
}

pub(crate) fn resumed() {
    event!(DEBUG, RECOVERY, "engine goes on");
}

pub(crate) fn recovered(leases: u64) {
    match leases {
        0 => event!(
            DEBUG,
            RECOVERY,
            "a thread is gone that had nothing under way"
        ),
        leases => event!(
            WARN,
            RECOVERY,
            leases,
            "ended what a lost thread had under way"
        ),
    }
}
