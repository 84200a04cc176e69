//! [`HostCpu`]: a host thread that does what the payload does, through
//! vm-memory's volatile and atomic accesses.

use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileMemory};

use crate::content::{COUNTER_STRIDE, COUNTERS, Kind, PageSpec, WORDS, hash};
use crate::cpu::Cpu;
use crate::layout::{Command, DESCRIPTORS, descriptor, lockstep_list, mail};
use crate::ram::{Ram, page_address};

/// A guest without a vCPU. It reads the same descriptors and counts in the same
/// mailbox.
#[derive(Debug)]
pub(crate) struct HostCpu {
    ram: Ram,
}

impl HostCpu {
    /// A guest on `ram`.
    pub(crate) const fn new(ram: Ram) -> Self {
        Self { ram }
    }

    fn word(&self, at: u64) -> anyhow::Result<u64> {
        Ok(self.ram.all.read_obj(GuestAddress(at))?)
    }

    fn spec(&self, page: u64) -> anyhow::Result<PageSpec> {
        let at = DESCRIPTORS + page * descriptor::BYTES;
        let kind: u32 = self.ram.all.read_obj(GuestAddress(at))?;
        Ok(PageSpec {
            kind: match kind {
                1 => Kind::Repeat,
                2 => Kind::Stream,
                3 => Kind::Lockstep,
                4 => Kind::Image,
                _ => Kind::Skip,
            },
            key: self.word(at + descriptor::KEY)?,
            tail: self.word(at + descriptor::TAIL)?,
            counter: self.word(at + descriptor::COUNTER)?,
        })
    }

    fn count(&self, counter: u64, by: u64) -> anyhow::Result<()> {
        self.ram.set_mail(counter, self.ram.mail(counter)? + by)
    }

    fn count_lost(&self, page: u64) -> anyhow::Result<()> {
        let at = GuestAddress(DESCRIPTORS + page * descriptor::BYTES + descriptor::LOST);
        if self.ram.all.read_obj::<u32>(at)? == 0 {
            self.ram.all.write_obj(1u32, at)?;
            self.count(mail::LOST_PAGES, 1)?;
            self.ram.set_mail(mail::LAST_LOST, page)?;
        }
        Ok(())
    }

    fn fill(&self, page: u64, spec: PageSpec) -> anyhow::Result<()> {
        let slice = self
            .ram
            .work
            .get_slice(page_address(page), ksm_core::PAGE_SIZE)?;
        for (at, word) in spec.words().enumerate() {
            slice.get_ref::<u64>(at * 8)?.store(word);
        }
        Ok(())
    }

    fn hash(&self, page: u64) -> anyhow::Result<u64> {
        let slice = self
            .ram
            .work
            .get_slice(page_address(page), ksm_core::PAGE_SIZE)?;
        let words: Vec<u64> = (0..WORDS)
            .map(|at| Ok(slice.get_ref::<u64>(at * 8)?.load()))
            .collect::<anyhow::Result<_>>()?;
        Ok(hash(words.into_iter()))
    }

    fn check(&self, page: u64, spec: PageSpec) -> anyhow::Result<()> {
        if spec.kind == Kind::Image {
            self.count(mail::PAGES_CHECKED, 1)?;
            let intact = self.hash(page)? == spec.key;
            return if intact {
                Ok(())
            } else {
                self.count_lost(page)
            };
        }
        let slice = self
            .ram
            .work
            .get_slice(page_address(page), ksm_core::PAGE_SIZE)?;
        self.count(mail::PAGES_CHECKED, 1)?;
        for (at, word) in spec.words().enumerate() {
            if slice.get_ref::<u64>(at * 8)?.load() != word {
                return self.count_lost(page);
            }
        }
        Ok(())
    }

    fn rewrite_image(&self, page: u64, spec: PageSpec) -> anyhow::Result<()> {
        let intact = self.hash(page)? == spec.key;
        let slice = self
            .ram
            .work
            .get_slice(page_address(page), ksm_core::PAGE_SIZE)?;
        for at in 0..COUNTERS {
            let place: &AtomicU64 = slice.get_atomic_ref(at * COUNTER_STRIDE * 8)?;
            place.fetch_xor(spec.counter, Ordering::Relaxed);
        }
        self.count(mail::STORES_CHECKED, COUNTERS as u64)?;
        let at = DESCRIPTORS + page * descriptor::BYTES;
        for (offset, hash) in [(descriptor::KEY, spec.tail), (descriptor::TAIL, spec.key)] {
            self.ram.all.write_obj(hash, GuestAddress(at + offset))?;
        }
        if intact {
            Ok(())
        } else {
            self.count_lost(page)
        }
    }

    fn rewrite(&self, page: u64) -> anyhow::Result<()> {
        let spec = self.spec(page)?;
        if spec.kind == Kind::Image {
            return self.rewrite_image(page, spec);
        }
        let counter = spec.counter;
        let slice = self
            .ram
            .work
            .get_slice(page_address(page), ksm_core::PAGE_SIZE)?;
        let mut intact = true;
        for at in 0..COUNTERS {
            let place: &AtomicU64 = slice.get_atomic_ref(at * COUNTER_STRIDE * 8)?;
            if place.fetch_add(1, Ordering::Relaxed) != counter {
                intact = false;
                place.store(counter + 1, Ordering::Relaxed);
            }
        }
        self.count(mail::STORES_CHECKED, COUNTERS as u64)?;
        let at = DESCRIPTORS + page * descriptor::BYTES + descriptor::COUNTER;
        self.ram.all.write_obj(counter + 1, GuestAddress(at))?;
        if intact {
            Ok(())
        } else {
            self.count_lost(page)
        }
    }
}

impl Cpu for HostCpu {
    fn fork(&mut self, ram: Ram) -> anyhow::Result<Box<dyn Cpu>> {
        Ok(Box::new(Self::new(ram)))
    }

    fn run(&mut self, command: Command) -> anyhow::Result<()> {
        match command {
            Command::Fill { first, end } | Command::Check { first, end } => {
                for page in first..end {
                    let spec = self.spec(page)?;
                    match command {
                        _ if spec.kind == Kind::Skip => {}
                        Command::Fill { .. } => self.fill(page, spec)?,
                        _ => self.check(page, spec)?,
                    }
                }
            }
            Command::Rewrite { first, end, times } => {
                let list = lockstep_list(self.ram.pages());
                for _ in 0..times {
                    for at in first..end {
                        self.rewrite(self.word(list + at * 8)?)?;
                    }
                }
            }
        }
        Ok(())
    }
}
