//! Processor time, user and system.

use std::time::Duration;

use rustix::process::setpriority_process;
use rustix::thread::gettid;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// What ksmd runs at (`ksm_scan_thread` in `mm/ksm.c`), and so our scanner here.
const KSMD_NICE: i32 = 5;
/// Whoever only looks at the clock must not wait for those who work.
const WATCH_NICE: i32 = -10;

/// That of this process.
pub(crate) fn of_process() -> Duration {
    since_start(clock_gettime(ClockId::ProcessCPUTime))
}

/// That of the calling thread.
pub(crate) fn of_thread() -> Duration {
    since_start(clock_gettime(ClockId::ThreadCPUTime))
}

fn since_start(time: Timespec) -> Duration {
    Duration::try_from(time).unwrap_or_default()
}

/// Gives the calling thread the priority of ksmd.
pub(crate) fn as_ksmd() -> anyhow::Result<()> {
    Ok(setpriority_process(Some(gettid()), KSMD_NICE)?)
}

/// Gives the calling thread the priority of one that watches others.
pub(crate) fn as_watcher() -> anyhow::Result<()> {
    Ok(setpriority_process(Some(gettid()), WATCH_NICE)?)
}
