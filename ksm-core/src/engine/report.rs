//! What the engine tells of itself: counters, explanations, a check for tests.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Ksm;
use crate::backend::{Backend, FrameStore};
use crate::domain::{Domain, Walks};
use crate::error::Error;
use crate::outcome::Outcome;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Class, DomainId, RegionId, SpaceId};
use crate::stats::{MemoryStats, Stats};

/// What is known of one page: see [`Ksm::explain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// What became of the page when a pass last looked at it;
    /// [`Outcome::Pinned`] while a guard holds it.
    pub outcome: Outcome,
    /// The frame that it maps, by its number in the store of its trust domain;
    /// `None` if it is not merged.
    pub frame: Option<FrameId>,
    /// How many pages, this one among them, share its frame; 0 if it is not
    /// merged.
    pub sharers: u64,
    /// Whether it was merged, was written to since, and stands over a frame's
    /// mapping.
    pub copied: bool,
}

impl<B: Backend> Ksm<B> {
    /// The trust domains that there are now, in the order in which they were made.
    pub fn domains(&self) -> Vec<DomainId> {
        let domains = self.layout.domains();
        domains.iter().map(|domain| domain.id).collect()
    }

    /// The address spaces that there are now, each with its domain, in the order
    /// in which they were made.
    pub fn spaces(&self) -> Vec<(SpaceId, DomainId)> {
        self.layout.spaces()
    }

    /// Counters of everything.
    pub fn stats(&self) -> Stats {
        // A pass ends where no domain is, too.
        let mut sum = Stats {
            full_scans: self.full_scans.load(Ordering::Relaxed),
            ..Stats::default()
        };
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
        let (regions, gone) = self.retired.of_domain(&self.layout, domain);
        let Walks { walks, cost } = domain.walks();
        let mut stats = Stats {
            pages_shared: shared.pages_shared,
            pages_sharing: shared.pages_sharing,
            frames_lingering: shared.frames_lingering,
            stable_node_dups: shared.stable_node_dups,
            rmap_walks: walks,
            rmap_intervals: cost.visits.intervals,
            rmap_longest_hold: cost.longest_hold,
            metadata_bytes: shared.metadata_bytes,
            full_scans: self.full_scans.load(Ordering::Relaxed),
            cow_breaks: gone.memory.cow_breaks,
            vmas_given_back: gone.memory.vmas_given_back,
            pages_given_back: gone.memory.pages_given_back,
            pages_scanned: gone.pages_scanned,
            outcomes: gone.memory.outcomes,
            ..Stats::default()
        };
        for region in regions {
            let memory = region.stats();
            stats.pages_unshared += memory.pages_unshared;
            stats.pages_volatile += memory.pages_volatile;
            stats.ksm_zero_pages += memory.ksm_zero_pages;
            stats.vmas += memory.vmas;
            stats.cow_breaks += memory.cow_breaks;
            stats.vmas_given_back += memory.vmas_given_back;
            stats.pages_given_back += memory.pages_given_back;
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
        self.layout.domain_of(space)?;
        let (regions, gone) = self.retired.of_space(&self.layout, space);
        let mut sum = gone.memory;
        for region in regions {
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
        let frame = record.frame.filter(|_| merged);
        let sharers = frame.map_or(0, |frame| region.domain.sharers(frame));
        let pinned = region.pinned(PageRange::one(page)).contains(page);
        Ok(Explanation {
            outcome: if pinned {
                Outcome::Pinned
            } else {
                record.outcome
            },
            frame,
            sharers,
            copied: record.is_copied(),
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
            for region in self.layout.regions().of_domain(&domain) {
                for (page, record) in region.pages().seen(region.range()) {
                    let Some(frame) = record.frame else { continue };
                    let named = named.entry(frame).or_insert((0, Vec::new()));
                    named.0 += 1;
                    if !record.is_copied() {
                        named.1.push((region.id, page));
                    }
                }
            }
            for (&frame, (_, sharers)) in &mut named {
                let mut found = Vec::new();
                self.walk(&domain).sharers(frame, |region, page| {
                    found.push((region.id, page));
                    ControlFlow::Continue(())
                });
                found.sort_unstable();
                if found != *sharers {
                    return Err(format!(
                        "{frame}: a walk finds {found:?}, the records say {sharers:?}"
                    ));
                }
            }
            domain.check(&named)?;
        }
        Ok(())
    }
}
