//! What the scanner thread tells the VMM's subscriber.
#![cfg(feature = "tracing")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ksm_core::backend::sim::{SimBackend, SimConfig, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Ksm, PageIndex, RegionOptions};
use ksm_vmm_glue::{Pacing, ScannerOptions, ScannerThread, Status};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// How long anything may take: no test relies on its being short.
const PATIENCE: Duration = Duration::from_secs(60);

/// Writes events of the glue down: level and fields.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(Level, String)>>>);

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "ksm_vmm_glue::scanner"
    }
    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        let seen = (*event.metadata().level(), fields.0);
        self.0.lock().unwrap().push(seen);
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The only test of this program: the subscriber is that of all its threads.
#[test]
fn the_end_of_a_scanner_is_told() {
    let collector = Collector::default();
    tracing::subscriber::set_global_default(collector.clone()).unwrap();
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Arc::new(Ksm::new(sim.clone(), Config::default()).unwrap());
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    let guest = sim.guest(2);
    guest.write(PageIndex(0), &pattern(1));
    guest.write(PageIndex(1), &pattern(1));
    ksm.register(space, guest, RegionOptions::default())
        .unwrap();

    let options = ScannerOptions {
        pacing: Pacing {
            pages_to_scan: 100,
            sleep_millisecs: 1,
        },
        restarts: 1,
    };
    let prepare = || {
        set_hook(Some(Box::new(|step| {
            assert!(step != Step::Stopped, "injected");
        })));
    };
    let scanner = ScannerThread::start_with(ksm, options, prepare).unwrap();
    let start = Instant::now();
    while scanner.tally().restarts == 0 || scanner.status() == Status::Running {
        assert!(start.elapsed() < PATIENCE, "{:?}", scanner.status());
        thread::sleep(Duration::from_millis(1));
    }
    scanner.stop();
    let seen = collector.0.lock().unwrap().clone();
    let told = |level, words: &str| {
        let same = |(l, fields): &&(Level, String)| *l == level && fields.contains(words);
        seen.iter().filter(same).count()
    };
    assert_eq!(told(Level::INFO, "scanner started"), 2, "{seen:?}");
    assert_eq!(told(Level::INFO, "restarts=1"), 1, "{seen:?}");
    assert_eq!(told(Level::ERROR, "scanner panicked"), 2, "{seen:?}");
    assert_eq!(told(Level::ERROR, "injected"), 2, "{seen:?}");
    assert_eq!(seen.len(), 4, "{seen:?}");
}
