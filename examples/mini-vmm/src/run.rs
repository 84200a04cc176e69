//! A run: guests fill their memory, work, and are checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::Config;
use ksm_core::page::bytes_in;
use ksm_vmm_glue::Pacing;

use crate::args::{Args, Engine, Thp};
use crate::chaos::{ChaosTally, Target, disturb};
use crate::cpu::Cpu;
use crate::dedup::Dedup;
use crate::guest::{Guest, GuestSide, Tally, Work};
use crate::host::Host;
use crate::host_cpu::HostCpu;
use crate::image::{Image, ImageTally};
use crate::ksmd::Ksmd;
use crate::kvm_slots::advise_huge;
use crate::lockstep::Lockstep;
use crate::merger::Merger;
use crate::phase::run_guests;
use crate::plan::{Plan, mergeable_pages};
use crate::progress::Progress;
use crate::ram::Ram;
use crate::report::{GuestReport, ImageReport, Report};
use crate::savings::Savings;
use crate::usage::{Usage, cpu_time};
use crate::vm::KvmCpu;

/// How long guests have to come to an end together. It is not used up unless one
/// of them has failed.
const CLOSING_TIME: Duration = Duration::from_secs(10);
/// In so many passes our engine merges an image, even on a budget. Only then do its
/// guests begin to rewrite: a page that is rewritten before its run is merged has a
/// frame of its own for ever, and costs mappings.
const PASSES_BEFORE_REWRITES: u64 = 10;
/// In how many passes that merge nothing a budget gets from its greatest demand
/// to its least, with one to spare (`ksm-core`, `budget`).
const QUIET_PASSES_OF_A_BUDGET: u64 = 6;

/// The guests of a run, and what they share with the threads around them.
struct Cast {
    guests: Vec<Guest>,
    sides: Vec<Arc<GuestSide>>,
    targets: Vec<Target>,
    /// What stood in images.
    images: ImageTally,
}

impl Cast {
    /// Rewritten pages that every guest has, at least.
    fn rewritten_pages(&self) -> u64 {
        let guests = self.guests.iter();
        let rewritten = guests.map(|guest| guest.rewritten_pages().len() as u64);
        rewritten.min().unwrap_or(0)
    }

    fn rams(&self) -> Vec<Ram> {
        self.guests
            .iter()
            .map(|guest| guest.ram().clone())
            .collect()
    }

    /// Memory that the guests' memfds hold.
    fn file_bytes(&self) -> anyhow::Result<u64> {
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

/// Runs guests as `args` say, on what `host` has.
pub(crate) fn run(args: &Args, images: &[Image], host: Host) -> anyhow::Result<Report> {
    let mut cast = make_guests(args, images, &host)?;
    let recipe = if images.is_empty() {
        args.recipe.to_string()
    } else {
        images.iter().map(Image::name).collect::<Vec<_>>().join(",")
    };
    let pages = guest_pages(args, images).into_iter().max().unwrap_or(0);
    eprintln!(
        "{} guests of {pages} pages ({}) fill their memory: {recipe}",
        args.guests(),
        host.mode(),
    );
    run_guests(&mut cast.guests, &cast.sides, Guest::fill, |_| Ok(()))?;
    let before = Usage::now(cast.file_bytes()?)?;

    let mut report = Report {
        mode: host.mode(),
        engine: match (args.engine, &host.backend) {
            (Engine::Kernel, _) => "kernel",
            (Engine::Ours, Some(_)) => "linux",
            (Engine::Ours, None) => "none",
        },
        guests: args.guests(),
        guest_bytes: bytes_in(pages),
        recipe,
        seed: args.seed,
        mergeable_bytes: bytes_in(if images.is_empty() {
            mergeable(args)
        } else {
            cast.images.duplicate_pages()
        }),
        notes: host.notes,
        ..Report::default()
    };
    let merger = match (args.engine, host.backend) {
        (Engine::Kernel, _) => Some(Merger::Kernel(Ksmd::new(cast.rams(), pacing(args))?)),
        (Engine::Ours, Some(backend)) => Some(Merger::Ours(register(args, backend, &cast)?)),
        (Engine::Ours, None) => None,
    };
    let work = Work {
        lockstep: Lockstep::new(&args.recipe, cast.rewritten_pages(), cast.guests.len()),
        // A page of an image is rewritten in one tick, and restored in the next.
        times: if images.is_empty() {
            u64::from(args.recipe.times)
        } else {
            1
        },
        busy_percent: u32::from(args.busy),
        stop: AtomicBool::new(false),
    };
    let merger = merger.as_ref();
    let (mine, ksmd) = (cpu_time(), ksmd_cpu_time(merger)?);
    work_for_a_while(args, &mut cast, merger, &work, &mut report)?;
    report.ksmd_cpu_seconds = (ksmd_cpu_time(merger)? - ksmd).as_secs_f64();
    report.cpu_seconds = (cpu_time() - mine).as_secs_f64() + report.ksmd_cpu_seconds;

    if let Some(merger) = merger {
        settle(args, merger)?;
        add_counters(&mut report, merger, &cast)?;
    }
    measure(&mut report, before, &cast, merger)?;
    if let Some(merger) = merger.filter(|_| !images.is_empty()) {
        let stats = merger.stats()?;
        let vmas = merger
            .ours()
            .map_or(report.vmas_added.unsigned_abs(), |_| stats.vmas);
        report.images = Some(ImageReport::new(&cast.images, &stats, vmas));
    }
    check(args, &mut cast, merger, &work, &mut report)?;
    Ok(report)
}

fn ksmd_cpu_time(merger: Option<&Merger>) -> anyhow::Result<Duration> {
    match merger {
        Some(Merger::Kernel(_)) => Ksmd::cpu_time(),
        _ => Ok(Duration::ZERO),
    }
}

/// Lets what is equal and rests be merged. Guests rest now.
fn settle(args: &Args, merger: &Merger) -> anyhow::Result<()> {
    match merger {
        Merger::Ours(dedup) if args.image.is_empty() => dedup.settle(args.settle_passes),
        Merger::Ours(dedup) => {
            let least = if args.max_vmas.is_some() {
                QUIET_PASSES_OF_A_BUDGET
            } else {
                2
            };
            dedup.settle_until_quiet(least + u64::from(args.settle_passes))
        }
        Merger::Kernel(ksmd) => ksmd.settle(),
    }
}

/// What can be saved at most: across guests only if they trust one another.
fn mergeable(args: &Args) -> u64 {
    let (pages, guests) = (args.mem.pages(), u64::from(args.guests()));
    if args.isolate {
        guests * mergeable_pages(&args.recipe, pages, 1)
    } else {
        mergeable_pages(&args.recipe, pages, guests)
    }
}

fn make_guests(args: &Args, images: &[Image], host: &Host) -> anyhow::Result<Cast> {
    let mut cast = Cast {
        guests: Vec::new(),
        sides: Vec::new(),
        targets: Vec::new(),
        images: ImageTally::new()?,
    };
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
            Some(kvm) => Box::new(KvmCpu::new(kvm, ram.clone()).with_context(|| {
                format!("guest {index} does not start under KVM; --host-threads does without")
            })?),
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

const fn pacing(args: &Args) -> Pacing {
    Pacing {
        pages_to_scan: args.pages_to_scan,
        sleep_millisecs: args.sleep_millisecs,
    }
}

fn register(
    args: &Args,
    backend: ksm_core::backend::linux::LinuxBackend,
    cast: &Cast,
) -> anyhow::Result<Dedup> {
    let mut config = Config {
        settle_passes: args.settle_passes,
        max_vmas: args.max_vmas,
        ..Config::default()
    };
    if args.no_blocks {
        config.stretch_pages = u32::MAX;
    }
    let rams = cast.rams();
    Dedup::new(backend, config, pacing(args), args.isolate, &rams)
}

/// Lets guests work, memory be merged and chaos reign until the time is up.
fn work_for_a_while(
    args: &Args,
    cast: &mut Cast,
    merger: Option<&Merger>,
    work: &Work,
    report: &mut Report,
) -> anyhow::Result<()> {
    let start = Instant::now();
    let end = Duration::from_secs(u64::from(args.seconds));
    let mut progress = Progress::new(cast.guests.len(), args.seconds);
    let mut savings = Savings::default();
    let scanner = merger.map(Merger::start).transpose()?.flatten();
    let calm = AtomicBool::new(false);
    let rams = cast.rams();

    let done = std::thread::scope(|scope| {
        let mut chaos = merger
            .and_then(Merger::ours)
            .filter(|_| args.chaos)
            .map(|dedup| {
                let (targets, calm) = (&cast.targets, &calm);
                scope.spawn(move || disturb(dedup, targets, args.seed, calm))
            });
        let mut chaos_tally = Ok(None);
        let worked = run_guests(
            &mut cast.guests,
            &cast.sides,
            |guest| guest.work(work),
            |ended| {
                let failed = chaos.as_ref().is_some_and(ScopedJoinHandle::is_finished);
                if start.elapsed() >= end || ended > 0 || failed {
                    // Whoever disturbs may wait for a guest, so it goes first.
                    calm.store(true, Ordering::Relaxed);
                    if let Some(chaos) = chaos.take() {
                        chaos_tally = joined(chaos).map(Some);
                    }
                    work.lockstep.close();
                }
                if start.elapsed() >= end + CLOSING_TIME || (ended > 0 && start.elapsed() < end) {
                    work.stop.store(true, Ordering::Relaxed);
                }
                let stats = merger.map(Merger::stats).transpose()?;
                let dedup = merger.and_then(Merger::ours);
                let passes = dedup.map_or(u64::MAX, |dedup| dedup.stats().full_scans);
                if args.image.is_empty() || passes >= PASSES_BEFORE_REWRITES {
                    work.lockstep.open();
                }
                if let Some(stats) = &stats {
                    savings.sample(start.elapsed(), stats.saved_bytes());
                }
                if progress.is_due() {
                    progress.show(&guest_reports(&rams, merger)?, stats.as_ref());
                }
                Ok(())
            },
        );
        worked.and(chaos_tally)
    });
    progress.finish();
    if let Some(scanner) = scanner {
        Dedup::stop_scanner(scanner)?;
    }
    report.chaos = done?;
    report.seconds_to_settle = savings.seconds_to_settle();
    Ok(())
}

fn joined(chaos: ScopedJoinHandle<'_, anyhow::Result<ChaosTally>>) -> anyhow::Result<ChaosTally> {
    let tally = chaos.join();
    tally
        .map_err(|_| anyhow::anyhow!("the disturbing thread panicked"))?
        .context("a disturbance failed")
}

fn guest_reports(rams: &[Ram], merger: Option<&Merger>) -> anyhow::Result<Vec<GuestReport>> {
    let all = merger.map(Merger::stats).transpose()?;
    let report = |(index, ram): (usize, &Ram)| {
        let mine = merger.map(|merger| merger.guest_stats(index)).transpose()?;
        let counters = mine.as_ref().zip(all.as_ref());
        Ok(GuestReport::new(
            index,
            ram.pages(),
            Tally::of(ram)?,
            counters,
        ))
    };
    rams.iter().enumerate().map(report).collect()
}

fn add_counters(report: &mut Report, merger: &Merger, cast: &Cast) -> anyhow::Result<()> {
    let stats = merger.stats()?;
    report.saved_bytes = stats.saved_bytes();
    report.metadata_bytes = stats.metadata_bytes;
    report.general_profit = stats.general_profit();
    report.pages_shared = stats.pages_shared;
    report.pages_sharing = stats.pages_sharing;
    report.stable_node_dups = stats.stable_node_dups;
    report.zero_pages = stats.ksm_zero_pages;
    report.pages_scanned = stats.pages_scanned;
    report.full_scans = stats.full_scans;
    report.cow_breaks = stats.cow_breaks;
    report.rewritten_merges = stats.cow_breaks;
    match merger {
        Merger::Ours(dedup) => {
            for (index, guest) in cast.guests.iter().enumerate() {
                report.rewritten_merges += dedup.merged_among(index, guest.rewritten_pages())?;
            }
        }
        Merger::Kernel(_) => {
            let foreign = Ksmd::foreign_pages()?;
            if foreign > 0 {
                let note = format!("{foreign} merged pages of other processes are in the figures.");
                eprintln!("{note}");
                report.notes.push(note);
            }
        }
    }
    let outcomes = stats.outcomes.iter();
    report.outcomes = outcomes.map(|(outcome, n)| (outcome.name(), n)).collect();
    Ok(())
}

fn measure(
    report: &mut Report,
    before: Usage,
    cast: &Cast,
    merger: Option<&Merger>,
) -> anyhow::Result<()> {
    let store = merger.and_then(Merger::ours);
    let store = store.map(|dedup| dedup.ksm().store_bytes()).transpose()?;
    let mut after = Usage::now(store.unwrap_or(0) + cast.file_bytes()?)?;
    if let Some(Merger::Kernel(_)) = merger {
        after.resident_bytes -= Ksmd::counted_twice_bytes()?;
    }
    report.vmas_added = after.vmas.cast_signed() - before.vmas.cast_signed();
    report.resident_before_bytes = before.resident_bytes;
    report.resident_after_bytes = after.resident_bytes;
    report.huge_before_bytes = before.huge_bytes;
    report.huge_after_bytes = after.huge_bytes;
    report.free_before_bytes = before.free_bytes;
    report.free_after_bytes = after.free_bytes;
    report.vmas = after.vmas;
    Ok(())
}

/// With `--verify`, lets every guest check all of its pages, then checks them
/// here. Counts what was lost, in either case.
fn check(
    args: &Args,
    cast: &mut Cast,
    merger: Option<&Merger>,
    work: &Work,
    report: &mut Report,
) -> anyhow::Result<()> {
    if args.verify {
        run_guests(&mut cast.guests, &cast.sides, Guest::check_all, |_| Ok(()))?;
    }
    let rams = cast.rams();
    report.by_guest = guest_reports(&rams, merger)?;
    for (guest, mine) in cast.guests.iter().zip(&mut report.by_guest) {
        if args.verify {
            let lost = guest.lost_pages(work)?;
            if let Some(first) = lost.first() {
                eprintln!(
                    "guest {}: {} pages do not hold what they must, the first is page {first}",
                    mine.guest,
                    lost.len()
                );
            }
            mine.lost_pages = mine.lost_pages.max(lost.len() as u64);
        }
        report.pages_checked += mine.pages_checked;
        report.stores_checked += mine.stores_checked;
        report.lost_pages += mine.lost_pages;
    }
    if args.verify {
        if let Some(dedup) = merger.and_then(Merger::ours) {
            dedup.check().context("the engine's records disagree")?;
        }
        report.verified = Some(report.lost_pages == 0);
    }
    Ok(())
}
