//! [`Unrest`]: threads that disturb guests while they work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};

use crate::args::Args;
use crate::chaos::{ChaosTally, Target, disturb};
use crate::dedup::Dedup;
use crate::hotplug::{Board, Churn, HotplugTally};

/// How long it takes at most until nothing is disturbed any more. It is not used up
/// unless a vCPU hangs, which cannot be brought back.
const PATIENCE: Duration = Duration::from_secs(60);

type Handle<'scope, T> = ScopedJoinHandle<'scope, anyhow::Result<T>>;

/// Chaos, and memory that comes and goes.
pub(crate) struct Unrest<'scope> {
    chaos: Vec<Handle<'scope, ChaosTally>>,
    plugs: Vec<Handle<'scope, HotplugTally>>,
    calm: &'scope AtomicBool,
    told: Option<Instant>,
}

impl<'scope> Unrest<'scope> {
    /// Nothing is disturbed.
    pub(crate) const fn none(calm: &'scope AtomicBool) -> Self {
        Self {
            chaos: Vec::new(),
            plugs: Vec::new(),
            calm,
            told: None,
        }
    }

    /// Starts what `--chaos` asks for.
    pub(crate) fn add_chaos(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        dedup: &'scope Dedup,
        targets: &'scope [Target],
        args: &Args,
    ) {
        let (calm, seed) = (self.calm, args.seed);
        self.chaos.extend(
            args.chaos
                .then(|| scope.spawn(move || disturb(dedup, targets, seed, calm))),
        );
    }

    /// Starts what `--hotplug` asks for.
    pub(crate) fn add_hotplug(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        churn: &'scope Churn<'scope>,
        boards: &'scope [Board],
        args: &Args,
    ) {
        let windows = (0..).flat_map(|window| boards.iter().map(move |board| (window, board)));
        let threads = windows.zip(1000..).take(args.reshape.hotplug.into());
        self.plugs.extend(
            threads
                .map(|((window, board), who)| scope.spawn(move || churn.run(board, window, who))),
        );
    }

    /// Whether some thread has ended, of itself or as it was told.
    pub(crate) fn has_ended_in_part(&self) -> bool {
        self.chaos.iter().any(Handle::is_finished) || self.plugs.iter().any(Handle::is_finished)
    }

    /// Whether nothing is disturbed any more.
    pub(crate) fn is_over(&self) -> bool {
        self.chaos.iter().all(Handle::is_finished) && self.plugs.iter().all(Handle::is_finished)
    }

    /// Tells the threads to end, and whether they have.
    pub(crate) fn end(&mut self) -> bool {
        self.calm.store(true, Ordering::Relaxed);
        let told = *self.told.get_or_insert_with(Instant::now);
        if !self.is_over() && told.elapsed() > PATIENCE {
            eprintln!(
                "memory that was added is not withdrawn after {} s: its vCPU hangs, most likely in a fault that nobody answers",
                PATIENCE.as_secs()
            );
            std::process::exit(1);
        }
        self.is_over()
    }

    /// What the threads did, once they have ended.
    pub(crate) fn tallies(self) -> anyhow::Result<(Option<ChaosTally>, Option<HotplugTally>)> {
        let chaos = self.chaos.into_iter().map(joined);
        let chaos: anyhow::Result<Vec<_>> = chaos.collect();
        let plugs = self.plugs.into_iter().map(joined);
        let plugs: anyhow::Result<Vec<_>> = plugs.collect();
        let hotplug = plugs.context("hotplug failed")?;
        let chaos = chaos.context("a disturbance failed")?;
        Ok((
            chaos.first().copied(),
            hotplug.into_iter().reduce(HotplugTally::and),
        ))
    }
}

fn joined<T>(thread: Handle<'_, T>) -> anyhow::Result<T> {
    let done = thread.join();
    done.map_err(|_| anyhow!("a thread that disturbs guests panicked"))?
}
