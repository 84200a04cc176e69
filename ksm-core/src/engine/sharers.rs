//! Who shares a frame with whom.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use super::Ksm;
use crate::backend::Backend;
use crate::domain::Domain;
use crate::error::Error;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Class, DomainId, Region, RegionId, SpaceId};
use crate::walk::{Reach, Walk};

/// A page that maps a frame: see [`Ksm::sharers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sharer {
    /// The guest.
    pub space: SpaceId,
    /// The region.
    pub region: RegionId,
    /// The page.
    pub page: PageIndex,
}

impl Sharer {
    pub(super) const fn of<B: Backend>(region: &Region<B>, page: PageIndex) -> Self {
        Self {
            space: region.space,
            region: region.id,
            page,
        }
    }
}

/// How many frames each pair of guests share, the lower number first; a guest
/// with itself where pages of its own are equal. See [`Ksm::sharing`].
pub type SharingMatrix = BTreeMap<(SpaceId, SpaceId), u64>;

impl<B: Backend> Ksm<B> {
    pub(super) const fn walk<'w>(&'w self, domain: &'w Domain<B>) -> Walk<'w, B> {
        Walk {
            layout: &self.layout,
            domain,
            reach: Reach::Exact,
        }
    }

    /// The pages that map the frame of `page`, itself among them; none if it is
    /// not merged. Costs what there is to find
    /// ([`Config::max_page_sharing`](crate::Config::max_page_sharing) and the
    /// clones of each page).
    ///
    /// Takes no lease: what changes meanwhile may or may not be seen.
    ///
    /// # Errors
    /// [`Error::NoRegion`], [`Error::OutOfRange`].
    pub fn sharers(&self, region: RegionId, page: PageIndex) -> Result<Vec<Sharer>, Error> {
        let region = self.region_with(region, PageRange::one(page))?;
        let mut sharers = BTreeSet::new();
        if let Some(frame) = merged_frame(&region, page) {
            self.walk(&region.domain).sharers(frame, |sharing, page| {
                sharers.insert(Sharer::of(sharing, page));
                ControlFlow::Continue(())
            });
        }
        Ok(sharers.into_iter().collect())
    }

    /// What a walk over the sharers of `page` costs, for benchmarks.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn walk_figures(
        &self,
        region: RegionId,
        page: PageIndex,
        reach: Reach,
    ) -> Result<crate::internals::WalkFigures, Error> {
        let region = self.region_with(region, PageRange::one(page))?;
        let mut sharers = 0;
        let walk = Walk {
            reach,
            ..self.walk(&region.domain)
        };
        let cost = merged_frame(&region, page).map(|frame| {
            walk.sharers(frame, |_, _| {
                sharers += 1;
                ControlFlow::Continue(())
            })
        });
        let cost = cost.unwrap_or_default();
        Ok(crate::internals::WalkFigures {
            sharers,
            intervals: cost.visits.intervals,
            nodes: cost.visits.nodes,
            holds: cost.holds,
            longest_hold: cost.longest_hold,
            regions: region.anon_vma.len() as u64,
            depth: region.anon_vma.depth().into(),
        })
    }

    /// Who shares how much with whom in a trust domain, in frames. A walk for
    /// each shared frame: about a microsecond for each merged page.
    ///
    /// # Errors
    /// [`Error::NoDomain`].
    pub fn sharing(&self, domain: DomainId) -> Result<SharingMatrix, Error> {
        let domain = self.layout.domain(domain)?;
        let mut matrix = SharingMatrix::new();
        let mut next = FrameId(0);
        while let Some(frame) = domain.shared_from(next) {
            let mut pages: BTreeMap<SpaceId, u64> = BTreeMap::new();
            self.walk(&domain).sharers(frame, |region, _| {
                *pages.entry(region.space).or_default() += 1;
                ControlFlow::Continue(())
            });
            for (&one, &of_one) in &pages {
                for (&other, _) in pages.range(one..) {
                    if one != other || of_one > 1 {
                        *matrix.entry((one, other)).or_default() += 1;
                    }
                }
            }
            next = frame.plus(1);
        }
        Ok(matrix)
    }
}

/// The frame that a page maps as shared.
pub(super) fn merged_frame<B: Backend>(region: &Region<B>, page: PageIndex) -> Option<FrameId> {
    let record = region.pages().get(page);
    let merged = matches!(record.class, Class::Merged(_));
    record.frame.filter(|_| merged)
}
