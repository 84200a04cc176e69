//! Registered memory of the model: each call, with the world's steps around it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Host;
use super::call::Call;
use super::store::SimStore;
use super::world::World;
use crate::backend::{Backing, Held, Memory, PageRun, Settled};
use crate::error::BackendError;
use crate::page::{FrameId, PageBuf, PageIndex, PageRange};

/// Registered memory of a [`SimGuest`](super::SimGuest). Dropping it ends the
/// registration.
pub struct SimMemory {
    host: Arc<Host>,
    region: usize,
    /// Where in the guest's memory it begins.
    first: u64,
    len: u64,
    attached: AtomicBool,
}

impl fmt::Debug for SimMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimMemory({}+{})", self.region, self.first)
    }
}

impl SimMemory {
    pub(super) const fn new(host: Arc<Host>, region: usize, first: u64, len: u64) -> Self {
        Self {
            host,
            region,
            first,
            len,
            attached: AtomicBool::new(true),
        }
    }

    /// A call that is about `range` of this memory, with the world's steps around
    /// it. The body is given the guest's pages.
    fn call<R>(&self, range: PageRange, body: impl FnOnce(&mut World, usize, PageRange) -> R) -> R {
        let inside = !range.is_empty() && range.end.0 <= self.len;
        let of_guest = PageRange {
            start: range.start.plus(self.first),
            end: range.end.plus(self.first),
        };
        let focus = inside.then_some((self.region, of_guest));
        let mut world = self.host.lock();
        world.demand(inside || range.is_empty(), || {
            format!("a call of {range} in {} pages of memory", self.len)
        });
        world.step(focus);
        let result = body(&mut world, self.region, of_guest);
        world.step(focus);
        result
    }

    /// A range of the guest's pages as one of this memory's.
    fn of_memory(&self, range: PageRange) -> PageRange {
        let page = |page: PageIndex| PageIndex(page.0 - self.first);
        PageRange {
            start: page(range.start),
            end: page(range.end),
        }
    }
}

impl Memory for SimMemory {
    type Store = SimStore;

    fn detach(&self) {
        if self.attached.swap(false, Ordering::Relaxed) {
            let range = PageRange::new(PageIndex(self.first), self.len);
            self.host.lock().detach(self.region, range);
        }
    }

    fn split(&self, page: PageIndex) -> Result<(Self, Self), BackendError> {
        let mut world = self.host.lock();
        let inside = page.0 > 0 && page.0 < self.len;
        world.demand(inside, || format!("split of {} pages at {page}", self.len));
        world.may_fail(Call::Split)?;
        let attached = self.attached.swap(false, Ordering::Relaxed);
        world.demand(attached, || "split of detached memory".into());
        world.regions[self.region].attached += 1;
        let part = |first, len| Self::new(Arc::clone(&self.host), self.region, first, len);
        Ok((
            part(self.first, page.0),
            part(self.first + page.0, self.len - page.0),
        ))
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn populated(
        &self,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> Result<PageIndex, BackendError> {
        let first = runs.len();
        let next = self.call(within, |world, region, within| {
            world.demand_range(Call::Populated, region, within);
            world.may_fail(Call::Populated)?;
            Ok(world.populated(region, within, max_pages, runs))
        })?;
        for run in &mut runs[first..] {
            run.range = self.of_memory(run.range);
        }
        Ok(PageIndex(next.0 - self.first))
    }

    fn hidden(&self, within: PageRange, _: &[PageRun]) -> Vec<PageRange> {
        self.call(within, |world, region, within| {
            let pages = world.regions[region].each(within);
            let hidden = pages.filter(|(_, page)| {
                page.own().is_some() && page.mapped(world.config.stop).is_none()
            });
            hidden
                .map(|(page, _)| self.of_memory(PageRange::one(page)))
                .collect()
        })
    }

    fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), BackendError> {
        self.call(PageRange::one(page), |world, region, range| {
            world.demand_range(Call::Read, region, range);
            world.read(region, range.start, buf)
        })
    }

    fn max_stop(&self) -> u64 {
        self.host.lock().config.max_stop
    }

    fn stop(&self, range: PageRange, backing: Backing) -> Result<Held, BackendError> {
        let held = self.call(range, |world, region, range| {
            world.stop(region, range, backing)
        })?;
        let refused = held.refused.into_iter();
        Ok(Held {
            held: held
                .held
                .iter()
                .map(|&range| self.of_memory(range))
                .collect(),
            refused: refused
                .map(|(page, why)| (PageIndex(page.0 - self.first), why))
                .collect(),
        })
    }

    fn read_held(
        &self,
        page: PageIndex,
        backing: Backing,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError> {
        self.call(PageRange::one(page), |world, region, range| {
            world.demand_backing(Call::ReadHeld, region, range, backing);
            world.demand_held(Call::ReadHeld, region, range, true);
            world.may_fail(Call::ReadHeld)?;
            buf.clone_from(&world.bytes(region, range.start));
            Ok(())
        })
    }

    fn share(
        &self,
        range: PageRange,
        backing: Backing,
        store: &SimStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        let number = store.number_on(&self.host).expect("a store of this host");
        self.call(range, |world, region, range| {
            world.share(region, range, backing, number, first)
        })
    }

    fn reuse(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, World::reuse)
    }

    fn zero(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        self.call(range, |world, region, range| {
            world.zero(region, range, backing)
        })
    }

    fn restore(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, World::restore)
    }

    fn rejoins(&self) -> bool {
        true
    }

    fn lift(&self, range: PageRange, backing: Backing) {
        self.call(range, |world, region, range| {
            world.lift(region, range, backing);
        });
        self.host.lifted.notify_all();
    }

    fn settle(&self, range: PageRange, backing: Backing) -> Settled {
        let settled = self.call(range, |world, region, range| {
            world.settle(region, range, backing)
        });
        self.host.lifted.notify_all();
        settled
    }

    fn populate(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, World::populate)
    }

    fn adopt(
        &self,
        range: PageRange,
        store: &SimStore,
        first: FrameId,
    ) -> Result<(), BackendError> {
        let number = store.number_on(&self.host).expect("a store of this host");
        self.call(range, |world, region, range| {
            world.adopt(region, range, number, first)
        })
    }

    fn vacate(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, World::vacate)
    }

    fn fill(&self, page: PageIndex, content: &PageBuf) -> Result<(), BackendError> {
        self.call(PageRange::one(page), |world, region, range| {
            world.fill_page(region, range.start, content)
        })
    }

    fn discard(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        self.call(range, |world, region, range| {
            world.discard(region, range, backing)
        })
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        self.detach();
    }
}
