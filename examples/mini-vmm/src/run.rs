//! A run: guests fill their memory, work, and are checked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use ksm_core::page::bytes_in;

use crate::args::{Args, Engine};
use crate::cast::{Cast, guest_pages, make_guests, pacing, register};
use crate::content::PageSpec;
use crate::dedup::Dedup;
use crate::figures::{add_counters, check, family_reports, measure};
use crate::forks::{Forks, raise};
use crate::guest::{Guest, Work};
use crate::host::Host;
use crate::hotplug::{Board, Churn};
use crate::image::Image;
use crate::ksmd::Ksmd;
use crate::lockstep::Lockstep;
use crate::merger::Merger;
use crate::phase::run_guests;
use crate::plan::{duplicate_pages, mergeable_pages};
use crate::progress::Progress;
use crate::ram::Ram;
use crate::recorder::Recorder;
use crate::report::{ImageReport, Report};
use crate::savings::Savings;
use crate::unrest::Unrest;
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
    let mut recorder = Recorder::of(args, cast.rams(), &caption)?;
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
    let scanner = merger.map(Merger::start).transpose()?.flatten();
    let dedup = merger.and_then(Merger::ours);
    let (calm, boards) = (AtomicBool::new(false), boards(args, cast)?);
    let churn = dedup.map(|dedup| Churn::new(args, dedup, &calm));
    let (births, born) = mpsc::channel();
    let clones = args.reshape.fork.into();
    let forks = dedup.map(|dedup| Forks::new(dedup, cast.guests.len(), clones, births));
    let mut watch = Watch {
        args,
        merger,
        work,
        guests: cast.family(cast.guests.len()),
        line: || {
            churn
                .as_ref()
                .filter(|_| !boards.is_empty())
                .map(|churn| churn.line(&boards))
        },
        progress: Progress::new(lines(args), args.seconds),
        savings: Savings::default(),
        start: Instant::now(),
    };

    let done = std::thread::scope(|scope| {
        let mut unrest = Unrest::none(&calm);
        if let (Some(dedup), Some(churn)) = (dedup, &churn) {
            unrest.add_chaos(scope, dedup, &cast.targets, args);
            unrest.add_hotplug(scope, churn, &boards, args);
        }
        let nursery = scope.spawn(move || raise(&born, work));
        let worked = run_guests(
            &mut cast.guests,
            &cast.sides,
            |guest| guest.work(work, forks.as_ref()),
            |ended| {
                watch.mind_the_time(ended, &mut unrest, forks.as_ref());
                watch.show(forks.as_ref())?;
                recorder.glance(merger)
            },
        );
        unrest.end();
        let forked = forks.as_ref().map(Forks::tally);
        // Nobody is born any more.
        drop(forks);
        let clones = nursery.join();
        let clones = clones.map_err(|_| anyhow!("the thread that raises clones panicked"));
        let tallies = unrest.tallies();
        worked?;
        anyhow::Ok((tallies?, forked, clones??))
    });
    watch.progress.finish();
    if let Some(scanner) = scanner {
        Dedup::stop_scanner(scanner)?;
    }
    report.seconds_to_settle = watch.savings.seconds_to_settle();
    let (tallies, forked, clones) = done?;
    (report.chaos, report.hotplug) = tallies;
    report.forks = forked.filter(|_| args.reshape.fork > 0);
    cast.take_in(clones);
    Ok(())
}

/// Lines of progress: guests, clones, memory that was added.
fn lines(args: &Args) -> usize {
    usize::from(args.guests())
        + usize::from(args.reshape.fork)
        + usize::from(args.reshape.hotplug > 0)
}

/// What is looked at now and then while guests work.
struct Watch<'a, L> {
    args: &'a Args,
    merger: Option<&'a Merger>,
    work: &'a Work,
    /// Guests that were there from the beginning.
    guests: Vec<(usize, Option<usize>, Ram)>,
    /// What there is to be said of added memory.
    line: L,
    progress: Progress,
    savings: Savings,
    start: Instant,
}

impl<L: Fn() -> Option<String>> Watch<'_, L> {
    /// Begins and ends what is to begin or end now. So many guests have `ended`.
    fn mind_the_time(&self, ended: usize, unrest: &mut Unrest<'_>, forks: Option<&Forks<'_>>) {
        let end = Duration::from_secs(u64::from(self.args.seconds));
        let now = self.start.elapsed();
        let is_over = now >= end || ended > 0 || unrest.has_ended_in_part();
        // Whoever disturbs may wait for a guest, so it goes first.
        if is_over && unrest.end() {
            self.work.lockstep.close();
        }
        if let Some(forks) = forks.filter(|_| now >= end / 4) {
            forks.begin();
        }
        if (now >= end + CLOSING_TIME && unrest.is_over()) || (ended > 0 && now < end) {
            self.work.stop.store(true, Ordering::Relaxed);
        }
        let dedup = self.merger.and_then(Merger::ours);
        let passes = dedup.map_or(u64::MAX, |dedup| dedup.stats().full_scans);
        if self.args.image.is_empty() || passes >= PASSES_BEFORE_REWRITES {
            self.work.lockstep.open();
        }
    }

    /// Shows how things stand, if it is time.
    fn show(&mut self, forks: Option<&Forks<'_>>) -> anyhow::Result<()> {
        let stats = self.merger.map(Merger::stats).transpose()?;
        if let Some(stats) = &stats {
            self.savings
                .sample(self.start.elapsed(), stats.saved_bytes());
        }
        if !self.progress.is_due() {
            return Ok(());
        }
        let clones = forks.map(Forks::born).unwrap_or_default().into_iter();
        let clones = clones.map(|(number, clone)| (number, Some(clone.parent), clone.ram));
        let all: Vec<_> = self.guests.iter().cloned().chain(clones).collect();
        let reports = family_reports(&all, self.merger)?;
        self.progress.show(&reports, (self.line)(), stats.as_ref());
        Ok(())
    }
}
