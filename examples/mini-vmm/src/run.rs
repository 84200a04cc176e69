//! A run: guests fill their memory, work, and are checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::Config;
use ksm_core::page::bytes_in;
use ksm_vmm_glue::Pacing;

use crate::args::{Args, Thp};
use crate::chaos::{ChaosTally, Target, disturb};
use crate::cpu::Cpu;
use crate::dedup::Dedup;
use crate::guest::{Guest, GuestSide, Tally, Work};
use crate::host::Host;
use crate::host_cpu::HostCpu;
use crate::kvm_slots::advise_huge;
use crate::lockstep::Lockstep;
use crate::phase::run_guests;
use crate::plan::{Plan, mergeable_pages};
use crate::progress::Progress;
use crate::ram::Ram;
use crate::report::{GuestReport, Report};
use crate::savings::Savings;
use crate::usage::{Usage, cpu_time};
use crate::vm::KvmCpu;

/// How long guests have to come to an end together. It is not used up unless one
/// of them has failed.
const CLOSING_TIME: Duration = Duration::from_secs(10);

/// The guests of a run, and what they share with the threads around them.
struct Cast {
    guests: Vec<Guest>,
    sides: Vec<Arc<GuestSide>>,
    targets: Vec<Target>,
}

impl Cast {
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

/// Runs guests as `args` say, on what `host` has.
pub(crate) fn run(args: &Args, host: Host) -> anyhow::Result<Report> {
    let mut cast = make_guests(args, &host)?;
    eprintln!(
        "{} guests of {} pages ({}) fill their memory: {}",
        args.guests,
        args.mem.pages(),
        host.mode(),
        args.recipe
    );
    run_guests(&mut cast.guests, &cast.sides, Guest::fill, |_| Ok(()))?;
    let before = Usage::now(cast.file_bytes()?)?;

    let mut report = Report {
        mode: host.mode(),
        engine: if host.backend.is_some() {
            "linux"
        } else {
            "none"
        },
        guests: args.guests,
        guest_bytes: bytes_in(args.mem.pages()),
        recipe: args.recipe.to_string(),
        seed: args.seed,
        mergeable_bytes: bytes_in(mergeable(args)),
        notes: host.notes,
        ..Report::default()
    };
    let dedup = match host.backend {
        Some(backend) => Some(register(args, backend, &cast)?),
        None => None,
    };
    let work = Work {
        lockstep: Lockstep::new(
            &args.recipe,
            cast.guests[0].rewritten_pages().len() as u64,
            cast.guests.len(),
        ),
        times: u64::from(args.recipe.times),
        busy_percent: u32::from(args.busy),
        stop: AtomicBool::new(false),
    };
    let cpu_before = cpu_time();
    work_for_a_while(args, &mut cast, dedup.as_ref(), &work, &mut report)?;
    report.cpu_seconds = (cpu_time() - cpu_before).as_secs_f64();

    if let Some(dedup) = &dedup {
        dedup.settle(args.settle_passes)?;
        add_counters(&mut report, dedup, &cast)?;
    }
    measure(&mut report, before, &cast, dedup.as_ref())?;
    check(args, &mut cast, dedup.as_ref(), &work, &mut report)?;
    Ok(report)
}

/// What can be saved at most: across guests only if they trust one another.
fn mergeable(args: &Args) -> u64 {
    let (pages, guests) = (args.mem.pages(), u64::from(args.guests));
    if args.isolate {
        guests * mergeable_pages(&args.recipe, pages, 1)
    } else {
        mergeable_pages(&args.recipe, pages, guests)
    }
}

fn make_guests(args: &Args, host: &Host) -> anyhow::Result<Cast> {
    let mut cast = Cast {
        guests: Vec::new(),
        sides: Vec::new(),
        targets: Vec::new(),
    };
    for index in 0..args.guests {
        let ram = Ram::new(args.mem.pages(), args.memory)?;
        match args.thp {
            Thp::Always => advise_huge(&ram.work, true)?,
            Thp::Never => advise_huge(&ram.work, false)?,
            Thp::Madvise => {}
        }
        let plan = Plan::new(&args.recipe, ram.pages(), u64::from(index), args.seed);
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
        let guest = Guest::new(usize::from(index), ram, plan, cpu, side)?;
        cast.guests.push(guest);
    }
    Ok(cast)
}

fn register(
    args: &Args,
    backend: ksm_core::backend::linux::LinuxBackend,
    cast: &Cast,
) -> anyhow::Result<Dedup> {
    let config = Config {
        settle_passes: args.settle_passes,
        ..Config::default()
    };
    let pacing = Pacing {
        pages_to_scan: args.pages_to_scan,
        sleep_millisecs: args.sleep_millisecs,
    };
    let rams = cast.rams();
    Dedup::new(backend, config, pacing, args.isolate, &rams)
}

/// Lets guests work, memory be merged and chaos reign until the time is up.
fn work_for_a_while(
    args: &Args,
    cast: &mut Cast,
    dedup: Option<&Dedup>,
    work: &Work,
    report: &mut Report,
) -> anyhow::Result<()> {
    let start = Instant::now();
    let end = Duration::from_secs(u64::from(args.seconds));
    let mut progress = Progress::new(cast.guests.len(), args.seconds);
    let mut savings = Savings::default();
    let scanner = dedup.map(Dedup::start_scanner).transpose()?;
    let calm = AtomicBool::new(false);
    let rams = cast.rams();

    let done = std::thread::scope(|scope| {
        let mut chaos = dedup.filter(|_| args.chaos).map(|dedup| {
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
                let stats = dedup.map(Dedup::stats);
                if let Some(stats) = &stats {
                    savings.sample(start.elapsed(), stats.saved_bytes());
                }
                if progress.is_due() {
                    progress.show(&guest_reports(&rams, dedup)?, stats.as_ref());
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

fn guest_reports(rams: &[Ram], dedup: Option<&Dedup>) -> anyhow::Result<Vec<GuestReport>> {
    let all = dedup.map(Dedup::stats);
    let report = |(index, ram): (usize, &Ram)| {
        let mine = dedup.map(|dedup| dedup.guest_stats(index)).transpose()?;
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

fn add_counters(report: &mut Report, dedup: &Dedup, cast: &Cast) -> anyhow::Result<()> {
    let stats = dedup.stats();
    report.saved_bytes = stats.saved_bytes();
    report.metadata_bytes = stats.metadata_bytes;
    report.general_profit = stats.general_profit();
    report.pages_shared = stats.pages_shared;
    report.pages_sharing = stats.pages_sharing;
    report.zero_pages = stats.ksm_zero_pages;
    report.pages_scanned = stats.pages_scanned;
    report.full_scans = stats.full_scans;
    report.cow_breaks = stats.cow_breaks;
    report.rewritten_merges = stats.cow_breaks;
    for (index, guest) in cast.guests.iter().enumerate() {
        report.rewritten_merges += dedup.merged_among(index, guest.rewritten_pages())?;
    }
    let outcomes = stats.outcomes.iter();
    report.outcomes = outcomes.map(|(outcome, n)| (outcome.name(), n)).collect();
    Ok(())
}

fn measure(
    report: &mut Report,
    before: Usage,
    cast: &Cast,
    dedup: Option<&Dedup>,
) -> anyhow::Result<()> {
    let store = dedup.map(|dedup| dedup.ksm().store_bytes()).transpose()?;
    let after = Usage::now(store.unwrap_or(0) + cast.file_bytes()?)?;
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
    dedup: Option<&Dedup>,
    work: &Work,
    report: &mut Report,
) -> anyhow::Result<()> {
    if args.verify {
        run_guests(&mut cast.guests, &cast.sides, Guest::check_all, |_| Ok(()))?;
    }
    let rams = cast.rams();
    report.by_guest = guest_reports(&rams, dedup)?;
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
        if let Some(dedup) = dedup {
            dedup.check().context("the engine's records disagree")?;
        }
        report.verified = Some(report.lost_pages == 0);
    }
    Ok(())
}
