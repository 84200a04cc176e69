//! Regions that are split, cloned, moved, taken over, dropped.

use std::sync::Arc;

use super::content::Content;
use super::host::Host;
use super::oracle::{Cell, Oracle};
use super::run::{Applied, Memory, Outcome, Region, Runner, Space};
use crate::backend::RegionOptions;
use crate::engine::Ksm;
use crate::error::Error;
use crate::page::{PageIndex, PageRange};

impl<H: Host> Runner<H> {
    pub(super) fn split(&mut self, region: usize, page: PageIndex) -> Outcome {
        let Some(id) = self.region(region) else {
            return Ok(Applied::Skipped);
        };
        if self.memory(region, PageRange::one(page)).is_none() {
            return Ok(Applied::Skipped);
        }
        let done = self.ksm.split(id, page);
        if page == PageIndex(0) {
            return match done {
                Err(Error::OutOfRange { .. }) => Ok(Applied::Skipped),
                done => Err(format!("a split into nothing and all: {done:?}")),
            };
        }
        let old = &self.regions[region];
        let part = |id, first, pages| Region {
            id,
            domain: old.domain,
            guarded: old.guarded,
            memory: old.memory,
            first: old.first + first,
            pages,
        };
        let ids = match done {
            Ok(ids) => ids.map(Some),
            Err(_) => [None; 2],
        };
        let parts = [
            part(ids[0], 0, page.0),
            part(ids[1], page.0, old.pages - page.0),
        ];
        self.regions.extend(parts);
        if done.is_ok() {
            self.regions[region].id = None;
        }
        self.accept(done)
    }

    /// Makes a call with some memories' vCPUs paused.
    fn paused<T>(&mut self, memories: &[usize], call: impl FnOnce(&Ksm<H::Backend>) -> T) -> T {
        let mut pause = |paused| {
            for &memory in memories {
                self.host.pause(&self.memories[memory].guest, paused);
            }
        };
        pause(true);
        let done = call(&self.ksm);
        pause(false);
        done
    }

    /// Fresh memory that is to read as a region does.
    fn memory_like(&mut self, region: usize) -> usize {
        let Region {
            memory,
            first,
            pages,
            ..
        } = self.regions[region];
        let old = &self.memories[memory].oracle;
        let mut oracle = Oracle::new(pages);
        for page in oracle.range().iter() {
            // Pages of zeros are not there at all.
            let cell = match old.cell(page.plus(first)) {
                Cell::Written(bytes) if bytes.is_zero() => &Cell::Dropped,
                cell => cell,
            };
            oracle.set(page, cell.clone());
        }
        let guest = self.host.guest(pages);
        self.memories.push(Memory { guest, oracle });
        self.memories.len() - 1
    }

    pub(super) fn clone_region(&mut self, space: usize, region: usize) -> Outcome {
        if region >= self.regions.len() {
            return Ok(Applied::Skipped);
        }
        let memory = self.memory_like(region);
        let guarded = self.regions[region].guarded;
        self.name_region(memory, guarded);
        let (Some(id), Some(Some(space))) = (self.region(region), self.spaces.get(space)) else {
            self.memories[memory].oracle.clear();
            return Ok(Applied::Skipped);
        };
        let (other_domain, domain) = (space.domain != self.regions[region].domain, space.domain);
        let source = self.host.source(&self.memories[memory].guest);
        let options = RegionOptions {
            dma_guarded: guarded,
        };
        let paused = [self.regions[region].memory, memory];
        let space = space.id;
        let done = self.paused(&paused, |ksm| ksm.fork_region(id, space, source, options));
        let clone = self.regions.last_mut().expect("named above");
        clone.id = done.as_ref().ok().copied();
        clone.domain = domain;
        if done.is_err() {
            self.memories[memory].oracle.clear();
        }
        match done {
            Err(Error::OtherDomain(_)) if other_domain => Ok(Applied::Skipped),
            Ok(_) if other_domain => Err("a clone in another trust domain".into()),
            done => self.accept(done),
        }
    }

    pub(super) fn move_region(&mut self, region: usize) -> Outcome {
        if region >= self.regions.len() {
            return Ok(Applied::Skipped);
        }
        let memory = self.memory_like(region);
        let (guarded, domain) = (self.regions[region].guarded, self.regions[region].domain);
        self.name_region(memory, guarded);
        let Some(id) = self.region(region) else {
            self.memories[memory].oracle.clear();
            return Ok(Applied::Skipped);
        };
        let held = self.is_held(region, self.regions[region].range());
        let source = self.host.source(&self.memories[memory].guest);
        let paused = [self.regions[region].memory, memory];
        let done = self.paused(&paused, |ksm| ksm.move_region(id, source));
        let moved = self.regions.last_mut().expect("named above");
        moved.id = done.as_ref().ok().copied();
        moved.domain = domain;
        if done.is_err() {
            self.memories[memory].oracle.clear();
        } else {
            let old = &mut self.regions[region];
            old.id = None;
            let left = old.in_memory(old.range());
            let Memory { guest, oracle } = &mut self.memories[old.memory];
            for page in left.iter() {
                // Empty, unless the host refused.
                let bytes = self.host.read(guest, page);
                let empty = bytes.is_zero() || !self.trouble;
                oracle.set(
                    page,
                    match empty {
                        true => Cell::Dropped,
                        false => Cell::Written(Arc::new(bytes)),
                    },
                );
            }
        }
        match done {
            Err(Error::Pinned { .. }) if held => Ok(Applied::Skipped),
            Ok(_) if held => Err("moved, though guards hold pages".into()),
            done => self.accept(done),
        }
    }

    pub(super) fn take_over(
        &mut self,
        space: usize,
        pages: u64,
        content: Content,
        guarded: bool,
    ) -> Outcome {
        if pages == 0 || pages > u64::from(u32::MAX) {
            return Err(format!("a region of {pages} pages"));
        }
        let guest = self.host.guest(pages);
        let mut oracle = Oracle::new(pages);
        for (nth, page) in (0..).zip(oracle.range().iter()) {
            let bytes = content.plus(nth).bytes();
            self.host.write(&guest, page, &bytes);
            oracle.set(page, Cell::Written(Arc::from(bytes)));
        }
        self.memories.push(Memory { guest, oracle });
        let memory = self.memories.len() - 1;
        self.name_region(memory, guarded);
        let Some(Some(Space { id, domain })) = self.spaces.get(space) else {
            return Ok(Applied::Skipped);
        };
        let options = RegionOptions {
            dma_guarded: guarded,
        };
        let source = self.host.source(&self.memories[memory].guest);
        let (id, domain) = (*id, *domain);
        let done = self.paused(&[memory], |ksm| ksm.take_over(id, source, options));
        let region = self.regions.last_mut().expect("named above");
        region.id = done.as_ref().ok().copied();
        region.domain = domain;
        // Zero pages of its making are not there, and count as nobody's.
        self.memories[memory].oracle.blur_all();
        if done.is_err() {
            // It may stand over frames, as memory that is not guarded does.
            region.guarded = false;
        }
        self.accept(done)
    }

    pub(super) fn drop_space(&mut self, space: usize) -> Outcome {
        let Some(&Some(Space { id, .. })) = self.spaces.get(space) else {
            return Ok(Applied::Skipped);
        };
        let of_space = self.ksm.regions_of(id).map_err(|error| error.to_string())?;
        let done = self.despite_guards(|ksm| ksm.drop_space(id))?;
        if done.is_ok() {
            self.spaces[space] = None;
        }
        for region in &self.regions {
            if region.id.is_some_and(|id| of_space.contains(&id)) {
                let Memory { guest, oracle } = &mut self.memories[region.memory];
                for page in region.in_memory(region.range()).iter() {
                    // Where it failed it has dropped some, or none.
                    let gone = done.is_ok() || self.host.read(guest, page).is_zero();
                    if gone {
                        oracle.set(page, Cell::Dropped);
                    }
                }
            }
        }
        self.forget_regions();
        self.accept(done)
    }

    pub(super) fn unshare(&mut self, region: usize, page: PageIndex) -> Outcome {
        let (Some(id), Some(_)) = (
            self.region(region),
            self.memory(region, PageRange::one(page)),
        ) else {
            return Ok(Applied::Skipped);
        };
        let sharers = self.ksm.sharers(id, page);
        let sharers = sharers.map_err(|error| error.to_string())?;
        let done = self.ksm.unshare_frame(id, page);
        if done.is_ok() {
            for sharer in sharers {
                let found = self.ksm.explain(sharer.region, sharer.page);
                let found = found.map_err(|error| error.to_string())?;
                if found.sharers > 0 {
                    return Err(format!("{sharer:?} is shared after its unsharing"));
                }
            }
        }
        self.accept(done)
    }
}
