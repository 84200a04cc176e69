//! [`Recorder`]: what is written to files while a run goes on: a picture, and
//! counters.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::page::{PAGE_SIZE_U64, bytes_in};
use procfs::process::{MemoryPageFlags, PageInfo, Process};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

use crate::args::Args;
use crate::figures::resident_bytes;
use crate::merger::Merger;
use crate::metrics::MetricsFile;
use crate::plot;
use crate::ram::Ram;
use crate::savings::saved_bytes;
use crate::timeline::Timeline;

/// A sample that takes long is followed by so many times its time without one, as
/// long as that is not too long.
const RELIEF: u32 = 20;
const MAX_GAP: Duration = Duration::from_millis(500);

/// Looks on while a run goes on.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// What may be merged of each guest's memory.
    memories: Vec<GuestMemoryMmap>,
    /// Memory that may be in files.
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
    /// Of built-in guests: see [`Recorder::new`].
    pub(crate) fn of(args: &Args, rams: Vec<Ram>, caption: &str) -> anyhow::Result<Self> {
        let memories = rams.iter().map(|ram| ram.work.clone()).collect();
        let recorder = Self::new(args, memories, caption)?;
        Ok(Self { rams, ..recorder })
    }

    /// For the files that `args` ask for, which must be writable now, not only at
    /// the end. `caption` stands above the picture.
    pub(crate) fn new(
        args: &Args,
        memories: Vec<GuestMemoryMmap>,
        caption: &str,
    ) -> anyhow::Result<Self> {
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
            memories,
            rams: Vec::new(),
            plot: args.plot.as_ref().map(plot),
            metrics: None,
        })
    }

    /// Guests hold what they do, and are merged from here on, if they are.
    pub(crate) fn begin_work(
        &mut self,
        args: &Args,
        merger: Option<&Merger>,
    ) -> anyhow::Result<()> {
        if let Some(plot) = &mut self.plot {
            let own: anyhow::Result<_> = self.memories.iter().map(own_bytes).collect();
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
        let guests = self.timeline.guests().len();
        let saved = match merger {
            Some(merger) => saved_by_guest(merger, guests)?,
            None => vec![0; guests],
        };
        self.timeline.sample(resident, saved, is_last);
        let gap = (start.elapsed() * RELIEF).min(MAX_GAP);
        self.next = Instant::now() + gap;
        Ok(())
    }
}

fn saved_by_guest(merger: &Merger, guests: usize) -> anyhow::Result<Vec<u64>> {
    let all = merger.stats()?;
    let saved = |guest| Ok(saved_bytes(&merger.guest_stats(guest)?, &all));
    (0..guests).map(saved).collect()
}

fn must_be_writable(path: &Path) -> anyhow::Result<()> {
    let opened = File::options().create(true).append(true).open(path);
    opened
        .map(drop)
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// What a guest's memory takes by itself: its pages that are present and mapped
/// nowhere else, so that the page of zeros does not count.
fn own_bytes(memory: &GuestMemoryMmap) -> anyhow::Result<u64> {
    let mut pagemap = Process::myself()?.pagemap().context("/proc/self/pagemap")?;
    let own = MemoryPageFlags::PRESENT | MemoryPageFlags::MMAP_EXCLUSIVE;
    let mut pages = 0;
    for region in memory.iter() {
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
