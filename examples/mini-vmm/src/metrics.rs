//! [`MetricsFile`]: counters for Prometheus, in a file that is always whole.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::backend::linux::LinuxBackend;
use ksm_vmm_glue::prometheus::KsmCollector;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

use crate::dedup::Dedup;

/// How often it is written anew.
const INTERVAL: Duration = Duration::from_secs(1);

/// Where the counters of all guests are written, as a node exporter's textfile
/// collector reads them.
#[derive(Debug)]
pub(crate) struct MetricsFile {
    registry: Registry,
    collector: Arc<KsmCollector<LinuxBackend>>,
    path: PathBuf,
    written: Option<Instant>,
}

impl MetricsFile {
    /// Nothing is written yet.
    pub(crate) fn new(path: &Path, dedup: &Dedup) -> Self {
        let collector = Arc::new(KsmCollector::new(Arc::clone(dedup.ksm())));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Arc::clone(&collector)));
        Self {
            registry,
            collector,
            path: path.to_owned(),
            written: None,
        }
    }

    /// Writes it if it is time.
    pub(crate) fn glance(&mut self, dedup: &Dedup) -> anyhow::Result<()> {
        match self.written {
            Some(written) if written.elapsed() < INTERVAL => Ok(()),
            _ => self.write(dedup),
        }
    }

    /// Writes it, guests by their numbers. Whoever reads meanwhile sees the last
    /// one.
    pub(crate) fn write(&mut self, dedup: &Dedup) -> anyhow::Result<()> {
        // A guest that was registered again is another one to the engine.
        for (number, space) in dedup.spaces().into_iter().enumerate() {
            self.collector.name_guest(space, number.to_string());
        }
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        let mut beside = self.path.clone().into_os_string();
        beside.push(".tmp");
        fs::write(&beside, text)
            .and_then(|()| fs::rename(&beside, &self.path))
            .with_context(|| format!("{} cannot be written", self.path.display()))?;
        self.written = Some(Instant::now());
        Ok(())
    }
}
