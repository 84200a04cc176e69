//! [`Usage`]: what this process takes of the host's memory and processors.

use std::time::Duration;

use anyhow::Context as _;
use procfs::process::Process;
use procfs::{Current as _, Meminfo};
use rustix::time::{ClockId, clock_gettime};

/// Memory in use at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Anonymous memory of this process (`RssAnon` in `/proc/self/status`) and
    /// what the engine's stores and the guests' memfds hold, in bytes. The memory
    /// of a file is counted once, however often it is mapped.
    pub(crate) resident_bytes: u64,
    /// Free memory of the host (`MemFree` in `/proc/meminfo`), in bytes.
    pub(crate) free_bytes: u64,
    /// Anonymous memory of this process that is in huge pages, in bytes.
    pub(crate) huge_bytes: u64,
    /// Mappings of this process.
    pub(crate) vmas: u64,
}

impl Usage {
    /// Looks now. `file_bytes` is what stores and memfds hold.
    pub(crate) fn now(file_bytes: u64) -> anyhow::Result<Self> {
        let myself = Process::myself()?;
        Ok(Self {
            resident_bytes: anonymous_bytes()? + file_bytes,
            free_bytes: Meminfo::current().context("/proc/meminfo")?.mem_free,
            huge_bytes: huge_bytes(&myself),
            vmas: myself.maps().context("/proc/self/maps")?.len() as u64,
        })
    }
}

/// Anonymous memory of this process (`RssAnon`), in bytes.
pub(crate) fn anonymous_bytes() -> anyhow::Result<u64> {
    let status = Process::myself()?.status().context("/proc/self/status")?;
    let kib = status
        .rssanon
        .context("/proc/self/status has no RssAnon: Linux 4.5 or later is needed")?;
    Ok(kib * 1024)
}

/// `AnonHugePages` of `/proc/self/smaps_rollup`; 0 on kernels without it.
fn huge_bytes(myself: &Process) -> u64 {
    let rollup = myself.smaps_rollup().ok();
    rollup
        .and_then(|rollup| {
            let map = rollup.memory_map_rollup.0.into_iter().next()?;
            map.extension.map.get("AnonHugePages").copied()
        })
        .unwrap_or(0)
}

/// Memory that the host can give without swapping (`MemAvailable`).
pub(crate) fn available_bytes() -> anyhow::Result<u64> {
    let info = Meminfo::current().context("/proc/meminfo cannot be read")?;
    info.mem_available
        .context("/proc/meminfo has no MemAvailable")
}

/// Processor time that this process has used, in user and system mode, its
/// vCPUs included.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanos)
}
