//! A run: guests boot, work while their memory is merged, and go on afterwards.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ksm_core::page::bytes_in;
use vm_memory::GuestMemoryMmap;

use super::console::{Console, Marks};
use super::gate::End;
use super::guest::{LinuxGuest, listen_for_calls};
use super::layout;
use super::report::{Comparison, Found, LinuxGuestReport, LinuxReport};
use super::stage::Stage;
use crate::args::{Args, Engine, Thp};
use crate::cast::{config, pacing};
use crate::dedup::Dedup;
use crate::host::Host;
use crate::ksmd::Ksmd;
use crate::kvm_slots::advise_huge;
use crate::merger::Merger;
use crate::recorder::Recorder;
use crate::report::Shown;
use crate::usage::Usage;

/// Beats that a guest must make once everything is merged.
const BEATS_AFTER: u64 = 2;
/// How often it is said how things stand.
const NEWS: Duration = Duration::from_secs(5);

/// Runs Linux guests as `args` say, on what `host` has.
pub(crate) fn run(args: &Args, mut host: Host) -> anyhow::Result<Shown> {
    let stage = stage(args, &host)?;
    let mut recorder = Recorder::new(args, memories(&stage), &caption(args))?;
    eprintln!(
        "{} Linux guests of {} MiB boot",
        args.guests(),
        bytes_in(args.mem.pages()) >> 20
    );
    let mut report = LinuxReport {
        mode: host.mode(),
        guests: args.guests(),
        vcpus: args.linux.vcpus,
        guest_bytes: bytes_in(args.mem.pages()),
        kernel: kernel_name(args),
        notes: std::mem::take(&mut host.notes),
        by_guest: (0..stage.guests().len())
            .map(|guest| LinuxGuestReport {
                guest,
                ..LinuxGuestReport::default()
            })
            .collect(),
        ..LinuxReport::default()
    };
    if args.linux.boot_marker.is_some() {
        let took = stage.boot()?;
        for (guest, took) in report.by_guest.iter_mut().zip(took) {
            guest.boot_seconds = Some(took.as_secs_f64());
        }
    }
    report.resident_before_bytes = Usage::now(0)?.resident_bytes;
    for (mine, guest) in report.by_guest.iter_mut().zip(stage.guests()) {
        mine.beats_before = guest.watch().beats();
    }

    let kernels = if args.linux.compare_kernel {
        Some(let_ksmd_merge(args, &stage)?)
    } else {
        None
    };
    let begin = Instant::now();
    let merger = merger(args, host, &stage)?;
    report.engine = match &merger {
        Some(Merger::Ours(_)) => "linux",
        Some(Merger::Kernel(_)) => "kernel",
        None => "none",
    };
    if let (Some(kernels), Some(merger)) = (kernels, &merger) {
        settle(args, merger)?;
        let ours = Found::from(&merger.stats()?);
        report.comparison = Some(Comparison::new(
            (ours, begin.elapsed().as_secs_f64()),
            kernels,
        ));
    }
    recorder.begin_work(args, merger.as_ref())?;
    perform(args, &stage, merger.as_ref(), &mut recorder)?;
    for (mine, guest) in report.by_guest.iter_mut().zip(stage.guests()) {
        mine.beats_meanwhile = guest.watch().beats() - mine.beats_before;
    }
    if let Some(merger) = &merger {
        settle(args, merger)?;
        count(&mut report, merger)?;
    }
    measure(&mut report, merger.as_ref())?;
    recorder.finish(merger.as_ref())?;
    if args.linux.beat_marker.is_some() {
        let beats = stage.beat(BEATS_AFTER)?;
        for (mine, beats) in report.by_guest.iter_mut().zip(beats) {
            mine.beats_after = beats;
        }
    }
    for (mine, guest) in report.by_guest.iter_mut().zip(stage.guests()) {
        mine.has_reset = guest.ended() == Some(End::Reset);
    }
    if let Some(dedup) = merger.as_ref().and_then(Merger::ours) {
        dedup.check().context("the engine's records disagree")?;
    }
    Ok(Shown {
        tables: report.tables(),
        json: report.json()?,
        // What makes it bad is an error above.
        is_good: true,
    })
}

/// Makes the guests, loaded and held.
fn stage(args: &Args, host: &Host) -> anyhow::Result<Stage> {
    let Some((kvm, options)) = host.kvm.as_ref().zip(args.linux.boot_options()) else {
        bail!("Linux guests need KVM");
    };
    listen_for_calls()?;
    let marks = Marks {
        boot: args.linux.boot_marker.clone(),
        beat: args.linux.beat_marker.clone(),
    };
    let mut guests = Vec::new();
    for index in 0..usize::from(args.guests()) {
        let memory = layout::map(bytes_in(args.mem.pages()))?;
        match args.thp {
            Thp::Always => advise_huge(&memory, true)?,
            Thp::Never => advise_huge(&memory, false)?,
            Thp::Madvise => {}
        }
        let console = Console::open(index, args.linux.serial_dir.as_deref(), marks.clone())?;
        let guest = LinuxGuest::new(kvm, memory, &options, console);
        guests.push(guest.with_context(|| format!("guest {index} cannot be made"))?);
    }
    Ok(Stage::new(guests, args.linux.one_at_a_time))
}

fn memories(stage: &Stage) -> Vec<GuestMemoryMmap> {
    let guests = stage.guests().iter();
    guests.map(|guest| guest.memory().clone()).collect()
}

/// What ksmd finds on these guests, and in how many seconds. Then all is undone.
fn let_ksmd_merge(args: &Args, stage: &Stage) -> anyhow::Result<(Found, f64)> {
    let begin = Instant::now();
    let ksmd = Ksmd::new(memories(stage), pacing(args))?;
    ksmd.start()?;
    ksmd.settle()?;
    let found = Found::from(&ksmd.stats()?);
    let seconds = begin.elapsed().as_secs_f64();
    ksmd.undo()?;
    Ok((found, seconds))
}

fn merger(args: &Args, host: Host, stage: &Stage) -> anyhow::Result<Option<Merger>> {
    let (memories, pacing) = (memories(stage), pacing(args));
    Ok(match (args.engine, host.backend) {
        (Engine::Kernel, _) => Some(Merger::Kernel(Ksmd::new(memories, pacing)?)),
        (Engine::Ours, Some(backend)) => {
            let config = config(args);
            let dedup = Dedup::new(backend, config, pacing, args.isolate, &memories, 0)?;
            Some(Merger::Ours(dedup))
        }
        (Engine::Ours, None) => None,
    })
}

/// Merges what is equal and rests: guests are held.
fn settle(args: &Args, merger: &Merger) -> anyhow::Result<()> {
    match merger {
        Merger::Ours(dedup) => dedup.settle_until_quiet(2 + u64::from(args.settle_passes)),
        Merger::Kernel(ksmd) => ksmd.settle(),
    }
}

/// Lets guests work and memory be merged until the time is up.
fn perform(
    args: &Args,
    stage: &Stage,
    merger: Option<&Merger>,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let scanner = merger.map(Merger::start).transpose()?.flatten();
    let mut last = Instant::now();
    let time = Duration::from_secs(args.seconds.into());
    let performed = stage.perform(time, || {
        if last.elapsed() >= NEWS {
            last = Instant::now();
            tell(stage, merger)?;
        }
        recorder.glance(merger)
    });
    if let Some(scanner) = scanner {
        Dedup::stop_scanner(scanner)?;
    }
    performed
}

/// Says how things stand.
fn tell(stage: &Stage, merger: Option<&Merger>) -> anyhow::Result<()> {
    let guests = stage.guests().iter();
    let beats: Vec<String> = guests.map(|g| g.watch().beats().to_string()).collect();
    let stats = merger.map(Merger::stats).transpose()?.unwrap_or_default();
    eprintln!(
        "  pass {}, {} pages in {} frames, {} zero, {} MiB saved | beats {}",
        stats.full_scans,
        stats.pages_shared + stats.pages_sharing,
        stats.pages_shared,
        stats.ksm_zero_pages,
        stats.saved_bytes() >> 20,
        beats.join(" "),
    );
    Ok(())
}

fn count(report: &mut LinuxReport, merger: &Merger) -> anyhow::Result<()> {
    let stats = merger.stats()?;
    report.found = Found::from(&stats);
    report.saved_bytes = stats.saved_bytes();
    report.metadata_bytes = stats.metadata_bytes;
    report.pages_scanned = stats.pages_scanned;
    report.full_scans = stats.full_scans;
    report.cow_breaks = stats.cow_breaks;
    for (index, guest) in report.by_guest.iter_mut().enumerate() {
        guest.count(&merger.guest_stats(index)?);
    }
    Ok(())
}

fn measure(report: &mut LinuxReport, merger: Option<&Merger>) -> anyhow::Result<()> {
    let store = merger.and_then(Merger::ours);
    let store = store.map(|dedup| dedup.ksm().store_bytes()).transpose()?;
    let mut after = Usage::now(store.unwrap_or(0))?;
    if let Some(Merger::Kernel(_)) = merger {
        after.resident_bytes -= Ksmd::counted_twice_bytes()?;
    }
    report.resident_after_bytes = after.resident_bytes;
    report.vmas = after.vmas;
    Ok(())
}

/// What stands above the picture.
fn caption(args: &Args) -> String {
    let mib = bytes_in(args.mem.pages()) >> 20;
    let kernel = kernel_name(args);
    format!(
        "mini-vmm: {} guests of {mib} MiB run {kernel}",
        args.guests()
    )
}

fn kernel_name(args: &Args) -> String {
    let name = args.linux.kernel.as_ref().and_then(|path| path.file_name());
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
