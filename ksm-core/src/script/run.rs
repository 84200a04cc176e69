//! Running a script: what each operation does, and what must hold after it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use thiserror::Error;

use super::host::{Host, Meddling, Weather};
use super::op::Op;
use super::oracle::Oracle;
use super::pins::Guard;
use super::text::Script;
use crate::backend::sim::{Call, Failure};
use crate::engine::Ksm;
use crate::error::Error;
use crate::page::{PageIndex, PageRange};
use crate::region::{DomainId, RegionId, SpaceId};

/// The most failures that one operation asks for.
const MAX_FAILURES: u64 = 1000;

/// What became of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It was done.
    Done,
    /// There was nothing to do it on, or the host cannot do it.
    Skipped,
    /// The engine refused it, as it may after a failure of the host.
    Refused(String),
}

/// An engine that did what it must not.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{reason}\nafter the last operation of this script:\n{script}")]
pub struct Mismatch {
    /// What.
    pub reason: String,
    /// What led there.
    pub script: Script,
}

/// A space and its domain, by its place.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) id: SpaceId,
    pub(super) domain: usize,
}

/// Guest memory, registered or not.
#[derive(Debug)]
pub(super) struct Region {
    /// `None` once it is unregistered.
    pub(super) id: Option<RegionId>,
    pub(super) domain: usize,
    pub(super) guarded: bool,
    /// Where the memory and its contents are: regions can follow one another
    /// over one memory, and be parts of it.
    pub(super) memory: usize,
    /// Its first page there.
    pub(super) first: u64,
    /// Its length, in pages.
    pub(super) pages: u64,
}

impl Region {
    /// Its pages.
    pub(super) fn range(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.pages)
    }

    /// The pages of its memory that are those of `range`.
    pub(super) fn in_memory(&self, range: PageRange) -> PageRange {
        range.plus(self.first)
    }

    /// The page of its memory that is `page`.
    pub(super) fn page_in_memory(&self, page: PageIndex) -> PageIndex {
        page.plus(self.first)
    }
}

/// A guest's memory and what it wrote there.
#[derive(Debug)]
pub(super) struct Memory<G> {
    pub(super) guest: G,
    pub(super) oracle: Oracle,
}

/// Runs scripts on an engine, and checks it after each operation.
#[derive(Debug)]
pub struct Runner<H: Host> {
    pub(super) host: H,
    pub(super) ksm: Ksm<H::Backend>,
    /// `None` once they are forgotten.
    pub(super) domains: Vec<Option<DomainId>>,
    pub(super) spaces: Vec<Option<Space>>,
    pub(super) regions: Vec<Region>,
    pub(super) memories: Vec<Memory<H::Guest>>,
    pub(super) guards: Vec<Guard>,
    /// Calls may fail, so errors are to be expected.
    pub(super) trouble: bool,
    /// Pages may change at any time.
    storm: bool,
    done: Script,
}

pub(super) type Outcome = Result<Applied, String>;

impl<H: Host> Runner<H> {
    /// A fresh engine on this host.
    ///
    /// # Errors
    /// When the engine refuses the host's settings.
    pub fn new(host: H) -> Result<Self, Error> {
        Ok(Self {
            ksm: Ksm::new(host.backend(), host.config())?,
            host,
            domains: Vec::new(),
            spaces: Vec::new(),
            regions: Vec::new(),
            memories: Vec::new(),
            guards: Vec::new(),
            trouble: false,
            storm: false,
            done: Script::default(),
        })
    }

    /// The engine.
    pub const fn ksm(&self) -> &Ksm<H::Backend> {
        &self.ksm
    }

    /// The host.
    pub const fn host(&self) -> &H {
        &self.host
    }

    /// The engine's name for a region of the script, while it is registered.
    #[must_use]
    pub fn region(&self, region: usize) -> Option<RegionId> {
        self.regions.get(region)?.id
    }

    /// The engine's name for a domain of the script.
    #[must_use]
    pub fn domain(&self, domain: usize) -> Option<DomainId> {
        *self.domains.get(domain)?
    }

    /// How many regions of the script were named.
    #[must_use]
    pub const fn regions(&self) -> usize {
        self.regions.len()
    }

    /// A guest's memory, by a region that is or was registered of it.
    #[must_use]
    pub fn guest(&self, region: usize) -> Option<&H::Guest> {
        Some(self.place(region)?.0)
    }

    /// A guest's memory, and the page of it with which a region begins.
    #[must_use]
    pub fn place(&self, region: usize) -> Option<(&H::Guest, PageIndex)> {
        let region = self.regions.get(region)?;
        let first = PageIndex(region.first);
        Some((&self.memories[region.memory].guest, first))
    }

    /// Whether no storm, failure or limit is set.
    pub(super) const fn is_calm(&self) -> bool {
        !self.trouble && !self.storm
    }

    /// Runs a whole script.
    ///
    /// # Errors
    /// The first [`Mismatch`].
    pub fn run(&mut self, script: &Script) -> Result<(), Mismatch> {
        script.0.iter().try_for_each(|op| self.apply(op).map(drop))
    }

    /// Applies one operation, and checks everything.
    ///
    /// # Errors
    /// What does not hold: a page with wrong bytes, a counter or a record that
    /// disagrees, something left stopped, a panic.
    pub fn apply(&mut self, op: &Op) -> Result<Applied, Mismatch> {
        self.done.0.push(*op);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let applied = self.act(op)?;
            self.verify()?;
            Ok(applied)
        }));
        let outcome = outcome.unwrap_or_else(|payload| Err(text_of(&*payload)));
        outcome.map_err(|reason| Mismatch {
            reason,
            script: self.done.clone(),
        })
    }

    fn act(&mut self, op: &Op) -> Outcome {
        match *op {
            Op::Domain => self.add_domain(),
            Op::Space { domain } => self.add_space(domain),
            Op::Register {
                space,
                pages,
                guarded,
            } => self.register_fresh(space, pages, guarded),
            Op::Again {
                space,
                region,
                guarded,
            } => self.register_again(space, region, guarded),
            Op::Unregister { region } => self.unregister(region),
            Op::Remove { space } => self.remove(space),
            Op::Forget { domain } => self.forget(domain),
            Op::Split { region, page } => self.split(region, page),
            Op::Clone { space, region } => self.clone_region(space, region),
            Op::Move { region } => self.move_region(region),
            Op::TakeOver {
                space,
                pages,
                content,
                guarded,
            } => self.take_over(space, pages, content, guarded),
            Op::Drop { space } => self.drop_space(space),
            Op::Unshare { region, page } => self.unshare(region, page),
            Op::Write {
                region,
                range,
                content,
                counting,
            } => self.write(region, range, |nth| {
                let step = if counting { nth } else { 0 };
                content.plus(step).bytes()
            }),
            Op::Read { region, range } => self.read(region, range),
            Op::Discard { region, range } => self.discard(region, range),
            Op::Scan { budget } => {
                let report = self.ksm.scan(budget);
                self.accept(report)
            }
            Op::Settle => self.settle(),
            Op::Unmerge(reach) => self.unmerge(reach),
            Op::Quiesce => self.quiesce(),
            #[cfg(feature = "fault-injection")]
            Op::Panic { step } => self.panic(step),
            Op::PinGuard { region, range } => self.pin_guard(region, range),
            Op::UnpinGuard { region, range } => Ok(self.unpin_guards(region, range)),
            Op::Pin { region, page } => self.pin(region, page),
            Op::Unpin { region, page } => {
                self.meddle(region, PageRange::one(page), Meddling::Unpin)
            }
            Op::Huge { region, page } => self.meddle(region, PageRange::one(page), Meddling::Huge),
            Op::Swap { region, range } => self.meddle(region, range, Meddling::Swap),
            Op::Fork { region, range } => self.meddle(region, range, Meddling::Fork),
            Op::Fail {
                call,
                failure,
                nth,
                times,
            } => self.fail(call, failure, nth.max(1), times),
            Op::MaxVmas { max } => self.set_weather(Weather::MaxVmas(max)),
            Op::Storm => self.set_weather(Weather::Storm),
            Op::Calm => self.set_weather(Weather::Calm),
        }
    }

    /// An error of the engine is in order only when the host gave it a reason, or the
    /// budget of mappings.
    pub(super) fn accept<T>(&self, result: Result<T, Error>) -> Outcome {
        match result {
            Ok(_) => Ok(Applied::Done),
            Err(error @ Error::VmaBudget { .. }) if self.host.config().max_vmas.is_some() => {
                Ok(Applied::Refused(error.to_string()))
            }
            Err(error) if self.is_calm() => Err(format!("error in calm weather: {error:?}")),
            Err(error) => Ok(Applied::Refused(error.to_string())),
        }
    }

    fn fail(&mut self, call: Call, failure: Failure, nth: u64, times: u64) -> Outcome {
        let mut done = Applied::Skipped;
        for nth in nth..nth.saturating_add(times.min(MAX_FAILURES)) {
            done = self.set_weather(Weather::Fail { call, failure, nth })?;
        }
        Ok(done)
    }

    fn set_weather(&mut self, weather: Weather) -> Outcome {
        if !self.host.set_weather(weather) {
            return Ok(Applied::Skipped);
        }
        match weather {
            Weather::Fail { .. } | Weather::MaxVmas(_) => self.trouble = true,
            Weather::Storm => self.storm = true,
            Weather::Calm => (self.trouble, self.storm) = (false, false),
        }
        Ok(Applied::Done)
    }

    fn quiesce(&self) -> Outcome {
        let quiesced = self.ksm.quiesce().map_err(|error| error.to_string())?;
        let verdict = self.host.verdict();
        let scan = self.ksm.scan(u64::MAX);
        drop(quiesced);
        verdict?;
        match scan {
            Err(Error::Quiesced) => Ok(Applied::Done),
            scan => Err(format!("a scan of a quiesced engine: {scan:?}")),
        }
    }

    /// Scans up to a step, and panics there.
    #[cfg(feature = "fault-injection")]
    fn panic(&self, step: crate::fault::Step) -> Outcome {
        struct Injected;
        crate::fault::set_hook(Some(Box::new(move |reached| {
            if reached == step {
                // Not `panic!`: no message for a panic that is wanted.
                std::panic::resume_unwind(Box::new(Injected));
            }
        })));
        let scan = catch_unwind(AssertUnwindSafe(|| self.ksm.scan(u64::MAX)));
        crate::fault::set_hook(None);
        match scan {
            Ok(report) => self.accept(report),
            Err(payload) if payload.is::<Injected>() => Ok(Applied::Done),
            Err(payload) => Err(text_of(&*payload)),
        }
    }
}

/// What a panic said.
fn text_of(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
    format!("panic: {}", text.as_deref().unwrap_or("without a text"))
}
