//! A run: guests fill their memory, work, and are checked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::page::bytes_in;

use crate::args::{Args, Engine};
use crate::cast::{Cast, guest_pages, make_guests, pacing, register};
use crate::chaos::{ChaosTally, disturb};
use crate::dedup::Dedup;
use crate::figures::{add_counters, check, guest_reports, measure};
use crate::guest::{Guest, Work};
use crate::host::Host;
use crate::image::Image;
use crate::ksmd::Ksmd;
use crate::lockstep::Lockstep;
use crate::merger::Merger;
use crate::phase::run_guests;
use crate::plan::mergeable_pages;
use crate::progress::Progress;
use crate::recorder::Recorder;
use crate::report::{ImageReport, Report};
use crate::savings::Savings;
use crate::usage::{Usage, cpu_time};

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
    let caption = caption(args, pages);
    let mut recorder = Recorder::new(args, cast.rams(), &caption)?;
    run_guests(&mut cast.guests, &cast.sides, Guest::fill, |_| {
        recorder.glance(None)
    })?;
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
        (Engine::Kernel, _) => Some(Merger::Kernel(Ksmd::new(cast.memories(), pacing(args))?)),
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
    recorder.begin_work(args, merger)?;
    let (mine, ksmd) = (cpu_time(), ksmd_cpu_time(merger)?);
    work_for_a_while(args, &mut cast, merger, &work, &mut recorder, &mut report)?;
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
    recorder.finish(merger)?;
    check(args, &mut cast, merger, &work, &mut report)?;
    Ok(report)
}

/// What stands above the picture of a run.
fn caption(args: &Args, pages: u64) -> String {
    let guests = args.guests();
    let mib = bytes_in(pages) >> 20;
    match args.image.is_empty() {
        true => format!("mini-vmm: {guests} guests of {mib} MiB while they work"),
        false => format!("mini-vmm: {guests} guests of up to {mib} MiB, loaded from images"),
    }
}

fn ksmd_cpu_time(merger: Option<&Merger>) -> anyhow::Result<Duration> {
    match merger {
        Some(Merger::Kernel(ksmd)) => ksmd.cpu_time(),
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

/// Lets guests work, memory be merged and chaos reign until the time is up.
fn work_for_a_while(
    args: &Args,
    cast: &mut Cast,
    merger: Option<&Merger>,
    work: &Work,
    recorder: &mut Recorder,
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
                recorder.glance(merger)?;
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
