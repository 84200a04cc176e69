//! What goes on beside the merging: nothing, threads that burn CPU time, or
//! threads that change the layout of memory.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Builder, ScopedJoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::ValueEnum;

use crate::cpu;
use crate::figures::Figures;

/// How long the load goes on before the merging begins.
const WARM_UP: Duration = Duration::from_millis(20);
/// How far ahead of its time a churner is before it sleeps: sleeping is coarse.
const AHEAD: Duration = Duration::from_millis(1);
/// Layout changes a second by which the wait for one is measured under any load.
const PROBES_PER_SECOND: f64 = 200.0;

/// Multiplications in a row of a thread that burns: some tens of microseconds.
const BURST: u32 = 20_000;
/// Less than that cannot be kept to.
const LEAST_DUTY: f64 = 0.01;

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
    /// Threads that burn CPU time
    Burners,
    /// Threads that change the layout of memory
    Churners,
    /// Threads that burn as much CPU time as the churners of that side took
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
        begin: Barrier::new(weight.threads as usize + 2),
    };
    let per_thread = weight.rate.map(|rate| rate / f64::from(weight.threads));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..weight.threads)
            .map(|_| {
                let labour = || crew.labour(weight, per_thread);
                named("load").spawn_scoped(scope, labour)
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
        let cores = churn.cpu.as_secs_f64() / seconds;
        figures.set("load_cpu_cores", cores);
        if weight.load == Load::Churners {
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            figures.set("layout_changes_per_second", churn.count as f64 / seconds);
            figures.set("longest_change_ms", milliseconds(churn.longest));
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
    fn labour(&self, weight: Weight, rate: Option<f64>) -> anyhow::Result<Changes> {
        self.begin.wait();
        let cpu = cpu::of_thread();
        let changes = match weight.load {
            Load::Idle => Changes::default(),
            Load::Burners => self.burn(1.0),
            Load::Matched => self.burn(weight.duty),
            Load::Churners => self.churn(rate)?,
        };
        Ok(Changes {
            cpu: cpu::of_thread() - cpu,
            ..changes
        })
    }

    /// Burns so much of its time.
    fn burn(&self, duty: f64) -> Changes {
        let (began, cpu) = (Instant::now(), cpu::of_thread());
        let mut x = 1_u64;
        while !self.stop.load(Ordering::Relaxed) {
            for _ in 0..BURST {
                x = black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            }
            if duty < 1.0 {
                let due = (cpu::of_thread() - cpu).div_f64(duty.max(LEAST_DUTY));
                sleep(due.saturating_sub(began.elapsed()));
            }
        }
        Changes::default()
    }

    /// Changes the layout, so many times a second: who falls behind catches up.
    fn churn(&self, rate: Option<f64>) -> anyhow::Result<Changes> {
        let began = Instant::now();
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
        Ok(changes)
    }
}
