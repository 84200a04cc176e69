//! Registered memory of the model: each call, with the world's steps around it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Host;
use super::call::Call;
use super::config::Storm;
use super::page::{Bytes, Hold, Write};
use super::store::SimStore;
use super::world::World;
use crate::backend::{Backing, Held, Memory, PageRun, Settled};
use crate::error::BackendError;
use crate::page::{FrameId, PAGE_SIZE, PageBuf, PageIndex, PageRange};

/// Registered memory of a [`SimGuest`](super::SimGuest). Dropping it ends the
/// registration.
pub struct SimMemory {
    host: Arc<Host>,
    region: usize,
    len: u64,
    attached: AtomicBool,
}

impl fmt::Debug for SimMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimMemory({})", self.region)
    }
}

impl SimMemory {
    pub(super) const fn new(host: Arc<Host>, region: usize, len: u64) -> Self {
        Self {
            host,
            region,
            len,
            attached: AtomicBool::new(true),
        }
    }

    /// A call that is about `range`, with the world's steps around it.
    fn call<R>(&self, range: PageRange, body: impl FnOnce(&mut World, usize) -> R) -> R {
        let focus = (!range.is_empty() && range.end.0 <= self.len).then_some((self.region, range));
        let mut world = self.host.lock();
        world.step(focus);
        let result = body(&mut world, self.region);
        world.step(focus);
        result
    }
}

impl World {
    fn populated(
        &self,
        region: usize,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> PageIndex {
        let first = runs.len();
        let mut left = max_pages;
        for (page, place) in self.regions[region].each(within) {
            let Some(state) = place.mapped(self.config.stop) else {
                continue;
            };
            if left == 0 {
                return page;
            }
            left -= 1;
            let huge = place.huge;
            match runs[first..].last_mut() {
                Some(run) if (run.range.end, run.state, run.huge) == (page, state, huge) => {
                    run.range.end = page.plus(1);
                }
                _ => runs.push(PageRun {
                    range: PageRange::one(page),
                    state,
                    huge,
                }),
            }
        }
        within.end
    }

    /// Reads a page while the world goes on: the second half of the copy may be
    /// of another time than the first.
    fn read(
        &mut self,
        region: usize,
        page: PageIndex,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError> {
        let waits = self.regions[region].read_waits(page);
        self.demand(!waits, || {
            format!("read of page {page} waits for itself: it is out")
        });
        self.may_fail(Call::Read)?;
        let place = self.regions[region].page(page);
        let absent = place.below.is_none() && matches!(place.bytes, Bytes::Nowhere);
        if absent && self.rng.chance(500) {
            return Err(BackendError::Host {
                call: "read",
                source: io::ErrorKind::NotFound.into(),
            });
        }
        let half = PAGE_SIZE / 2;
        let bytes = self.bytes(region, page);
        buf.bytes_mut()[..half].copy_from_slice(&bytes.bytes()[..half]);
        self.step(Some((region, PageRange::one(page))));
        let bytes = self.bytes(region, page);
        buf.bytes_mut()[half..].copy_from_slice(&bytes.bytes()[half..]);
        if !absent {
            self.touch(region, page);
        }
        Ok(())
    }

    fn populate(&mut self, region: usize, range: PageRange) -> Result<(), BackendError> {
        self.demand_backing(Call::Populate, region, range, Backing::Frame);
        // On stopped pages it would wait for itself.
        self.demand_held(Call::Populate, region, range, false);
        let verdict = self.may_fail(Call::Populate);
        let short = verdict.is_err() || self.rng.chance(self.storm.short);
        let done = match short {
            true => self.rng.below(range.len()),
            false => range.len(),
        };
        for page in PageRange::new(range.start, done).iter() {
            self.apply(region, page, &Write::Same);
        }
        verdict
    }

    fn discard(
        &mut self,
        region: usize,
        range: PageRange,
        backing: Backing,
    ) -> Result<(), BackendError> {
        self.demand_backing(Call::Discard, region, range, backing);
        self.demand_held(Call::Discard, region, range, false);
        self.may_fail(Call::Discard)?;
        if backing == Backing::Frame {
            self.remap(region, range, |_| (None, Bytes::Nowhere))?;
        } else {
            for page in range.iter() {
                self.apply(region, page, &Write::Drop);
            }
        }
        if self.storm != Storm::default() {
            let dropped = range.iter().map(|page| (page, None));
            self.regions[region].log.extend(dropped);
        }
        Ok(())
    }

    fn detach(&mut self, region: usize) {
        let place = &mut self.regions[region];
        place.options = None;
        let held = place
            .pages
            .iter()
            .filter(|page| page.hold != Hold::Free)
            .count();
        // After another verdict it is no wonder, and a second panic would hide it.
        self.demand(held == 0 || self.violation.is_some(), || {
            format!("memory is dropped with {held} pages stopped or out")
        });
    }
}

impl Memory for SimMemory {
    type Store = SimStore;

    fn detach(&self) {
        if self.attached.swap(false, Ordering::Relaxed) {
            self.host.lock().detach(self.region);
        }
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
        self.call(within, |world, region| {
            world.demand_range(Call::Populated, region, within);
            world.may_fail(Call::Populated)?;
            Ok(world.populated(region, within, max_pages, runs))
        })
    }

    fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), BackendError> {
        let range = PageRange::one(page);
        self.call(range, |world, region| {
            world.demand_range(Call::Read, region, range);
            world.read(region, page, buf)
        })
    }

    fn max_stop(&self) -> u64 {
        self.host.lock().config.max_stop
    }

    fn stop(&self, range: PageRange, backing: Backing) -> Result<Held, BackendError> {
        self.call(range, |world, region| world.stop(region, range, backing))
    }

    fn read_held(
        &self,
        page: PageIndex,
        backing: Backing,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError> {
        let range = PageRange::one(page);
        self.call(range, |world, region| {
            world.demand_backing(Call::ReadHeld, region, range, backing);
            world.demand_held(Call::ReadHeld, region, range, true);
            world.may_fail(Call::ReadHeld)?;
            buf.clone_from(&world.bytes(region, page));
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
        self.call(range, |world, region| {
            world.share(region, range, backing, number, first)
        })
    }

    fn reuse(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, |world, region| world.reuse(region, range))
    }

    fn zero(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        self.call(range, |world, region| world.zero(region, range, backing))
    }

    fn restore(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, |world, region| world.restore(region, range))
    }

    fn rejoins(&self) -> bool {
        true
    }

    fn lift(&self, range: PageRange, backing: Backing) {
        self.call(range, |world, region| world.lift(region, range, backing));
        self.host.lifted.notify_all();
    }

    fn settle(&self, range: PageRange, backing: Backing) -> Settled {
        let settled = self.call(range, |world, region| world.settle(region, range, backing));
        self.host.lifted.notify_all();
        settled
    }

    fn populate(&self, range: PageRange) -> Result<(), BackendError> {
        self.call(range, |world, region| world.populate(region, range))
    }

    fn discard(&self, range: PageRange, backing: Backing) -> Result<(), BackendError> {
        self.call(range, |world, region| world.discard(region, range, backing))
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        self.detach();
    }
}
