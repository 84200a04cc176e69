//! Processor time, user and system.

use std::time::Duration;

use anyhow::Context as _;
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Whoever only looks at the clock must not wait for those who work.
const WATCH_NICE: i32 = -20;

/// That of this process.
pub(crate) fn of_process() -> Duration {
    since_start(clock_gettime(ClockId::ProcessCPUTime))
}

/// That of the calling thread.
pub(crate) fn of_thread() -> Duration {
    since_start(clock_gettime(ClockId::ThreadCPUTime))
}

/// What a thread has had of processors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share {
    /// How long it ran.
    pub(crate) ran: Duration,
    /// How long it could have run, and did not.
    pub(crate) queued: Duration,
    /// How often it waited for something else.
    pub(crate) waits: u64,
}

impl Share {
    /// That of a thread so far, by its folder in /proc.
    pub(crate) fn of(folder: &str) -> anyhow::Result<Self> {
        let path = format!("{folder}/schedstat");
        let text = std::fs::read_to_string(&path).context(path)?;
        let mut words = text.split_ascii_whitespace().map(str::parse);
        let mut next = || words.next().context("schedstat is short");
        let (ran, queued) = (next()??, next()??);
        let path = format!("{folder}/status");
        let text = std::fs::read_to_string(&path).context(path)?;
        let waits = text
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
            .context("status is short")?;
        Ok(Self {
            ran: Duration::from_nanos(ran),
            queued: Duration::from_nanos(queued),
            waits: waits.trim().parse()?,
        })
    }

    /// What it has had since it had `earlier`.
    pub(crate) const fn since(self, earlier: Self) -> Self {
        Self {
            ran: self.ran.saturating_sub(earlier.ran),
            queued: self.queued.saturating_sub(earlier.queued),
            waits: self.waits.saturating_sub(earlier.waits),
        }
    }
}

fn since_start(time: Timespec) -> Duration {
    Duration::try_from(time).unwrap_or_default()
}

/// Sets the priority of the calling thread.
pub(crate) fn set_nice(nice: i32) -> anyhow::Result<()> {
    Ok(setpriority_process(Some(gettid()), nice)?)
}

/// Gives the calling thread the priority of one that watches others.
pub(crate) fn as_watcher() -> anyhow::Result<()> {
    set_nice(WATCH_NICE)
}
