//! A pass over all regions: which window is next, and what is done with what it
//! found.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering;

use super::Ksm;
use super::turn::{Patience, Turn};
use crate::backend::{Backend, Memory};
use crate::budget::{Admission, Purse};
use crate::error::Error;
use crate::merge::{self, Limits, Wish};
use crate::outcome::{Outcome, OutcomeCounts};
use crate::page::{PageIndex, PageRange};
use crate::region::{Region, RegionGuard, RegionId};
use crate::scan::{Ahead, Aim, Batch, Survey};
use crate::stats::ScanReport;
use crate::trace::{self, PassTally};

/// How often a pass goes after regions that came while it ran. A layout that
/// never stands still must not keep it from ending.
const ROUNDS: u32 = 2;

/// Pages of one region that are found before they are merged, at the most: what is
/// found together is merged in longer runs, which takes the lock of the address
/// space less often. Half as many frames, 16 MiB, may be filled meanwhile.
const BATCH: usize = 8192;

/// Where a pass stands. It names regions and keeps none: one that leaves is gone
/// at once, with its memory.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// What it has taken in; `None` between two passes.
    taken_in: Option<TakenIn>,
    /// How often it has taken in regions.
    rounds: u32,
    todo: VecDeque<(RegionId, PageIndex)>,
    /// Regions that were busy, to be waited for at the end of the pass.
    deferred: VecDeque<(RegionId, PageIndex)>,
    tally: PassTally,
}

/// The regions that a pass goes through: those of one edition of the layout.
#[derive(Debug)]
struct TakenIn {
    sequence: u64,
    /// But for those that were gone when it came to them, and may come back.
    regions: BTreeSet<RegionId>,
}

impl Pass {
    /// What is looked at next, and how patiently.
    fn next(&mut self) -> Option<((RegionId, PageIndex), Patience)> {
        let todo = self.todo.pop_front().map(|at| (at, Patience::Try));
        todo.or_else(|| Some((self.deferred.pop_front()?, Patience::Wait)))
    }

    /// A region was not there.
    fn miss(&mut self, id: RegionId) {
        if let Some(taken_in) = &mut self.taken_in {
            taken_in.regions.remove(&id);
        }
    }
}

impl<B: Backend> Ksm<B> {
    /// Looks at up to `budget` populated pages, merges what can be merged, and
    /// returns what it did: at the end of a pass over all regions, or when the
    /// budget is spent. The next call goes on where this one stopped.
    ///
    /// A region whose lease is taken is put off to the end of the pass, and
    /// waited for then. Regions that came while the pass ran are taken in before
    /// it ends.
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
            let next = scanner.journal().next();
            let Some(((id, from), patience)) = next else {
                if self.take_in_new(&mut scanner.journal()) {
                    report.second_traversals += 1;
                    continue;
                }
                let given_back = self.give_back()?;
                self.empty_all_sealed();
                self.end_pass(&mut scanner.journal(), given_back);
                report.passes = 1;
                break;
            };
            let Ok(region) = self.layout.region(id) else {
                scanner.journal().miss(id);
                continue;
            };
            let guard = match self.turn(&region, patience)? {
                Turn::Now(guard) => guard,
                Turn::Later => {
                    report.regions_deferred += 1;
                    scanner.journal().deferred.push_back((id, from));
                    continue;
                }
                Turn::NextPass => {
                    report.regions_skipped += 1;
                    continue;
                }
                Turn::Gone => continue,
            };
            if !self.layout.stands(&region) {
                // It left before its lease was taken.
                scanner.journal().miss(id);
                continue;
            }
            let next = self.scan_windows(guard, from, budget, Aim::Merge, &mut report)?;
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
        if pass.taken_in.is_some() {
            return;
        }
        for domain in self.layout.domains() {
            domain.start_pass();
        }
        self.vmas.start_pass();
        self.take_in(pass);
        pass.rounds = 1;
        pass.tally = PassTally::default();
    }

    /// Puts the regions on the list that it has not taken in before. (Their numbers do
    /// not tell: a region has its own before it is made, and it may have been away.)
    fn take_in(&self, pass: &mut Pass) {
        let before = pass.taken_in.take().map(|taken_in| taken_in.regions);
        let before = before.unwrap_or_default();
        let edition = self.layout.regions();
        let regions: BTreeSet<_> = edition.iter().map(|region| region.id).collect();
        let new = regions.difference(&before);
        pass.todo = new.map(|&id| (id, PageIndex(0))).collect();
        pass.taken_in = Some(TakenIn {
            sequence: edition.sequence,
            regions,
        });
    }

    /// Where regions have come since the pass took its list of them, takes them
    /// in. Returns whether there is something to look at now.
    fn take_in_new(&self, pass: &mut Pass) -> bool {
        let Some(taken_in) = &pass.taken_in else {
            return false;
        };
        if self.layout.is_last(taken_in.sequence) || pass.rounds == ROUNDS {
            return false;
        }
        pass.rounds += 1;
        self.take_in(pass);
        !pass.todo.is_empty()
    }

    fn end_pass(&self, pass: &mut Pass, given_back: u64) {
        pass.taken_in = None;
        for domain in self.layout.domains() {
            domain.sweep();
        }
        self.vmas.end_pass(given_back);
        self.full_scans.fetch_add(1, Ordering::Relaxed);
    }

    /// Scans a window under `guard`, and the windows behind it while nobody else
    /// wants the region, then merges what it found. Returns where the region's next
    /// window starts.
    pub(super) fn scan_windows(
        &self,
        guard: RegionGuard<'_, B>,
        from: PageIndex,
        budget: u64,
        aim: Aim,
        report: &mut ScanReport,
    ) -> Result<PageIndex, Error> {
        let region = guard.region();
        let plan = region.domain.plan();
        let survey = Survey {
            config: &self.config,
            layout: &self.layout,
            plan: &plan,
            aim,
        };
        let mut within = PageRange {
            start: from,
            end: region.range().end,
        };
        let to_come = within.len();
        let (mut batch, mut ahead) = (Batch::default(), Ahead::default());
        let mut next_guard = Some(guard);
        while let Some(guard) = next_guard {
            let left = budget - report.pages_scanned;
            let max_pages = u64::from(self.config.window_pages).min(left);
            ahead.continue_under(guard.epoch());
            let sight = ahead.window(guard.memory(), within, max_pages, left)?;
            let known = batch.wishes.len();
            let findings = survey.window(&guard, &sight, batch);
            drop(guard);
            report.pages_scanned += findings.scanned;
            report.outcomes.add(&findings.outcomes);
            let mergeable = findings.batch.wishes.len() - known;
            trace::window(region.id, sight.range, findings.scanned, mergeable);
            (within.start, batch) = (sight.range.end, findings.batch);
            let full = batch.wishes.len() >= BATCH || report.pages_scanned >= budget;
            next_guard = if within.is_empty() || full {
                None
            } else {
                self.go_on(region)?
            };
        }
        for (id, wishes) in by_region(batch.wishes) {
            if let Ok(region) = self.layout.region(id) {
                let parted = self.admit(&region, wishes, aim, to_come);
                self.merge_region(&region, parted, report)?;
            }
        }
        Ok(within.start)
    }

    /// The lease for one more window, if nobody else wants it. (With one lock for all
    /// regions, that is waited for.)
    fn go_on<'a>(&'a self, region: &'a Region<B>) -> Result<Option<RegionGuard<'a, B>>, Error> {
        Ok(match self.turn(region, Patience::Try)? {
            Turn::Now(guard) if self.layout.stands(region) => Some(guard),
            _ => None,
        })
    }

    /// What no run of `region` may exceed.
    pub(super) fn limits(&self, region: &Region<B>) -> Limits {
        Limits {
            pages_per_stop: u64::from(self.config.pages_per_stop).min(region.max_stop()),
            max_sharing: self.config.max_page_sharing,
        }
    }

    /// What may be spent on mappings now, where `to_come` pages of a region are still
    /// to be looked at.
    fn purse(&self, aim: Aim, to_come: u64) -> Purse {
        let used = self.mappings();
        match aim {
            Aim::Freeze => self.vmas.freeze_purse(used, to_come),
            Aim::Merge => {
                let regions = self.layout.regions();
                let pages = regions.iter().map(|region| region.range().len()).sum();
                self.vmas.purse(used, pages)
            }
        }
    }

    /// How many mappings merging has cost. Those of a region that is going are there
    /// until it has gone.
    pub(super) fn mappings(&self) -> u64 {
        let regions = self.retired.with_records(&self.layout);
        regions.iter().map(|region| region.pages().seams()).sum()
    }

    /// Parts `wishes` for one region into those that are worth their mappings, and
    /// those that are held back.
    fn admit(&self, region: &Region<B>, wishes: Vec<Wish>, aim: Aim, to_come: u64) -> Admission {
        let purse = self.purse(aim, to_come);
        let is_new = |frame| region.domain.sharers(frame) == 0;
        let parted = purse.admit(|| region.pages(), wishes, is_new);
        // What a clone does without, no pass will come back to.
        if aim == Aim::Merge {
            let held_back = parted.held_back.len() as u64;
            self.vmas.note_held_back(held_back, &parted.shortage);
        }
        parted
    }

    /// Merges what was found in one region, run by run, the lease given up in
    /// between.
    fn merge_region(
        &self,
        region: &Region<B>,
        parted: Admission,
        report: &mut ScanReport,
    ) -> Result<(), Error> {
        let limits = self.limits(region);
        let mut outcomes = OutcomeCounts::default();
        let mut held_back = parted.held_back;
        let mut rest = &parted.admitted[..];
        while !rest.is_empty() || !held_back.is_empty() {
            let guard = match self.turn(region, Patience::Wait)? {
                Turn::Now(guard) => guard,
                Turn::Later | Turn::NextPass | Turn::Gone => break,
            };
            // It must not be merged behind whoever unshares it to take it away.
            if !self.layout.stands(region) {
                break;
            }
            let mut of_run = OutcomeCounts::default();
            let mut note = |wish: &Wish, outcome| {
                of_run[outcome] += 1;
                region.note_outcome(wish.page, outcome);
            };
            for wish in held_back.drain(..) {
                note(&wish, Outcome::VmaBudget);
            }
            if !rest.is_empty() {
                let run = merge::commit(&guard, rest, limits);
                let done = rest.iter().zip(&run);
                done.for_each(|(wish, &outcome)| note(wish, outcome));
                rest = &rest[run.len()..];
            }
            if rest.is_empty() {
                guard.memory().rest();
            }
            // Under the lease: what is counted of a region after others have taken its
            // place is lost.
            region.tally().outcomes.add(&of_run);
            outcomes.add(&of_run);
        }
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
