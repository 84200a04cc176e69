//! [`Ksm`]: the engine, and all control flow.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, FrameStore, RegionOptions};
use crate::budget::{Purse, VmaBudget};
use crate::config::Config;
use crate::domain::Domain;
use crate::error::Error;
use crate::fingerprint::Keys;
use crate::layout::Layout;
use crate::merge::{self, Wish};
use crate::outcome::{Outcome, OutcomeCounts};
use crate::page::{PageIndex, PageRange};
use crate::region::{Class, DomainId, Lease, Region, RegionGuard, RegionId, SpaceId};
use crate::scan;
use crate::stats::{MemoryStats, ScanReport, Stats};
use crate::sync::{ThreadId, current};
use crate::unshare;

/// What an unmerge is to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Everything.
    All,
    /// One guest.
    Space(SpaceId),
    /// Some pages of one region.
    Pages(RegionId, PageRange),
}

/// What is known of one page: see [`Ksm::explain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// What became of the page when a pass last looked at it.
    pub outcome: Outcome,
    /// How many pages, this one among them, share its frame; 0 if it is not
    /// merged.
    pub sharers: u64,
    /// Whether it was merged, was written to since, and stands over a frame's
    /// mapping.
    pub copied: bool,
}

/// The engine: merges equal pages of the guests registered with it.
///
/// It has no thread and no clock: the embedder calls [`Ksm::scan`], from one
/// thread at a time, as often as it wants memory merged, and may call everything
/// else from any thread meanwhile.
///
/// Dropping the engine leaves merged pages merged; guests go on, and writes to
/// such pages are copied by the host as before. To have plain memory again,
/// [`Ksm::unregister`] it first.
#[derive(Debug)]
pub struct Ksm<B: Backend> {
    backend: B,
    config: Config,
    layout: Layout<B>,
    /// The right to scan; what it carries is where the pass stands.
    scanner: Lease<Pass>,
    full_scans: AtomicU64,
    vmas: VmaBudget,
    retired: crate::sync::Mutex<BTreeMap<DomainId, Retired>>,
}

/// Where a pass stands.
#[derive(Debug, Default)]
struct Pass {
    running: bool,
    todo: VecDeque<(RegionId, PageIndex)>,
    /// Regions that were busy, to be waited for at the end of the pass.
    deferred: VecDeque<(RegionId, PageIndex)>,
}

/// What regions that are gone had counted.
#[derive(Clone, Copy, Debug, Default)]
struct Retired {
    cow_breaks: u64,
    pages_scanned: u64,
    outcomes: OutcomeCounts,
}

/// Nothing is stopped or out, and nothing will be, while this lives: see
/// [`Ksm::quiesce`].
#[derive(Debug)]
#[must_use = "the engine goes on when this is dropped"]
pub struct Quiesced<'a, B: Backend> {
    ksm: &'a Ksm<B>,
    holder: ThreadId,
    regions: Vec<Arc<Region<B>>>,
}

impl<B: Backend> Drop for Quiesced<'_, B> {
    fn drop(&mut self) {
        for region in &self.regions {
            drop(region.evict(self.holder));
        }
        drop(self.ksm.scanner.evict(self.holder));
    }
}

impl<B: Backend> Ksm<B> {
    /// An engine with nothing registered.
    ///
    /// # Errors
    /// [`Error::Config`] when a setting makes no sense.
    pub fn new(backend: B, config: Config) -> Result<Self, Error> {
        config.validate()?;
        let spare = || backend.free_vmas().map(|free| free / 4 * 3);
        Ok(Self {
            vmas: VmaBudget::new(config.max_vmas.or_else(spare)),
            backend,
            config,
            layout: Layout::default(),
            scanner: Lease::new(),
            full_scans: AtomicU64::new(0),
            retired: crate::sync::Mutex::default(),
        })
    }

    /// The host side.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    /// Makes a trust domain: guests in it may share frames, with nobody else.
    /// One domain a guest unless guests trust one another: who shares a page can
    /// learn from the time a write takes that somebody else has it too.
    ///
    /// # Errors
    /// When the host has no store to give.
    pub fn create_domain(&self) -> Result<DomainId, Error> {
        let store = self.backend.open_store()?;
        let keys = Keys::new(self.config.seed)?;
        Ok(self.layout.add_domain(|id| Domain::new(id, keys, store)))
    }

    /// Makes an address space, which is a guest, in a trust domain.
    ///
    /// # Errors
    /// [`Error::NoDomain`].
    pub fn create_space(&self, domain: DomainId) -> Result<SpaceId, Error> {
        self.layout.add_space(domain)
    }

    /// Takes a piece of a guest's memory under care. It is first looked at by
    /// the next pass.
    ///
    /// # Errors
    /// [`Error::Register`] when this memory can never be merged safely.
    pub fn register(
        &self,
        space: SpaceId,
        source: B::Source,
        options: RegionOptions,
    ) -> Result<RegionId, Error> {
        let domain = self.layout.domain_of(space)?;
        let memory = self.backend.attach(source, options)?;
        Ok(self
            .layout
            .add_region(|id| Region::new(id, space, domain, memory, options)))
    }

    /// Gives every page of a region a copy of its own, puts plain memory in
    /// place of mappings of frames, and forgets the region. Zero pages stay as
    /// the host made them. To be rid of the content as well, [`Ksm::discard`] it
    /// first: that is quick.
    ///
    /// In a region that is not declared `dma_guarded`, mappings of frames stay
    /// below the copies: such memory must not be dropped by `MADV_DONTNEED`
    /// later, which would show frames again, only unmapped or mapped anew.
    ///
    /// # Errors
    /// [`Error::StillShared`] and [`Error::Backend`] when the host has no memory
    /// for the copies: the region stays registered, and the call can be repeated.
    pub fn unregister(&self, region: RegionId) -> Result<(), Error> {
        let region = self.layout.region(region)?;
        // From here on no scan finds it; it comes back if this fails.
        self.layout.remove_region(region.id);
        let done = self.undo(&region);
        match done {
            Ok(()) => self.retire(&region),
            Err(_) => self.layout.put_back(&region),
        }
        done
    }

    fn undo(&self, region: &Region<B>) -> Result<(), Error> {
        unshare::unmerge(region, region.range())?;
        if region.options.dma_guarded {
            unshare::restore(region, region.range())?;
        }
        Ok(())
    }

    fn retire(&self, region: &Region<B>) {
        for (_, record) in region.pages().seen(region.range()) {
            if let Some(frame) = record.frame {
                region.domain.abandon(frame);
            }
        }
        let tally = *region.tally();
        let mut retired = self.retired.lock();
        let sums = retired.entry(region.domain.id).or_default();
        sums.cow_breaks += tally.cow_breaks;
        sums.pages_scanned += tally.pages_scanned;
        sums.outcomes.add(&tally.outcomes);
    }

    /// Unregisters what is left of a guest and forgets it.
    ///
    /// # Errors
    /// As [`Ksm::unregister`].
    pub fn remove_space(&self, space: SpaceId) -> Result<(), Error> {
        for region in self.layout.regions_of(space)? {
            self.unregister(region.id)?;
        }
        self.layout.remove_space(space);
        Ok(())
    }

    /// Forgets a trust domain and its store.
    ///
    /// # Errors
    /// [`Error::NoDomain`], [`Error::DomainInUse`].
    pub fn remove_domain(&self, domain: DomainId) -> Result<(), Error> {
        self.layout.remove_domain(domain)?;
        self.retired.lock().remove(&domain);
        Ok(())
    }

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
            let next = self.scan_window(guard, from, budget, &mut report)?;
            if next < region.range().end {
                scanner.journal().todo.push_front((id, next));
            }
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
        for (id, wishes) in by_region(findings.wishes) {
            if let Ok(region) = self.layout.region(id) {
                self.merge_region(&region, wishes, report)?;
            }
        }
        region.domain.sweep();
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
        let (wishes, held_back) = self.purse().admit(&region.pages(), wishes);
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
            let (run, behind) = rest.split_at(merge::run_len(&guard, rest, cap));
            for (wish, outcome) in run.iter().zip(merge::commit(&guard, run)) {
                outcomes[outcome] += 1;
                region.note_outcome(wish.page, outcome);
            }
            rest = behind;
        }
        region.tally().outcomes.add(&outcomes);
        report.outcomes.add(&outcomes);
        Ok(())
    }

    /// Gives pages copies of their own, so that nothing of `target` is shared.
    /// Returns how many were shared. What is scanned again may be merged again.
    ///
    /// # Errors
    /// [`Error::StillShared`] when the host refuses copies; what was unshared
    /// stays so.
    pub fn unmerge(&self, target: Target) -> Result<u64, Error> {
        let regions = match target {
            Target::All => self.layout.regions(),
            Target::Space(space) => self.layout.regions_of(space)?,
            Target::Pages(region, range) => {
                let region = self.region_with(region, range)?;
                return unshare::unmerge(&region, range);
            }
        };
        let mut unshared = 0;
        for region in regions {
            unshared += unshare::unmerge(&region, region.range())?;
        }
        Ok(unshared)
    }

    /// Drops the content of pages, as for a balloon or free page reporting: the
    /// guest reads zeros from here on. Use this in place of `MADV_DONTNEED`,
    /// which would show a stale frame on pages that were merged.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], and [`Error::Backend`] when the host refuses; the
    /// pages in front of the one refused are dropped then.
    pub fn discard(&self, region: RegionId, range: PageRange) -> Result<(), Error> {
        let region = self.region_with(region, range)?;
        unshare::discard(&region, range)
    }

    /// Waits until nothing is stopped or out, and holds the engine still: no
    /// pass goes on and no page is changed by it until the guard is dropped. For
    /// snapshots, migration, fork, and handing descriptors to others.
    ///
    /// # Errors
    /// [`Error::Quiesced`] when this thread holds it still already.
    pub fn quiesce(&self) -> Result<Quiesced<'_, B>, Error> {
        // The leases are kept by forgetting their guards, and freed by taking
        // them over from this thread.
        std::mem::forget(self.scanner.lock()?);
        let mut quiesced = Quiesced {
            ksm: self,
            holder: current().id(),
            regions: Vec::new(),
        };
        for region in self.layout.regions() {
            std::mem::forget(region.lock()?);
            quiesced.regions.push(region);
        }
        Ok(quiesced)
    }

    /// Ends what a thread had under way that is gone for good without having
    /// unwound: whatever it had stopped or out runs on, and its leases are free
    /// again. Returns how many leases it held. The thread must never run again.
    pub fn recover(&self, dead: ThreadId) -> u64 {
        let mut leases = 0;
        for region in self.layout.regions() {
            if let Some(guard) = region.evict(dead) {
                guard.land();
                leases += 1;
            }
        }
        if let Some(scanner) = self.scanner.evict(dead) {
            *scanner.journal() = Pass::default();
            for domain in self.layout.domains() {
                domain.sweep();
            }
            leases += 1;
        }
        leases
    }

    /// Counters of everything.
    pub fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        for domain in self.layout.domains() {
            sum.add(&self.stats_of(&domain));
        }
        sum
    }

    /// Counters of one trust domain.
    ///
    /// # Errors
    /// [`Error::NoDomain`].
    pub fn domain_stats(&self, domain: DomainId) -> Result<Stats, Error> {
        let domain = self.layout.domain(domain)?;
        Ok(self.stats_of(&domain))
    }

    fn stats_of(&self, domain: &Arc<Domain<B>>) -> Stats {
        let shared = domain.shared();
        let retired = self.retired.lock().get(&domain.id).copied();
        let retired = retired.unwrap_or_default();
        let mut stats = Stats {
            pages_shared: shared.pages_shared,
            pages_sharing: shared.pages_sharing,
            frames_lingering: shared.frames_lingering,
            stable_node_dups: shared.stable_node_dups,
            metadata_bytes: shared.metadata_bytes,
            full_scans: self.full_scans.load(Ordering::Relaxed),
            cow_breaks: retired.cow_breaks,
            pages_scanned: retired.pages_scanned,
            outcomes: retired.outcomes,
            ..Stats::default()
        };
        let mut regions = self.layout.regions();
        regions.retain(|region| Arc::ptr_eq(&region.domain, domain));
        for region in regions {
            let memory = region.stats();
            stats.pages_unshared += memory.pages_unshared;
            stats.pages_volatile += memory.pages_volatile;
            stats.ksm_zero_pages += memory.ksm_zero_pages;
            stats.vmas += memory.vmas;
            stats.cow_breaks += memory.cow_breaks;
            stats.outcomes.add(&memory.outcomes);
            stats.pages_scanned += region.tally().pages_scanned;
            stats.metadata_bytes += region.pages().bytes();
        }
        stats
    }

    /// Counters of one guest.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn space_stats(&self, space: SpaceId) -> Result<MemoryStats, Error> {
        let mut sum = MemoryStats::default();
        for region in self.layout.regions_of(space)? {
            sum.add(&region.stats());
        }
        Ok(sum)
    }

    /// Counters of one region.
    ///
    /// # Errors
    /// [`Error::NoRegion`].
    pub fn region_stats(&self, region: RegionId) -> Result<MemoryStats, Error> {
        Ok(self.layout.region(region)?.stats())
    }

    /// Bytes of memory that the stores of all domains hold.
    ///
    /// # Errors
    /// When the host cannot say.
    pub fn store_bytes(&self) -> Result<u64, Error> {
        let mut bytes = 0;
        for domain in self.layout.domains() {
            bytes += domain.store.allocated_bytes()?;
        }
        Ok(bytes)
    }

    /// Why a page is, or is not, merged.
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::OutOfRange`].
    pub fn explain(&self, region: RegionId, page: PageIndex) -> Result<Explanation, Error> {
        let region = self.region_with(region, PageRange::one(page))?;
        let record = region.pages().get(page);
        let merged = matches!(record.class, Class::Merged(_));
        let sharers = match record.frame {
            Some(frame) if merged => region.domain.sharers(frame),
            _ => 0,
        };
        Ok(Explanation {
            outcome: record.outcome,
            sharers,
            copied: record.is_copied(),
        })
    }

    fn region_with(&self, id: RegionId, range: PageRange) -> Result<Arc<Region<B>>, Error> {
        let region = self.layout.region(id)?;
        if range.intersection(region.range()) == range {
            return Ok(region);
        }
        Err(Error::OutOfRange {
            region: id,
            range,
            pages: region.range().len(),
        })
    }

    /// Checks that trees, reverse map, records and stores agree with one
    /// another, down to the bytes of every frame. For tests: slow, and only
    /// meaningful while no other call is under way.
    ///
    /// # Errors
    /// What disagrees.
    pub fn check(&self) -> Result<(), String> {
        for domain in self.layout.domains() {
            let mut named = HashMap::new();
            let mut regions = self.layout.regions();
            regions.retain(|region| Arc::ptr_eq(&region.domain, &domain));
            for region in regions {
                for (_, record) in region.pages().seen(region.range()) {
                    let Some(frame) = record.frame else { continue };
                    let (names, sharers) = named.entry(frame).or_insert((0, 0));
                    *names += 1;
                    *sharers += u32::from(!record.is_copied());
                }
            }
            domain.check(&named)?;
        }
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
