//! Counters for Prometheus: a [`KsmCollector`] for the VMM's own registry.
//!
//! ```
//! use std::sync::Arc;
//!
//! use ksm_core::backend::sim::{SimBackend, SimConfig};
//! use ksm_core::{Config, Ksm};
//! use ksm_vmm_glue::prometheus::KsmCollector;
//! use prometheus_client::registry::Registry;
//!
//! let ksm = Arc::new(Ksm::new(SimBackend::new(SimConfig::default()), Config::default())?);
//! let guest = ksm.create_space(ksm.create_domain()?)?;
//!
//! let collector = Arc::new(KsmCollector::new(ksm));
//! let mut registry = Registry::default();
//! registry.register_collector(Box::new(Arc::clone(&collector)));
//! collector.name_guest(guest, "web-1"); // otherwise it is called s1
//!
//! // For each scrape, as `application/openmetrics-text; version=1.0.0`:
//! let mut text = String::new();
//! prometheus_client::encoding::text::encode(&mut text, &registry)?;
//! assert!(text.contains("ksm_guest_pages{domain=\"d0\",guest=\"web-1\"} 0\n"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Metrics named `ksm_guest_...` are a guest's, labelled `domain` and `guest`; the
//! others a trust domain's, labelled `domain`, to be summed over all of them;
//! `ksm_full_scans_total` and `ksm_store_bytes` are the engine's. What counts pages
//! has the kernel's name. What became of pages is one counter,
//! `ksm_page_outcomes_total`, labelled `outcome` by the names of
//! [`Outcome`](ksm_core::Outcome).

mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use ksm_core::backend::Backend;
use ksm_core::{DomainId, Ksm, MemoryStats, OutcomeCounts, SpaceId, Stats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use table::{DOMAIN_METRICS, GUEST_METRICS, Metric, Read};

/// An engine's counters, read anew for every scrape.
pub struct KsmCollector<B: Backend> {
    ksm: Arc<Ksm<B>>,
    domains: Names<DomainId>,
    guests: Names<SpaceId>,
}

impl<B: Backend> fmt::Debug for KsmCollector<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the engine, which would print every region.
        f.debug_struct("KsmCollector")
            .field("domains", &self.domains)
            .field("guests", &self.guests)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> KsmCollector<B> {
    /// Of all domains and guests of `ksm`, those to come as well.
    #[must_use]
    pub fn new(ksm: Arc<Ksm<B>>) -> Self {
        Self {
            ksm,
            domains: Names::default(),
            guests: Names::default(),
        }
    }

    /// Sets the label `domain` of a trust domain. Until then, and where another
    /// one has that name, it is the engine's name, such as `d0`.
    pub fn name_domain(&self, domain: DomainId, name: impl Into<String>) {
        self.domains.set(domain, name.into());
    }

    /// Sets the label `guest` of an address space. Until then, and where another
    /// one has that name, it is the engine's name, such as `s1`.
    pub fn name_guest(&self, guest: SpaceId, name: impl Into<String>) {
        self.guests.set(guest, name.into());
    }
}

/// What the VMM calls things.
#[derive(Debug)]
struct Names<Id>(Mutex<BTreeMap<Id, String>>);

impl<Id> Default for Names<Id> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<Id: Copy + Ord + fmt::Display> Names<Id> {
    fn set(&self, id: Id, name: String) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(id, name);
    }

    /// A label for each of `ids`, no two alike. Forgets the names of those that
    /// have gone.
    fn labels(&self, ids: &[Id]) -> BTreeMap<Id, String> {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One that came and was named since `ids` were listed is newer than they.
        let newest = ids.iter().max();
        names.retain(|id, _| ids.contains(id) || Some(id) > newest);
        let mut taken: BTreeSet<String> = ids.iter().map(Id::to_string).collect();
        let label = |&id: &Id| match names.get(&id) {
            Some(name) if taken.insert(name.clone()) => (id, name.clone()),
            _ => (id, id.to_string()),
        };
        ids.iter().map(label).collect()
    }
}

type Labels = Vec<(&'static str, String)>;

impl<B: Backend> Collector for KsmCollector<B> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (domain_ids, spaces) = (self.ksm.domains(), self.ksm.spaces());
        let space_ids: Vec<_> = spaces.iter().map(|(space, _)| *space).collect();
        let domain_names = self.domains.labels(&domain_ids);
        let guest_names = self.guests.labels(&space_ids);

        // One that went away since is left out.
        let domains = domain_ids.into_iter().filter_map(|id| {
            let labels = vec![("domain", domain_names.get(&id)?.clone())];
            Some((labels, self.ksm.domain_stats(id).ok()?))
        });
        let domains: Vec<(Labels, Stats)> = domains.collect();
        let guests = spaces.into_iter().filter_map(|(space, domain)| {
            let domain = ("domain", domain_names.get(&domain)?.clone());
            let labels = vec![domain, ("guest", guest_names.get(&space)?.clone())];
            Some((labels, self.ksm.space_stats(space).ok()?))
        });
        let guests: Vec<(Labels, MemoryStats)> = guests.collect();

        encode_all(&mut encoder, &DOMAIN_METRICS, &domains)?;
        let outcomes = domains
            .iter()
            .map(|(labels, stats)| (labels, &stats.outcomes));
        encode_outcomes(&mut encoder, "ksm_page_outcomes", outcomes)?;
        encode_all(&mut encoder, &GUEST_METRICS, &guests)?;
        let outcomes = guests
            .iter()
            .map(|(labels, stats)| (labels, &stats.outcomes));
        encode_outcomes(&mut encoder, "ksm_guest_page_outcomes", outcomes)?;
        self.encode_engine(&mut encoder)
    }
}

impl<B: Backend> KsmCollector<B> {
    fn encode_engine(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Passes over all regions that were finished.";
        let kind = MetricType::Counter;
        let metric = encoder.encode_descriptor("ksm_full_scans", help, None, kind)?;
        ConstCounter::new(self.ksm.stats().full_scans).encode(metric)?;
        // Where the host cannot say, nothing is better than a wrong number.
        let Ok(bytes) = self.ksm.store_bytes() else {
            return Ok(());
        };
        let help = "Memory that shared frames take.";
        let (unit, kind) = (Some(&Unit::Bytes), MetricType::Gauge);
        let metric = encoder.encode_descriptor("ksm_store", help, unit, kind)?;
        ConstGauge::new(bytes).encode(metric)
    }
}

fn encode_all<T>(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &[Metric<T>],
    values: &[(Labels, T)],
) -> fmt::Result {
    for Metric {
        name,
        help,
        unit,
        read,
    } in metrics
    {
        let kind = match read {
            Read::Counter(_) => MetricType::Counter,
            Read::Gauge(_) | Read::Signed(_) => MetricType::Gauge,
        };
        let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, stats) in values {
            let metric = family.encode_family(labels)?;
            match read {
                Read::Counter(read) => ConstCounter::new(read(stats)).encode(metric)?,
                Read::Gauge(read) => ConstGauge::new(read(stats)).encode(metric)?,
                Read::Signed(read) => ConstGauge::new(read(stats)).encode(metric)?,
            }
        }
    }
    Ok(())
}

fn encode_outcomes<'a>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    counts: impl Iterator<Item = (&'a Labels, &'a OutcomeCounts)>,
) -> fmt::Result {
    let help = "What became of pages that were looked at.";
    let mut family: MetricEncoder<'_> =
        encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, counts) in counts {
        for (outcome, count) in counts.iter() {
            let mut labels = labels.clone();
            labels.push(("outcome", outcome.name().to_owned()));
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
