//! The guests of a run: made, filled by plan or from images, and registered.

use std::sync::Arc;

use anyhow::Context as _;
use ksm_core::Config;
use ksm_vmm_glue::Pacing;
use vm_memory::GuestMemoryMmap;

use crate::args::{Args, Thp};
use crate::chaos::Target;
use crate::cpu::Cpu;
use crate::dedup::Dedup;
use crate::guest::{Guest, GuestSide};
use crate::host::Host;
use crate::host_cpu::HostCpu;
use crate::image::{Image, ImageTally};
use crate::kvm_slots::advise_huge;
use crate::plan::Plan;
use crate::ram::Ram;
use crate::vm::KvmCpu;

/// The guests of a run, and what they share with the threads around them.
pub(crate) struct Cast {
    pub(crate) guests: Vec<Guest>,
    pub(crate) sides: Vec<Arc<GuestSide>>,
    pub(crate) targets: Vec<Target>,
    /// What stood in images.
    pub(crate) images: ImageTally,
}

impl Cast {
    /// Rewritten pages that every guest has, at least.
    pub(crate) fn rewritten_pages(&self) -> u64 {
        let guests = self.guests.iter();
        let rewritten = guests.map(|guest| guest.rewritten_pages().len() as u64);
        rewritten.min().unwrap_or(0)
    }

    /// Takes clones in, behind the guests.
    pub(crate) fn take_in(&mut self, clones: Vec<Guest>) {
        let sides = clones.iter().map(|clone| Arc::clone(clone.side()));
        self.sides.extend(sides);
        self.guests.extend(clones);
    }

    pub(crate) fn rams(&self) -> Vec<Ram> {
        let guests = self.guests.iter();
        guests.map(|guest| guest.ram().clone()).collect()
    }

    /// The memory of each, with its number; those from `guests` on are clones, of one
    /// guest after another.
    pub(crate) fn family(&self, guests: usize) -> Vec<(usize, Option<usize>, Ram)> {
        let ram = |guest: &Guest| {
            let clone = guest.index().checked_sub(guests);
            let parent = clone.map(|clone| clone % guests);
            (guest.index(), parent, guest.ram().clone())
        };
        self.guests.iter().map(ram).collect()
    }

    /// The memory of each that is merged.
    pub(crate) fn memories(&self) -> Vec<GuestMemoryMmap> {
        let guests = self.guests.iter();
        guests.map(|guest| guest.ram().work.clone()).collect()
    }

    /// Memory that the guests' memfds hold.
    pub(crate) fn file_bytes(&self) -> anyhow::Result<u64> {
        let guests = self.guests.iter();
        guests.map(|guest| guest.ram().file_bytes()).sum()
    }
}

/// Pages of every guest: those of its image, or what was asked for.
pub(crate) fn guest_pages(args: &Args, images: &[Image]) -> Vec<u64> {
    (0..usize::from(args.guests()))
        .map(|guest| image_of(guest, images).map_or(args.mem.pages(), Image::pages))
        .collect()
}

fn image_of(guest: usize, images: &[Image]) -> Option<&Image> {
    images.get(guest % images.len().max(1))
}

pub(crate) fn make_guests(args: &Args, images: &[Image], host: &Host) -> anyhow::Result<Cast> {
    let mut cast = Cast {
        guests: Vec::new(),
        sides: Vec::new(),
        targets: Vec::new(),
        images: ImageTally::new()?,
    };
    let windows = args.reshape.windows(u64::from(args.guests()));
    let end = |pages| windows.end(pages);
    for (index, pages) in guest_pages(args, images).into_iter().enumerate() {
        let ram = Ram::new(pages, args.memory)?;
        let image = image_of(index, images);
        match args.thp {
            Thp::Always => advise_huge(&ram.work, true)?,
            Thp::Never => advise_huge(&ram.work, false)?,
            // A huge page would fill the holes between an image's pages.
            Thp::Madvise if image.is_some() => advise_huge(&ram.work, false)?,
            Thp::Madvise => {}
        }
        let plan = plan(args, image, index, &ram, &mut cast.images)?;
        let side = Arc::new(GuestSide::default());
        cast.targets.push(Target {
            ram: ram.clone(),
            discardable: plan.discardable.clone(),
            side: Arc::clone(&side),
        });
        cast.sides.push(Arc::clone(&side));
        let cpu: Box<dyn Cpu> = match &host.kvm {
            Some(kvm) => {
                Box::new(KvmCpu::new(kvm, ram.clone(), end(pages)).with_context(|| {
                    format!("guest {index} does not start under KVM; --host-threads does without")
                })?)
            }
            None => Box::new(HostCpu::new(ram.clone())),
        };
        let guest = Guest::new(index, ram, plan, image.cloned(), cpu, side)?;
        cast.guests.push(guest);
    }
    Ok(cast)
}

/// What a guest's pages hold. Those of an image hold it already.
fn plan(
    args: &Args,
    image: Option<&Image>,
    index: usize,
    ram: &Ram,
    tally: &mut ImageTally,
) -> anyhow::Result<Plan> {
    let guest = index as u64;
    let Some(image) = image else {
        return Ok(Plan::new(&args.recipe, ram.pages(), guest, args.seed));
    };
    if args.isolate {
        tally.next_domain()?;
    }
    image.load(ram, tally, guest, args.seed, u64::from(args.rewrites))
}

pub(crate) const fn pacing(args: &Args) -> Pacing {
    Pacing {
        pages_to_scan: args.pages_to_scan,
        sleep_millisecs: args.sleep_millisecs,
    }
}

pub(crate) fn register(
    args: &Args,
    backend: ksm_core::backend::linux::LinuxBackend,
    cast: &Cast,
) -> anyhow::Result<Dedup> {
    Dedup::new(
        backend,
        config(args),
        pacing(args),
        args.isolate,
        &cast.memories(),
        args.reshape.fork.into(),
    )
}

/// How the engine is set up.
pub(crate) fn config(args: &Args) -> Config {
    let mut config = Config {
        settle_passes: args.settle_passes,
        max_vmas: args.max_vmas,
        lock_policy: args.reshape.lock_policy.into(),
        ..Config::default()
    };
    if args.no_blocks {
        config.stretch_pages = u32::MAX;
    }
    config
}
