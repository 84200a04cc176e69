//! A pass over all regions: which window is next, and what is done with what it
//! found.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use super::Ksm;
use crate::backend::Backend;
use crate::budget::Purse;
use crate::error::Error;
use crate::merge::{self, Wish};
use crate::outcome::{Outcome, OutcomeCounts};
use crate::page::{PageIndex, PageRange};
use crate::region::{Region, RegionGuard, RegionId};
use crate::scan;
use crate::stats::ScanReport;
use crate::trace::{self, PassTally};

/// Where a pass stands.
#[derive(Debug, Default)]
pub(super) struct Pass {
    running: bool,
    todo: VecDeque<(RegionId, PageIndex)>,
    /// Regions that were busy, to be waited for at the end of the pass.
    deferred: VecDeque<(RegionId, PageIndex)>,
    tally: PassTally,
}

impl<B: Backend> Ksm<B> {
    /// Looks at up to `budget` populated pages, merges what can be merged, and
    /// returns what it did: at the end of a pass over all regions, or when the
    /// budget is spent. The next call goes on where this one stopped.
    ///
    /// A region whose lease is taken is put off to the end of the pass, and
    /// waited for then.
    ///
    /// # Errors
    /// [`Error::Quiesced`] when the calling thread holds the engine still;
    /// [`Error::Backend`] when the page map cannot be read.
    pub fn scan(&self, budget: u64) -> Result<ScanReport, Error> {
        let _span = trace::scan(budget);
        let mut report = ScanReport::default();
        let Some(scanner) = self.scanner.try_lock()? else {
            report.busy = true;
            return Ok(report);
        };
        self.start_pass(&mut scanner.journal());
        while report.pages_scanned < budget {
            let next = {
                let mut pass = scanner.journal();
                let todo = pass.todo.pop_front().map(|at| (at, false));
                todo.or_else(|| pass.deferred.pop_front().map(|at| (at, true)))
            };
            let Some(((id, from), wait)) = next else {
                self.end_pass(&mut scanner.journal());
                report.passes = 1;
                break;
            };
            let Ok(region) = self.layout.region(id) else {
                continue;
            };
            let guard = if wait {
                Some(region.lock()?)
            } else {
                region.try_lock()?
            };
            let Some(guard) = guard else {
                scanner.journal().deferred.push_back((id, from));
                continue;
            };
            if self.layout.region(id).is_err() {
                // It left before its lease was taken.
                continue;
            }
            let next = self.scan_window(guard, from, budget, &mut report)?;
            if next < region.range().end {
                scanner.journal().todo.push_front((id, next));
            }
        }
        let tally = {
            let mut pass = scanner.journal();
            pass.tally.add(&report);
            pass.tally
        };
        drop(scanner);
        if report.passes > 0 {
            trace::pass_ended(self.full_scans.load(Ordering::Relaxed), &tally);
        }
        Ok(report)
    }

    fn start_pass(&self, pass: &mut Pass) {
        if pass.running {
            return;
        }
        for domain in self.layout.domains() {
            domain.start_pass();
        }
        let regions = self.layout.regions();
        pass.todo = regions
            .iter()
            .map(|region| (region.id, PageIndex(0)))
            .collect();
        pass.tally = PassTally::default();
        pass.running = true;
    }

    fn end_pass(&self, pass: &mut Pass) {
        pass.running = false;
        for domain in self.layout.domains() {
            domain.sweep();
        }
        self.vmas.end_pass();
        self.full_scans.fetch_add(1, Ordering::Relaxed);
    }

    /// Scans one window under `guard`, then merges what it found. Returns where
    /// the region's next window starts.
    fn scan_window(
        &self,
        guard: RegionGuard<'_, B>,
        from: PageIndex,
        budget: u64,
        report: &mut ScanReport,
    ) -> Result<PageIndex, Error> {
        let region = guard.region();
        let within = PageRange {
            start: from,
            end: region.range().end,
        };
        let max_pages = u64::from(self.config.window_pages).min(budget - report.pages_scanned);
        let findings = scan::window(&self.config, &self.layout, &guard, within, max_pages)?;
        drop(guard);
        report.pages_scanned += findings.scanned;
        report.outcomes.add(&findings.outcomes);
        let looked_at = PageRange {
            start: from,
            end: findings.next,
        };
        let mergeable = findings.wishes.len();
        for (id, wishes) in by_region(findings.wishes) {
            if let Ok(region) = self.layout.region(id) {
                self.merge_region(&region, wishes, report)?;
            }
        }
        region.domain.sweep();
        trace::window(region.id, looked_at, findings.scanned, mergeable);
        Ok(findings.next)
    }

    /// What may be spent on mappings now.
    fn purse(&self) -> Purse {
        let regions = self.layout.regions();
        let used = regions.iter().map(|region| region.pages().seams()).sum();
        let pages = regions.iter().map(|region| region.range().len()).sum();
        self.vmas.purse(used, pages)
    }

    /// Merges what was found in one region, run by run, the lease given up in
    /// between.
    fn merge_region(
        &self,
        region: &Region<B>,
        wishes: Vec<Wish>,
        report: &mut ScanReport,
    ) -> Result<(), Error> {
        let cap = u64::from(self.config.pages_per_stop).min(region.max_stop());
        let mut outcomes = OutcomeCounts::default();
        let (wishes, held_back) = {
            let is_new = |frame| region.domain.sharers(frame) == 0;
            self.purse().admit(&region.pages(), wishes, is_new)
        };
        self.vmas.note_held_back(held_back.len() as u64);
        for wish in held_back {
            outcomes[Outcome::VmaBudget] += 1;
            region.note_outcome(wish.page, Outcome::VmaBudget);
        }
        let mut rest = &wishes[..];
        while !rest.is_empty() {
            let guard = region.lock()?;
            // A region leaves the layout before its pages are unshared, for
            // which this lease is needed: it must not be merged behind that.
            if self.layout.region(region.id).is_err() {
                break;
            }
            let run = merge::commit(&guard, rest, cap);
            for (wish, &outcome) in rest.iter().zip(&run) {
                outcomes[outcome] += 1;
                region.note_outcome(wish.page, outcome);
            }
            rest = &rest[run.len()..];
        }
        region.tally().outcomes.add(&outcomes);
        report.outcomes.add(&outcomes);
        trace::merges(region.id, &outcomes);
        Ok(())
    }
}

/// Wishes sorted by region and page.
fn by_region(wishes: Vec<(RegionId, Wish)>) -> BTreeMap<RegionId, Vec<Wish>> {
    let mut sorted: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (region, wish) in wishes {
        sorted.entry(region).or_default().push(wish);
    }
    for wishes in sorted.values_mut() {
        wishes.sort_unstable_by_key(|wish| wish.page);
    }
    sorted
}
