//! What goes on beside the merging: nothing, threads that burn CPU time, or
//! threads that change the layout of memory.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Builder, ScopedJoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::ValueEnum;

use super::burners::Burners;
use crate::cpu;
use crate::figures::Figures;

/// How long the load goes on before the merging begins.
const WARM_UP: Duration = Duration::from_millis(20);
/// How far ahead of its time a churner is before it sleeps: sleeping is coarse.
const AHEAD: Duration = Duration::from_millis(1);
/// Layout changes a second by which the wait for one is measured under any load.
const PROBES_PER_SECOND: f64 = 200.0;

/// A side, seen by those who change the layout of memory.
pub(super) trait Hotplug: Sync {
    /// Maps 256 MiB, adds it, writes `word` to it, withdraws it and unmaps it.
    fn change(&self, word: u64) -> anyhow::Result<()>;
}

/// What goes on beside the merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Load {
    /// Nothing
    Idle,
    /// A process whose threads burn all the CPU time that they get
    Burners,
    /// Threads that change the layout of memory
    Churners,
    /// The same, as much as the churners of that side took
    Matched,
}

/// Load, in how many threads, how fast.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weight {
    pub(super) load: Load,
    pub(super) threads: u32,
    /// Layout changes a second of all churners; `None` for as many as they can.
    pub(super) rate: Option<f64>,
    /// The part of its time that a matched burner burns.
    pub(super) duty: f64,
}

impl Weight {
    fn burners(&self) -> anyhow::Result<Option<Burners>> {
        let duty = match self.load {
            Load::Idle | Load::Churners => return Ok(None),
            Load::Burners => 1.0,
            Load::Matched => self.duty,
        };
        Burners::start(self.threads, duty).map(Some)
    }

    /// Threads of this process.
    const fn churners(&self) -> u32 {
        match self.load {
            Load::Churners => self.threads,
            Load::Idle | Load::Burners | Load::Matched => 0,
        }
    }
}

/// What a thread of the load has done.
#[derive(Clone, Copy, Debug, Default)]
struct Changes {
    count: u64,
    longest: Duration,
    cpu: Duration,
}

impl Changes {
    fn add(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            longest: self.longest.max(other.longest),
            cpu: self.cpu + other.cpu,
        }
    }
}

/// Calls `work` in a thread of its own while the load goes on. Adds what the load
/// came to to the figures that it returns.
pub(super) fn beside(
    weight: Weight,
    hotplug: &dyn Hotplug,
    work: impl FnOnce() -> anyhow::Result<Figures> + Send,
) -> anyhow::Result<Figures> {
    let crew = Crew {
        hotplug,
        stop: AtomicBool::new(false),
        words: AtomicU64::new(1),
        begin: Barrier::new(weight.churners() as usize + 2),
    };
    let _burners = weight.burners()?;
    let per_thread = weight.rate.map(|rate| rate / f64::from(weight.threads));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..weight.churners())
            .map(|_| {
                let churn = || {
                    crew.begin.wait();
                    crew.churn(per_thread)
                };
                named("churner").spawn_scoped(scope, churn)
            })
            .collect::<Result<_, _>>()?;
        let prober = named("prober").spawn_scoped(scope, || {
            crew.begin.wait();
            crew.churn(Some(PROBES_PER_SECOND))
        })?;
        crew.begin.wait();
        let began = Instant::now();
        sleep(WARM_UP);
        let worked = join(named("ksm-scan").spawn_scoped(scope, work)?);
        crew.stop.store(true, Ordering::Relaxed);
        let seconds = began.elapsed().as_secs_f64();
        let probes = join(prober)?;
        let mut churn = Changes::default();
        for thread in threads {
            churn = churn.add(join(thread)?);
        }
        let mut figures = worked?;
        figures.set("longest_probe_ms", milliseconds(probes.longest));
        if weight.load == Load::Churners {
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            figures.set("layout_changes_per_second", churn.count as f64 / seconds);
            figures.set("longest_change_ms", milliseconds(churn.longest));
            let cores = churn.cpu.as_secs_f64() / seconds;
            figures.set("churners_cpu_cores", cores);
        }
        Ok(figures)
    })
}

fn named(name: &str) -> Builder {
    Builder::new().name(name.to_owned())
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn join<T>(thread: ScopedJoinHandle<'_, anyhow::Result<T>>) -> anyhow::Result<T> {
    let panicked = |_| Err(anyhow!("a thread of the workload panicked"));
    thread.join().unwrap_or_else(panicked)
}

/// What the threads of a load share.
struct Crew<'a> {
    hotplug: &'a dyn Hotplug,
    stop: AtomicBool,
    /// No two regions are to hold the same.
    words: AtomicU64,
    begin: Barrier,
}

impl Crew<'_> {
    /// Changes the layout, so many times a second: who falls behind catches up.
    fn churn(&self, rate: Option<f64>) -> anyhow::Result<Changes> {
        let (began, cpu) = (Instant::now(), cpu::of_thread());
        let mut changes = Changes::default();
        while !self.stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            let word = self.words.fetch_add(1, Ordering::Relaxed);
            self.hotplug.change(word)?;
            changes = changes.add(Changes {
                count: 1,
                longest: start.elapsed(),
                cpu: Duration::ZERO,
            });
            if let Some(rate) = rate {
                #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
                let due = Duration::from_secs_f64(changes.count as f64 / rate);
                let ahead = due.saturating_sub(began.elapsed());
                if ahead > AHEAD {
                    sleep(ahead);
                }
            }
        }
        changes.cpu = cpu::of_thread() - cpu;
        Ok(changes)
    }
}
