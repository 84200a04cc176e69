//! Walking the reverse map: from a frame to the pages that map it, through its
//! rmap_items and the anon_vmas that they name (the kernel: `rmap_walk_ksm`).
//!
//! A walk looks up exactly the linear index of an item, so that it costs what
//! there is to find, however many regions an anon_vma has. It takes no lease and
//! holds no lock while it shows what it found, so what it shows may have changed
//! by then: who acts on it takes the region's lease and looks again.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::backend::Backend;
use crate::domain::Domain;
use crate::fingerprint::Fingerprint;
use crate::layout::Layout;
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{Class, Place, Region, RegionId, WalkCost};
use crate::rmap::ItemId;

/// How often an item is looked up again where regions were being replaced.
const TRIES: u32 = 8;

/// Which indexes of an anon_vma a walk looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The one that the item names.
    Exact,
    /// All, and then compares: what the kernel did. To be compared with.
    #[cfg(any(test, feature = "internals"))]
    Whole,
}

/// A walk over the pages that map one frame.
#[derive(Debug)]
pub(crate) struct Walk<'w, B: Backend> {
    pub(crate) layout: &'w Layout<B>,
    pub(crate) domain: &'w Domain<B>,
    pub(crate) reach: Reach,
}

impl<B: Backend> Walk<'_, B> {
    /// Shows the pages that map `frame` to `visit`, until it breaks. A region that
    /// is split meanwhile may be shown as it was and as it is.
    pub(crate) fn sharers(
        &self,
        frame: FrameId,
        mut visit: impl FnMut(&Arc<Region<B>>, PageIndex) -> ControlFlow<()>,
    ) -> WalkCost {
        self.items(
            frame,
            |_| None,
            |region, page, item| {
                if maps(region, page, frame, item) {
                    return visit(region, page);
                }
                ControlFlow::Continue(())
            },
        )
    }

    /// The pages that map `frame`, and those that somebody may be about to let map
    /// it: pages where it is counted, of regions whose lease is held. `leaving` may
    /// know regions that the layout does not.
    pub(crate) fn sharers_and_comers(
        &self,
        frame: FrameId,
        leaving: impl Fn(RegionId) -> Option<Arc<Region<B>>>,
    ) -> Vec<(Arc<Region<B>>, PageIndex)> {
        let mut found = Vec::new();
        self.items(frame, leaving, |region, page, item| {
            // In this order: who has given the lease up has written the record.
            if region.is_busy() || maps(region, page, frame, item) {
                found.push((Arc::clone(region), page));
            }
            ControlFlow::Continue(())
        });
        found
    }

    /// Shows the pages at the places of the items of `frame`, each with its item.
    fn items(
        &self,
        frame: FrameId,
        leaving: impl Fn(RegionId) -> Option<Arc<Region<B>>>,
        mut visit: impl FnMut(&Arc<Region<B>>, PageIndex, ItemId) -> ControlFlow<()>,
    ) -> WalkCost {
        let mut cost = WalkCost::default();
        let mut items = self.domain.items_of(frame).into_iter();
        let _ = items.try_for_each(|(item, place)| {
            let mut of_item = |region: &Arc<Region<B>>, page| visit(region, page, item);
            self.pages_at(place, &mut cost, &leaving, &mut of_item)
        });
        self.domain.note_walk(cost);
        cost
    }

    fn pages_at(
        &self,
        place: Place,
        cost: &mut WalkCost,
        leaving: &impl Fn(RegionId) -> Option<Arc<Region<B>>>,
        visit: &mut impl FnMut(&Arc<Region<B>>, PageIndex) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let (anon_vma, pgoff) = place.parts();
        let range = match self.reach {
            Reach::Exact => PageRange::one(pgoff),
            #[cfg(any(test, feature = "internals"))]
            Reach::Whole => PageRange::new(PageIndex(0), Place::MAX_PAGES),
        };
        let mut shown: Vec<RegionId> = Vec::new();
        for _ in 0..TRIES {
            // None where its last region has left meanwhile.
            let Some(anon_vma) = self.domain.anon_vmas.get(anon_vma) else {
                break;
            };
            let regions = self.layout.regions();
            let (mut lost, mut done) = (false, ControlFlow::Continue(()));
            cost.add(anon_vma.walk(range, |_, id| {
                let Some(region) = regions.get(id).cloned().or_else(|| leaving(id)) else {
                    lost = true;
                    return ControlFlow::Continue(());
                };
                if let Some(page) = region.page_at(pgoff).filter(|_| !shown.contains(&id)) {
                    shown.push(id);
                    done = visit(&region, page);
                }
                done
            }));
            done?;
            if !lost {
                break;
            }
            std::thread::yield_now();
        }
        ControlFlow::Continue(())
    }

    /// A page at `place` that the last pass or this one found unshared and with
    /// that fingerprint, in another region than `not`.
    pub(crate) fn unshared_at(
        &self,
        place: Place,
        fingerprint: Fingerprint,
        not: Option<RegionId>,
    ) -> Option<(RegionId, PageIndex)> {
        let (anon_vma, pgoff) = place.parts();
        let regions = self.layout.regions();
        let mut found = None;
        self.domain
            .anon_vmas
            .get(anon_vma)?
            .walk(PageRange::one(pgoff), |_, id| {
                let region = regions.get(id);
                let page = region.and_then(|region| region.page_at(pgoff));
                let Some((region, page)) = region.zip(page).filter(|_| not != Some(id)) else {
                    return ControlFlow::Continue(());
                };
                let record = region.pages().get(page);
                if record.class != Class::Unshared || record.fingerprint != Some(fingerprint) {
                    return ControlFlow::Continue(());
                }
                found = Some((id, page));
                ControlFlow::Break(())
            });
        found
    }
}

fn maps<B: Backend>(region: &Region<B>, page: PageIndex, frame: FrameId, item: ItemId) -> bool {
    let record = region.pages().get(page);
    record.frame == Some(frame) && record.class == Class::Merged(item)
}
