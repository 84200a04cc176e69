//! [`Recorder`]: what is written to files while a run goes on: a picture, and
//! counters.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::page::{PAGE_SIZE_U64, bytes_in};
use procfs::process::{MemoryPageFlags, PageInfo, Process};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::args::Args;
use crate::figures::{guest_reports, resident_bytes};
use crate::merger::Merger;
use crate::metrics::MetricsFile;
use crate::plot;
use crate::ram::Ram;
use crate::timeline::Timeline;

/// A sample that takes long is followed by so many times its time without one, as
/// long as that is not too long.
const RELIEF: u32 = 20;
const MAX_GAP: Duration = Duration::from_millis(500);

/// Looks on while a run goes on.
#[derive(Debug)]
pub(crate) struct Recorder {
    rams: Vec<Ram>,
    plot: Option<Plot>,
    metrics: Option<MetricsFile>,
}

#[derive(Debug)]
struct Plot {
    path: PathBuf,
    caption: String,
    timeline: Timeline,
    /// When the next sample may be taken.
    next: Instant,
}

impl Recorder {
    /// For the files that `args` ask for, which must be writable now, not only at
    /// the end. `caption` stands above the picture.
    pub(crate) fn new(args: &Args, rams: Vec<Ram>, caption: &str) -> anyhow::Result<Self> {
        for path in [&args.plot, &args.metrics].into_iter().flatten() {
            must_be_writable(path)?;
        }
        let plot = |path: &PathBuf| Plot {
            path: path.clone(),
            caption: caption.to_owned(),
            timeline: Timeline::new(),
            next: Instant::now(),
        };
        Ok(Self {
            rams,
            plot: args.plot.as_ref().map(plot),
            metrics: None,
        })
    }

    /// Guests have filled their memory, and are merged from here on, if they are.
    pub(crate) fn begin_work(
        &mut self,
        args: &Args,
        merger: Option<&Merger>,
    ) -> anyhow::Result<()> {
        if let Some(plot) = &mut self.plot {
            let own: anyhow::Result<_> = self.rams.iter().map(own_bytes).collect();
            plot.timeline.begin_work(own?, merger.is_some());
            plot.next = Instant::now();
        }
        if let (Some(path), Some(dedup)) = (&args.metrics, merger.and_then(Merger::ours)) {
            self.metrics = Some(MetricsFile::new(path, dedup));
        }
        self.glance(merger)
    }

    /// Takes a sample and writes counters, where they are due.
    pub(crate) fn glance(&mut self, merger: Option<&Merger>) -> anyhow::Result<()> {
        if let Some(plot) = &mut self.plot
            && Instant::now() >= plot.next
        {
            plot.sample(&self.rams, merger, false)?;
        }
        match (&mut self.metrics, merger.and_then(Merger::ours)) {
            (Some(metrics), Some(dedup)) => metrics.glance(dedup),
            _ => Ok(()),
        }
    }

    /// Writes everything: this is how it ended.
    pub(crate) fn finish(&mut self, merger: Option<&Merger>) -> anyhow::Result<()> {
        if let (Some(metrics), Some(dedup)) = (&mut self.metrics, merger.and_then(Merger::ours)) {
            metrics.write(dedup)?;
        }
        if let Some(plot) = &mut self.plot {
            plot.sample(&self.rams, merger, true)?;
            let svg = plot::svg(&plot.timeline, &plot.caption)?;
            fs::write(&plot.path, svg)
                .with_context(|| format!("{} cannot be written", plot.path.display()))?;
        }
        Ok(())
    }
}

impl Plot {
    fn sample(
        &mut self,
        rams: &[Ram],
        merger: Option<&Merger>,
        is_last: bool,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let resident = resident_bytes(rams, merger)?;
        let saved = if self.timeline.guests().is_empty() {
            Vec::new()
        } else {
            guest_reports(rams, merger)?
        };
        let saved = saved.iter().map(|guest| guest.saved_bytes).collect();
        self.timeline.sample(resident, saved, is_last);
        let gap = (start.elapsed() * RELIEF).min(MAX_GAP);
        self.next = Instant::now() + gap;
        Ok(())
    }
}

fn must_be_writable(path: &Path) -> anyhow::Result<()> {
    let opened = File::options().create(true).append(true).open(path);
    opened
        .map(drop)
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// What a guest's work memory takes by itself: its pages that are present and
/// mapped nowhere else, so that the page of zeros does not count.
fn own_bytes(ram: &Ram) -> anyhow::Result<u64> {
    let mut pagemap = Process::myself()?.pagemap().context("/proc/self/pagemap")?;
    let own = MemoryPageFlags::PRESENT | MemoryPageFlags::MMAP_EXCLUSIVE;
    let mut pages = 0;
    for region in ram.work.iter() {
        let start = region.get_host_address(MemoryRegionAddress(0))?.addr() as u64;
        let first = usize::try_from(start / PAGE_SIZE_U64)?;
        let count = usize::try_from(region.len() / PAGE_SIZE_U64)?;
        let infos = pagemap.get_range_info(first..first + count)?;
        let is_own =
            |info: &&PageInfo| matches!(info, PageInfo::MemoryPage(flags) if flags.contains(own));
        pages += infos.iter().filter(is_own).count() as u64;
    }
    Ok(bytes_in(pages))
}
