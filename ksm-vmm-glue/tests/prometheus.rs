//! The Prometheus text, read line by line, against the counters of an engine.
#![cfg(feature = "prometheus")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ksm_core::backend::sim::{SimBackend, SimConfig, SimGuest, pattern};
use ksm_core::{Config, DomainId, Ksm, Outcome, PageIndex, RegionId, RegionOptions, SpaceId};
use ksm_vmm_glue::prometheus::KsmCollector;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

const PAGES: u64 = 16;

/// A text in the OpenMetrics format, whose rules were checked as it was read.
#[derive(Debug, Default)]
struct Parsed {
    /// By name and labels, as they stand there.
    samples: BTreeMap<String, i64>,
    /// Each family's type.
    types: BTreeMap<String, String>,
}

impl Parsed {
    /// Each family: its help, its type, its unit if it has one, then its samples
    /// and nobody else's; the end is marked.
    fn new(text: &str) -> Self {
        let mut parsed = Self::default();
        let mut family = String::new();
        let mut said: Vec<&str> = Vec::new();
        let body = text.strip_suffix("# EOF\n").expect("the end is marked");
        for line in body.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let mut words = comment.splitn(3, ' ');
                let (what, name, rest) = (
                    words.next().unwrap(),
                    words.next().unwrap(),
                    words.next().unwrap(),
                );
                match what {
                    "HELP" => {
                        name.clone_into(&mut family);
                        said.clear();
                        assert!(rest.ends_with('.') && !rest.contains('\\'), "{line}");
                        assert!(name.starts_with("ksm_") && is_name(name), "{line}");
                    }
                    "TYPE" => {
                        assert_eq!(said, ["HELP"], "{line}");
                        let before = parsed.types.insert(name.to_owned(), rest.to_owned());
                        assert_eq!(before, None, "a family comes twice: {line}");
                        assert!(["gauge", "counter"].contains(&rest), "{line}");
                    }
                    "UNIT" => {
                        assert_eq!(said, ["HELP", "TYPE"], "{line}");
                        assert!(name.ends_with(&format!("_{rest}")), "{line}");
                    }
                    _ => panic!("{line}"),
                }
                assert_eq!(name, family, "{line}");
                said.push(what);
                continue;
            }
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let of_family = match parsed.types[&family].as_str() {
                "counter" => name.strip_suffix("_total"),
                _ => Some(name),
            };
            assert_eq!(of_family, Some(&family[..]), "{line}");
            let before = parsed
                .samples
                .insert(series.to_owned(), value.parse().unwrap());
            assert_eq!(before, None, "a series comes twice: {line}");
        }
        parsed
    }

    #[track_caller]
    fn demand(&self, series: &str, value: u64) {
        let found = self.samples.get(series);
        assert_eq!(found, Some(&value.cast_signed()), "{series}: {self:#?}");
    }
}

fn is_name(name: &str) -> bool {
    name.bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

/// An engine with three guests, two of them in one domain.
struct Stage {
    ksm: Arc<Ksm<SimBackend>>,
    collector: Arc<KsmCollector<SimBackend>>,
    registry: Registry,
    domains: [DomainId; 2],
    guests: Vec<(SpaceId, RegionId, SimGuest)>,
}

impl Stage {
    fn new() -> Self {
        let sim = SimBackend::new(SimConfig::default());
        let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
        let domains = [ksm.create_domain().unwrap(), ksm.create_domain().unwrap()];
        let guests = [domains[0], domains[0], domains[1]].map(|domain| {
            let space = ksm.create_space(domain).unwrap();
            let guest = sim.guest(PAGES);
            for page in 0..PAGES {
                // Content 0 is zero, the last is each guest's own.
                let own = page == PAGES - 1;
                let number = if own { 100 + space.number() } else { page / 2 };
                guest.write(PageIndex(page), &pattern(number));
            }
            let options = RegionOptions { dma_guarded: true };
            let region = ksm.register(space, guest.clone(), options).unwrap();
            (space, region, guest)
        });
        let collector = Arc::new(KsmCollector::new(Arc::clone(&ksm)));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Arc::clone(&collector)));
        Self {
            ksm,
            collector,
            registry,
            domains,
            guests: guests.into(),
        }
    }

    fn passes(&self, passes: u64) {
        let end = self.ksm.stats().full_scans + passes;
        while self.ksm.stats().full_scans < end {
            self.ksm.scan(7).unwrap();
        }
    }

    fn text(&self) -> Parsed {
        let mut text = String::new();
        text::encode(&mut text, &self.registry).unwrap();
        Parsed::new(&text)
    }
}

#[test]
fn every_counter_of_the_engine_is_there() {
    let stage = Stage::new();
    stage.passes(3);
    // Some are written to, and found so.
    for page in 4..7 {
        stage.guests[0]
            .2
            .write(PageIndex(page), &pattern(500 + page));
    }
    stage.passes(1);
    let text = stage.text();

    let mut expected = 0;
    for domain in stage.domains {
        let stats = stage.ksm.domain_stats(domain).unwrap();
        assert!(stats.pages_sharing > 0 && stats.ksm_zero_pages > 0);
        let labels = format!("{{domain=\"{domain}\"}}");
        let all = [
            ("ksm_pages_shared", stats.pages_shared),
            ("ksm_pages_sharing", stats.pages_sharing),
            ("ksm_pages_unshared", stats.pages_unshared),
            ("ksm_pages_volatile", stats.pages_volatile),
            ("ksm_zero_pages", stats.ksm_zero_pages),
            ("ksm_stable_node_dups", stats.stable_node_dups),
            ("ksm_frames_lingering", stats.frames_lingering),
            ("ksm_vmas", stats.vmas),
            ("ksm_saved_bytes", stats.saved_bytes()),
            ("ksm_metadata_bytes", stats.metadata_bytes),
            (
                "ksm_general_profit_bytes",
                stats.general_profit().cast_unsigned(),
            ),
            ("ksm_pages_scanned_total", stats.pages_scanned),
            ("ksm_cow_breaks_total", stats.cow_breaks),
            ("ksm_vmas_given_back_total", stats.vmas_given_back),
            ("ksm_pages_given_back_total", stats.pages_given_back),
            ("ksm_rmap_walks_total", stats.rmap_walks),
            ("ksm_rmap_intervals_total", stats.rmap_intervals),
            ("ksm_rmap_longest_hold", stats.rmap_longest_hold),
        ];
        expected += all.len();
        for (name, value) in all {
            text.demand(&format!("{name}{labels}"), value);
        }
        for (outcome, count) in stats.outcomes.iter() {
            let series =
                format!("ksm_page_outcomes_total{{domain=\"{domain}\",outcome=\"{outcome}\"}}");
            text.demand(&series, count);
        }
    }
    for (at, (space, _, _)) in stage.guests.iter().enumerate() {
        let stats = stage.ksm.space_stats(*space).unwrap();
        assert!(stats.ksm_merging_pages > 0);
        let domain = stage.domains[at / 2];
        let labels = format!("{{domain=\"{domain}\",guest=\"{space}\"}}");
        let all = [
            ("pages", stats.pages),
            ("rmap_items", stats.ksm_rmap_items),
            ("merging_pages", stats.ksm_merging_pages),
            ("zero_pages", stats.ksm_zero_pages),
            ("pages_unshared", stats.pages_unshared),
            ("pages_volatile", stats.pages_volatile),
            ("pages_copied", stats.pages_copied),
            ("vmas", stats.vmas),
            ("cow_breaks_total", stats.cow_breaks),
            ("vmas_given_back_total", stats.vmas_given_back),
            ("pages_given_back_total", stats.pages_given_back),
            ("lease_waits_total", stats.lease_waits),
            ("lease_refusals_total", stats.lease_refusals),
        ];
        expected += all.len();
        for (name, value) in all {
            text.demand(&format!("ksm_guest_{name}{labels}"), value);
        }
        let labels = labels.trim_end_matches('}');
        for (outcome, count) in stats.outcomes.iter() {
            let series = format!("ksm_guest_page_outcomes_total{labels},outcome=\"{outcome}\"}}");
            text.demand(&series, count);
        }
    }
    text.demand("ksm_full_scans_total", stage.ksm.stats().full_scans);
    text.demand("ksm_store_bytes", stage.ksm.store_bytes().unwrap());
    expected += 2 + (stage.domains.len() + stage.guests.len()) * Outcome::ALL.len();
    assert_eq!(text.samples.len(), expected, "nothing else is there");
    assert!(
        text.samples["ksm_cow_breaks_total{domain=\"d0\"}"] == 3,
        "{text:?}"
    );
}

#[test]
fn labels_are_what_the_vmm_calls_things() {
    let stage = Stage::new();
    let [first, second, third] = [0, 1, 2].map(|at| stage.guests[at].0);
    stage.collector.name_guest(first, "web");
    stage.collector.name_guest(second, "web");
    stage.collector.name_guest(third, "a \"quoted\" \\ name");
    stage.collector.name_domain(stage.domains[0], "tenant-a");
    let text = stage.text();
    text.demand("ksm_guest_pages{domain=\"tenant-a\",guest=\"web\"}", PAGES);
    let taken = format!("ksm_guest_pages{{domain=\"tenant-a\",guest=\"{second}\"}}");
    text.demand(&taken, PAGES);
    let quoted = format!(
        "ksm_guest_pages{{domain=\"{}\",guest=\"a \\\"quoted\\\" \\\\ name\"}}",
        stage.domains[1]
    );
    text.demand(&quoted, PAGES);
    let families: BTreeSet<_> = text.types.keys().collect();
    // Nor does a name stand for two where the engine calls another one so.
    stage.collector.name_guest(third, first.to_string());
    stage.text();

    // The name is free again when its guest is gone.
    stage.ksm.remove_space(first).unwrap();
    let text = stage.text();
    text.demand("ksm_guest_pages{domain=\"tenant-a\",guest=\"web\"}", PAGES);
    assert!(!text.samples.contains_key(&taken));
    assert_eq!(text.types.keys().collect::<BTreeSet<_>>(), families);
}

/// Prometheus takes a counter that falls for one that was started anew.
#[test]
fn no_counter_falls_when_memory_goes() {
    let stage = Stage::new();
    stage.passes(3);
    let before = stage.text();
    let (space, region, _) = stage.guests[0];
    stage.ksm.unregister(region).unwrap();
    let after = stage.text();
    let mut compared = 0;
    for (series, was) in &before.samples {
        if series.contains("_total") {
            assert!(
                after.samples[series] >= *was,
                "{series} fell from {was}: {after:#?}"
            );
            compared += was;
        }
    }
    assert!(compared > 0);
    assert_eq!(stage.ksm.space_stats(space).unwrap().pages, 0);
}
