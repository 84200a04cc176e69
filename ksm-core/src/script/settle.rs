//! Scanning until nothing changes, and what the counters must be then.

use super::host::Host;
use super::oracle::{Cell, Census};
use super::run::{Applied, Runner};
use super::verify::name_of;
use crate::page::{PageRange, bytes_in};
use crate::stats::Stats;

/// Passes after which calm memory has settled. A page needs one pass to be seen,
/// one to be stable, one to be merged; a frame that went meanwhile, some more; and
/// where mappings are scarce, each pass is content with shorter runs than the last.
const MAX_PASSES: u32 = 32;

impl<H: Host> Runner<H> {
    /// In calm weather: until two passes in a row change nothing, and then the
    /// counters follow from the contents. Otherwise: a few passes.
    pub(super) fn settle(&mut self) -> Result<Applied, String> {
        if !self.is_calm() {
            let scans: Result<Vec<_>, _> = (0..4).map(|_| self.ksm.scan(u64::MAX)).collect();
            return self.accept(scans);
        }
        let mut last = None;
        let mut same = 0;
        for _ in 0..MAX_PASSES {
            let report = self.ksm.scan(u64::MAX).map_err(|error| error.to_string())?;
            if report.busy || report.passes != 1 {
                return Err(format!("not a pass: {report:?}"));
            }
            let now = Some(state(&self.ksm.stats()));
            same = if now == last { same + 1 } else { 0 };
            last = now;
            if same == 2 && self.host.config().max_vmas.is_some() {
                // What comes of it depends on what came first.
                return Ok(Applied::Done);
            }
            if same == 2 {
                self.verify_counters()?;
                return Ok(Applied::Done);
            }
        }
        Err(format!("not settled after {MAX_PASSES} passes"))
    }

    fn verify_counters(&self) -> Result<(), String> {
        (0..self.domains.len()).try_for_each(|domain| self.verify_domain(domain))?;
        // No memory is held for a frame that no page shows.
        let shared = self.ksm.stats().pages_shared;
        let held = self.ksm.store_bytes().map_err(|error| error.to_string())?;
        if held == bytes_in(shared) {
            return Ok(());
        }
        Err(format!("{shared} frames are shared, but {held} bytes held"))
    }

    fn verify_domain(&self, domain: usize) -> Result<(), String> {
        let Some(id) = self.domain(domain) else {
            return Ok(());
        };
        let census = self.census(domain)?;
        let stats = self.ksm.domain_stats(id);
        let stats = stats.map_err(|error| error.to_string())?;
        let merged = stats.pages_shared + stats.pages_sharing;
        let (duplicates, singles) = (census.duplicates(), census.singles());
        let demand = |holds: bool, what: &str| match holds {
            true => Ok(()),
            false => Err(format!(
                "d{domain}: {what}, but there are {duplicates} duplicates, {singles} singles, \
                 {} zero pages (and perhaps {}), {} unfit pages: {stats:?}",
                census.zeros, census.perhaps_zeros, census.unfit
            )),
        };
        // A page that lost its equals may keep its frame.
        demand(
            (duplicates..=duplicates + singles).contains(&merged),
            &format!("{merged} pages are merged"),
        )?;
        // An unfit page may have been a zero page, and have been written and swapped
        // out of sight since.
        let zeros = census.zeros..=census.zeros + census.perhaps_zeros + census.unfit;
        let found = stats.ksm_zero_pages;
        demand(zeros.contains(&found), &format!("{found} are zero"))?;
        // A page that is dropped behind the engine's back and read since is a
        // zero page that its record does not know of.
        let unsure = census.unfit + census.perhaps_zeros;
        let courting = census.courting();
        let alone = stats.pages_unshared + merged - duplicates;
        demand(
            (singles - courting..=singles + unsure).contains(&alone),
            &format!("{alone} are unshared or alone with their frame"),
        )?;
        demand(
            stats.pages_volatile <= unsure + courting,
            "pages of calm memory are volatile",
        )?;
        self.verify_explanations(domain, &census)
    }

    fn census(&self, domain: usize) -> Result<Census<'_>, String> {
        let mut census = Census::default();
        self.each_page(domain, |_, _, cell, fit| {
            census.count(cell, fit);
            Ok(())
        })?;
        Ok(census)
    }

    /// Each page that has an equal is merged; none is that must not be.
    fn verify_explanations(&self, domain: usize, census: &Census<'_>) -> Result<(), String> {
        self.each_page(domain, |region, page, cell, fit| {
            let Some(id) = self.regions[region].id else {
                return Ok(());
            };
            let found = self.ksm.explain(id, page);
            let found = found.map_err(|error| error.to_string())?;
            let merged = found.sharers > 0;
            let (must, may) = match cell {
                Cell::Written(bytes) if fit && !bytes.is_zero() => (census.equals(bytes) > 1, true),
                _ => (false, false),
            };
            if merged && !may || !merged && must {
                let name = name_of(region, page);
                return Err(format!("{name} must be merged: {must}, is: {found:?}"));
            }
            Ok(())
        })
    }

    /// Calls `look` for every page that is registered in a domain: with whether
    /// it can be merged at all.
    fn each_page<'a>(
        &'a self,
        domain: usize,
        mut look: impl FnMut(usize, crate::page::PageIndex, &'a Cell, bool) -> Result<(), String>,
    ) -> Result<(), String> {
        for (number, region) in self.regions.iter().enumerate() {
            let Some(id) = region.id.filter(|_| region.domain == domain) else {
                continue;
            };
            let memory = &self.memories[region.memory];
            for page in region.range().iter() {
                let found = self.ksm.explain(id, page);
                let found = found.map_err(|error| error.to_string())?;
                let unguarded = found.copied && !region.guarded;
                let held = self.is_held(number, PageRange::one(page));
                let in_memory = region.page_in_memory(page);
                let fit = !unguarded && !held && self.host.mergeable(&memory.guest, in_memory);
                let cell = match memory.oracle.cell(in_memory) {
                    // It stays what it was when the guard was taken.
                    Cell::Written(bytes) if held && bytes.is_zero() => &Cell::Dropped,
                    cell => cell,
                };
                look(number, page, cell, fit)?;
            }
        }
        Ok(())
    }
}

/// What must not change any more.
const fn state(stats: &Stats) -> [u64; 8] {
    [
        stats.pages_shared,
        stats.pages_sharing,
        stats.pages_unshared,
        stats.pages_volatile,
        stats.ksm_zero_pages,
        stats.frames_lingering,
        stats.vmas,
        stats.pages_given_back,
    ]
}
