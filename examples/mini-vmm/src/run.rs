//! A run: guests fill their memory, work, and are checked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::page::bytes_in;

use crate::args::{Args, Engine};
use crate::cast::{Cast, guest_pages, make_guests, pacing, register};
use crate::chaos::{ChaosTally, disturb};
use crate::content::PageSpec;
use crate::dedup::Dedup;
use crate::figures::{add_counters, check, family_reports, measure};
use crate::forks::{Forks, raise};
use crate::guest::{Guest, Work};
use crate::host::Host;
use crate::hotplug::{self, Board, Churn};
use crate::image::Image;
use crate::ksmd::Ksmd;
use crate::lockstep::Lockstep;
use crate::merger::Merger;
use crate::phase::run_guests;
use crate::plan::{duplicate_pages, mergeable_pages};
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
        lockstep: Lockstep::new(
            &args.recipe,
            cast.rewritten_pages(),
            cast.guests.len(),
            args.reshape.fork.into(),
        ),
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
    if args.reshape.fork > 0 && images.is_empty() {
        report.mergeable_bytes = bytes_in(mergeable_now(args, &cast, &work));
    }
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

/// What can be saved at most of what guests and their clones hold now. Zeros are holes
/// in a clone from its birth on: there is nothing to be saved.
fn mergeable_now(args: &Args, cast: &Cast, work: &Work) -> u64 {
    let guests = usize::from(args.guests());
    let held = |guest: &Guest| {
        let mut pages = guest.expected(work);
        pages.retain(|&spec| guest.index() < guests || spec != PageSpec::ZERO);
        pages
    };
    let of = |family: usize| {
        let all = cast.guests.iter();
        let members = all.filter(|guest| !args.isolate || guest.index() % guests == family);
        duplicate_pages(members.flat_map(held))
    };
    let families = if args.isolate { guests } else { 1 };
    (0..families).map(of).sum()
}

/// The guests to which memory is added, if it is.
fn boards(args: &Args, cast: &Cast) -> anyhow::Result<Vec<Board>> {
    let guests = cast.guests.iter().filter(|_| args.reshape.hotplug > 0);
    let board = |guest: &Guest| {
        let machine = guest.machine().context("a guest without memory slots")?;
        Ok(Board::new(guest.index(), guest.ram(), machine))
    };
    guests.map(board).collect()
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
    let lines = cast.guests.len() + usize::from(args.reshape.fork);
    let lines = lines + usize::from(args.reshape.hotplug > 0);
    let mut progress = Progress::new(lines, args.seconds);
    let mut savings = Savings::default();
    let scanner = merger.map(Merger::start).transpose()?.flatten();
    let calm = AtomicBool::new(false);
    let rams = cast.family(cast.guests.len());

    let boards = boards(args, cast)?;
    let (births, born) = mpsc::channel();
    let forks = merger.and_then(Merger::ours).map(|dedup| {
        let clones = args.reshape.fork.into();
        Forks::new(dedup, cast.guests.len(), clones, births)
    });
    let dedup = merger.and_then(Merger::ours);
    let churn = dedup.map(|dedup| Churn {
        dedup,
        windows: args.reshape.windows(u64::from(args.guests())),
        recipe: &args.recipe,
        seed: args.seed,
        busy_percent: u32::from(args.busy),
        calm: &calm,
    });
    let churn = churn.as_ref();

    let done = std::thread::scope(|scope| {
        let mut chaos = dedup.filter(|_| args.chaos).map(|dedup| {
            let (targets, calm) = (&cast.targets, &calm);
            scope.spawn(move || disturb(dedup, targets, args.seed, calm))
        });
        let plug = |n: u64| {
            let board = &boards[usize::try_from(n).ok()? % boards.len()];
            let (window, who) = (n / boards.len() as u64, 1000 + n);
            churn.map(|churn| scope.spawn(move || churn.run(board, window, who)))
        };
        let mut plugs: Vec<_> = (0..u64::from(args.reshape.hotplug))
            .filter_map(plug)
            .collect();
        let nursery = scope.spawn(move || raise(&born, work));
        let mut chaos_tally = Ok(None);
        let mut hotplug_tally = Ok(None);
        let worked = run_guests(
            &mut cast.guests,
            &cast.sides,
            |guest| guest.work(work, forks.as_ref()),
            |ended| {
                let failed = chaos.as_ref().is_some_and(ScopedJoinHandle::is_finished)
                    || plugs.iter().any(ScopedJoinHandle::is_finished);
                if start.elapsed() >= end || ended > 0 || failed {
                    // Whoever disturbs may wait for a guest, so it goes first.
                    calm.store(true, Ordering::Relaxed);
                    if let Some(chaos) = chaos.take() {
                        chaos_tally = joined(chaos).map(Some);
                    }
                    if plugs.iter().all(ScopedJoinHandle::is_finished) {
                        if !plugs.is_empty() {
                            hotplug_tally = hotplug::joined(std::mem::take(&mut plugs));
                        }
                        work.lockstep.close();
                    }
                }
                if let Some(forks) = forks.as_ref().filter(|_| start.elapsed() >= end / 4) {
                    forks.begin();
                }
                let over = start.elapsed() >= end + CLOSING_TIME && plugs.is_empty();
                if over || (ended > 0 && start.elapsed() < end) {
                    work.stop.store(true, Ordering::Relaxed);
                }
                let stats = merger.map(Merger::stats).transpose()?;
                let passes = dedup.map_or(u64::MAX, |dedup| dedup.stats().full_scans);
                if args.image.is_empty() || passes >= PASSES_BEFORE_REWRITES {
                    work.lockstep.open();
                }
                if let Some(stats) = &stats {
                    savings.sample(start.elapsed(), stats.saved_bytes());
                }
                recorder.glance(merger)?;
                if progress.is_due() {
                    let clones = forks.as_ref().map(Forks::born).unwrap_or_default();
                    let clones = clones.into_iter();
                    let clones =
                        clones.map(|(number, clone)| (number, Some(clone.parent), clone.ram));
                    let all: Vec<_> = rams.iter().cloned().chain(clones).collect();
                    let further = churn.filter(|_| args.reshape.hotplug > 0);
                    let further = further.map(|churn| churn.line(&boards));
                    progress.show(&family_reports(&all, merger)?, further, stats.as_ref());
                }
                Ok(())
            },
        );
        calm.store(true, Ordering::Relaxed);
        let forked = forks.as_ref().map(Forks::tally);
        // Nobody is born any more.
        drop(forks);
        let clones = nursery
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that raises clones panicked"))
            .flatten();
        let plugged = hotplug::joined(plugs)?;
        worked?;
        let hotplug = hotplug_tally?.or(plugged);
        anyhow::Ok((chaos_tally?, hotplug, forked, clones?))
    });
    progress.finish();
    if let Some(scanner) = scanner {
        Dedup::stop_scanner(scanner)?;
    }
    let (chaos, hotplug, forked, clones) = done?;
    report.chaos = chaos;
    report.hotplug = hotplug;
    report.forks = forked.filter(|_| args.reshape.fork > 0);
    cast.take_in(clones);
    report.seconds_to_settle = savings.seconds_to_settle();
    Ok(())
}

fn joined(chaos: ScopedJoinHandle<'_, anyhow::Result<ChaosTally>>) -> anyhow::Result<ChaosTally> {
    let tally = chaos.join();
    tally
        .map_err(|_| anyhow::anyhow!("the disturbing thread panicked"))?
        .context("a disturbance failed")
}
