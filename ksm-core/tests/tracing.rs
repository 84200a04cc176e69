//! Events for the embedder's subscriber: which ones, and that none is sent while
//! a page is stopped.
#![cfg(all(feature = "tracing", feature = "fault-injection"))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use ksm_core::backend::sim::{Call, Failure, SimBackend, SimConfig, pattern};
use ksm_core::fault::{Step, set_hook};
use ksm_core::{Config, Ksm, PageIndex, PageRange, RegionOptions, Target};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Level, Metadata, Subscriber};

const PAGES: u64 = 16;

/// An event or the start of a span, in words.
#[derive(Clone, Debug)]
struct Seen {
    level: Level,
    target: String,
    /// Its fields as `name=value`, the message among them.
    fields: String,
}

/// A subscriber that writes everything down, and looks at the host meanwhile.
#[derive(Clone)]
struct Collector {
    seen: Arc<Mutex<Vec<Seen>>>,
    sim: SimBackend,
}

impl Collector {
    fn note(&self, metadata: &Metadata<'_>, fields: String) {
        assert!(self.sim.busy().is_idle(), "{fields}: with pages stopped");
        self.seen.lock().unwrap().push(Seen {
            level: *metadata.level(),
            target: metadata.target().to_owned(),
            fields,
        });
    }

    fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

#[derive(Default)]
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl Subscriber for Collector {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // Asked each time: tests run beside one another.
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields(format!("span {} ", span.metadata().name()));
        span.record(&mut fields);
        self.note(span.metadata(), fields.0);
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.note(event.metadata(), fields.0);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {
        assert!(
            self.sim.busy().is_idle(),
            "a span begins with pages stopped"
        );
    }

    fn exit(&self, _: &Id) {
        assert!(self.sim.busy().is_idle(), "a span ends with pages stopped");
    }
}

/// One test at a time: a place in the code that is first reached while another
/// thread comes to listen can be taken for one that nobody listens to.
static ALONE: Mutex<()> = Mutex::new(());

/// An engine on a simulated host, what happens there, and who is told.
fn stage() -> (
    MutexGuard<'static, ()>,
    SimBackend,
    Ksm<SimBackend>,
    Collector,
) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Ksm::new(sim.clone(), Config::default()).unwrap();
    let collector = Collector {
        seen: Arc::default(),
        sim: sim.clone(),
    };
    (alone, sim, ksm, collector)
}

fn pass(ksm: &Ksm<SimBackend>) {
    while ksm.scan(u64::MAX).unwrap().passes == 0 {}
}

/// The one event that holds `words`.
#[track_caller]
fn one(seen: &[Seen], words: &str) -> Seen {
    let found: Vec<_> = seen
        .iter()
        .filter(|seen| seen.fields.contains(words))
        .collect();
    assert_eq!(found.len(), 1, "{words}: {seen:#?}");
    found[0].clone()
}

#[test]
fn a_life_is_told_and_nothing_of_single_pages() {
    let (_alone, sim, ksm, collector) = stage();
    with_default(collector.clone(), || {
        let domain = ksm.create_domain().unwrap();
        let space = ksm.create_space(domain).unwrap();
        let guest = sim.guest(PAGES);
        for page in 0..PAGES {
            guest.write(PageIndex(page), &pattern(7));
        }
        let options = RegionOptions { dma_guarded: true };
        let region = ksm.register(space, guest.clone(), options).unwrap();
        let seen = collector.take();
        assert_eq!(seen.len(), 3, "{seen:#?}");
        assert!(seen.iter().all(|seen| seen.level == Level::INFO));
        assert!(seen.iter().all(|seen| seen.target == "ksm_core::layout"));
        one(
            &seen,
            &format!("region={region} space={space} pages={PAGES} dma_guarded=true"),
        );

        pass(&ksm);
        pass(&ksm);
        let seen = collector.take();
        let found = one(&seen, "number=2 ");
        assert_eq!(
            (found.level, &found.target[..]),
            (Level::DEBUG, "ksm_core::pass")
        );
        assert!(
            found
                .fields
                .contains(&format!("pages={PAGES} merged={PAGES} ")),
            "{found:?}"
        );
        let spans = seen
            .iter()
            .filter(|seen| seen.fields.starts_with("span scan budget="));
        assert_eq!(spans.count(), 2, "a span for each call: {seen:#?}");
        let windows = seen.iter().filter(|seen| seen.level == Level::TRACE);
        assert_eq!(windows.count(), 2, "a window for each pass: {seen:#?}");
        assert!(
            seen.iter().all(|seen| seen.level > Level::INFO),
            "{seen:#?}"
        );

        ksm.unmerge(Target::Space(space)).unwrap();
        let found = one(&collector.take(), &format!("pages={PAGES} "));
        assert_eq!(
            (found.level, &found.target[..]),
            (Level::DEBUG, "ksm_core::merge")
        );

        drop(ksm.quiesce().unwrap());
        let seen = collector.take();
        assert_eq!(one(&seen, "held still").target, "ksm_core::recovery");
        assert_eq!(one(&seen, "goes on").level, Level::DEBUG);

        ksm.remove_space(space).unwrap();
        ksm.remove_domain(domain).unwrap();
        let seen = collector.take();
        assert_eq!(one(&seen, "unregistered").level, Level::INFO);
        one(&seen, "address space forgotten");
        one(&seen, "trust domain forgotten");
    });
}

#[test]
fn refused_merges_are_counted_in_one_event() {
    let (_alone, sim, ksm, collector) = stage();
    with_default(collector.clone(), || {
        let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
        let guest = sim.guest(PAGES);
        let region = ksm
            .register(space, guest.clone(), RegionOptions::default())
            .unwrap();
        for page in 0..PAGES {
            guest.write(PageIndex(page), &pattern(7));
        }
        assert!(guest.pin(PageIndex(3)) && guest.pin(PageIndex(9)));
        pass(&ksm);
        collector.take();
        pass(&ksm);
        let found = one(&collector.take(), "merges refused");
        assert_eq!(
            (found.level, &found.target[..]),
            (Level::DEBUG, "ksm_core::merge")
        );
        let expected = format!("region={region} merged={} pinned=2 ", PAGES - 2);
        assert!(found.fields.contains(&expected), "{found:?}");
    });
}

#[test]
fn what_the_embedder_must_act_on_is_a_warning() {
    let (_alone, sim, ksm, collector) = stage();
    let ksm = Arc::new(ksm);
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    let guest = sim.guest(PAGES);
    for page in 0..PAGES {
        guest.write(PageIndex(page), &pattern(7));
    }
    let region = ksm
        .register(space, guest.clone(), RegionOptions::default())
        .unwrap();
    pass(&ksm);
    // A scanner is lost in the middle of a merge: it never unwinds that far.
    let lost = Arc::clone(&ksm);
    let (dead, died) = std::sync::mpsc::channel();
    thread::spawn(move || {
        set_hook(Some(Box::new(move |step| {
            if step == Step::Stopped {
                dead.send(thread::current().id()).unwrap();
                loop {
                    thread::park();
                }
            }
        })));
        let _ = lost.scan(u64::MAX);
    });
    let thread = died.recv().unwrap();
    with_default(collector.clone(), || {
        assert!(ksm.recover(thread) > 0);
        let found = one(&collector.take(), "lost thread");
        assert_eq!(
            (found.level, &found.target[..]),
            (Level::WARN, "ksm_core::recovery")
        );

        pass(&ksm);
        pass(&ksm);
        collector.take();
        sim.fail_often(Call::Populate, Failure::OutOfMemory, 1000);
        let pages = PageRange::new(PageIndex(0), PAGES);
        ksm.unmerge(Target::Pages(region, pages)).unwrap_err();
        assert_eq!(one(&collector.take(), "stay merged").level, Level::WARN);
        ksm.unregister(region).unwrap_err();
        assert_eq!(
            one(&collector.take(), "stays registered").level,
            Level::WARN
        );
    });
}

/// A subscriber that panics does so where nothing is stopped.
#[test]
fn a_subscriber_may_panic() {
    struct Grumpy(Collector);
    impl Subscriber for Grumpy {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            self.0.enabled(metadata)
        }
        fn new_span(&self, span: &Attributes<'_>) -> Id {
            self.0.new_span(span)
        }
        fn event(&self, event: &Event<'_>) {
            self.0.event(event);
            panic!("no more events");
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }
    let (_alone, sim, ksm, collector) = stage();
    let space = ksm.create_space(ksm.create_domain().unwrap()).unwrap();
    let guest = sim.guest(PAGES);
    guest.write(PageIndex(0), &pattern(7));
    guest.write(PageIndex(1), &pattern(7));
    ksm.register(space, guest, RegionOptions::default())
        .unwrap();
    with_default(Grumpy(collector), || {
        catch_unwind(AssertUnwindSafe(|| ksm.scan(u64::MAX))).unwrap_err();
    });
    assert!(sim.busy().is_idle());
    pass(&ksm);
    pass(&ksm);
    assert_eq!(ksm.stats().pages_sharing, 1);
    ksm.check().unwrap();
}
