//! Making and removing domains, spaces and regions.

use super::host::Host;
use super::oracle::Oracle;
use super::run::{Applied, Memory, Outcome, Region, Runner, Space};
use crate::backend::RegionOptions;
use crate::error::Error;

impl<H: Host> Runner<H> {
    pub(super) fn add_domain(&mut self) -> Outcome {
        let domain = self.ksm.create_domain();
        self.domains.extend(domain.as_ref().ok().copied().map(Some));
        self.accept(domain)
    }

    pub(super) fn add_space(&mut self, domain: usize) -> Outcome {
        let Some(id) = self.domain(domain) else {
            // Names go on, so that later lines mean what they meant.
            self.spaces.push(None);
            return Ok(Applied::Skipped);
        };
        let space = self.ksm.create_space(id);
        self.spaces
            .push(space.as_ref().ok().map(|&id| Space { id, domain }));
        self.accept(space)
    }

    pub(super) fn forget(&mut self, domain: usize) -> Outcome {
        let Some(id) = self.domain(domain) else {
            return Ok(Applied::Skipped);
        };
        let mut spaces = self.spaces.iter().flatten();
        let used = spaces.any(|space| space.domain == domain);
        match self.ksm.remove_domain(id) {
            Ok(()) if !used => {
                self.domains[domain] = None;
                match self.ksm.domain_stats(id) {
                    Err(Error::NoDomain(_)) => Ok(Applied::Done),
                    found => Err(format!("d{domain} is forgotten: {found:?}")),
                }
            }
            Err(error @ Error::DomainInUse(_)) if used => Ok(Applied::Refused(error.to_string())),
            done => Err(format!("d{domain}, in use: {used}, is forgotten: {done:?}")),
        }
    }

    pub(super) fn register_fresh(&mut self, space: usize, pages: u64, guarded: bool) -> Outcome {
        if pages == 0 || pages > u64::from(u32::MAX) {
            return Err(format!("a region of {pages} pages"));
        }
        self.memories.push(Memory {
            guest: self.host.guest(pages),
            oracle: Oracle::new(pages),
        });
        self.register(space, self.memories.len() - 1, guarded)
    }

    /// Unregistered memory, once more. Refusal is in order where it still
    /// stands over frames, and while it is registered.
    pub(super) fn register_again(&mut self, space: usize, region: usize, guarded: bool) -> Outcome {
        let Some(old) = self.regions.get(region) else {
            return Ok(Applied::Skipped);
        };
        let memory = old.memory;
        let users = || self.regions.iter().filter(|user| user.memory == memory);
        let used = users().any(|user| user.id.is_some());
        let unguarded = users().any(|user| !user.guarded);
        if !used {
            let oracle = &mut self.memories[memory].oracle;
            oracle.range().iter().for_each(|page| oracle.blur(page));
        }
        match self.register(space, memory, guarded) {
            Err(reason) if used || unguarded => Ok(Applied::Refused(reason)),
            outcome => outcome,
        }
    }

    /// A region over all of a memory that is about to be registered.
    pub(super) fn name_region(&mut self, memory: usize, guarded: bool) {
        self.regions.push(Region {
            id: None,
            domain: 0,
            guarded,
            memory,
            first: 0,
            pages: self.memories[memory].oracle.range().len(),
        });
    }

    fn register(&mut self, space: usize, memory: usize, guarded: bool) -> Outcome {
        self.name_region(memory, guarded);
        let Some(Some(space)) = self.spaces.get(space) else {
            return Ok(Applied::Skipped);
        };
        let source = self.host.source(&self.memories[memory].guest);
        let options = RegionOptions {
            dma_guarded: guarded,
        };
        let id = self.ksm.register(space.id, source, options);
        let region = self.regions.last_mut().expect("pushed above");
        region.id = id.as_ref().ok().copied();
        region.domain = space.domain;
        self.accept(id)
    }

    pub(super) fn unregister(&mut self, region: usize) -> Outcome {
        let Some(id) = self.region(region) else {
            return Ok(Applied::Skipped);
        };
        let done = self.despite_guards(|ksm| ksm.unregister(id))?;
        self.forget_regions();
        self.accept(done)
    }

    pub(super) fn remove(&mut self, space: usize) -> Outcome {
        let Some(&Some(Space { id, .. })) = self.spaces.get(space) else {
            return Ok(Applied::Skipped);
        };
        let done = self.despite_guards(|ksm| ksm.remove_space(id))?;
        if done.is_ok() {
            self.spaces[space] = None;
        }
        self.forget_regions();
        self.accept(done)
    }

    /// A removal that fails half-way leaves some regions.
    pub(super) fn forget_regions(&mut self) {
        for region in &mut self.regions {
            region.id = region.id.filter(|&id| self.ksm.region_stats(id).is_ok());
        }
    }
}
