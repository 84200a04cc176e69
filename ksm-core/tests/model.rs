//! The engine against a naive oracle, on the simulated backend: random
//! operations, with everything checked after each.
#![cfg(feature = "script")]

mod readable;

use std::cell::Cell;
use std::fs;
use std::ops::Range;
use std::path::Path;

use ksm_core::backend::sim::{SimConfig, Stop};
use ksm_core::script::{BYTES_PER_OP, Op, Runner, Script, SimHost, decode, decode_layout};
use ksm_core::{Outcome, OutcomeCounts, Stats};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use readable::{Readable, scripts};

/// Operations that a run applies at least; `KSM_MODEL_OPERATIONS` asks for
/// more.
const OPERATIONS: u64 = 100_000;
/// Operations of a script.
const SCRIPT: Range<usize> = 1..120;

fn operations() -> u64 {
    let asked = std::env::var("KSM_MODEL_OPERATIONS");
    let asked = asked.map(|text| text.parse().expect("KSM_MODEL_OPERATIONS is a number"));
    asked.unwrap_or(OPERATIONS)
}

/// What happened in all scripts together.
#[derive(Default)]
struct Seen {
    operations: Cell<u64>,
    cow_breaks: Cell<u64>,
    vmas_given_back: Cell<u64>,
    outcomes: Cell<OutcomeCounts>,
}

impl Seen {
    fn note(&self, script: &Script, stats: &Stats) {
        let count = script.0.len() as u64;
        self.operations.set(self.operations.get() + count);
        self.cow_breaks
            .set(self.cow_breaks.get() + stats.cow_breaks);
        let given_back = self.vmas_given_back.get() + stats.vmas_given_back;
        self.vmas_given_back.set(given_back);
        let mut outcomes = self.outcomes.get();
        outcomes.add(&stats.outcomes);
        self.outcomes.set(outcomes);
    }

    /// A run that never came to some corner has not tested it.
    fn demand_variety(&self) {
        assert!(self.cow_breaks.get() > 100, "hardly any COW");
        // Moves split every huge page; nothing is ever left unseen; and mappings
        // are plenty, so none is given back.
        assert_eq!(self.vmas_given_back.get(), 0);
        let unreached = [Outcome::Unseen, Outcome::Huge, Outcome::VmaBudget];
        for (outcome, count) in self.outcomes.get().iter() {
            println!("{outcome}: {count}");
            assert_eq!(
                count == 0,
                unreached.contains(&outcome),
                "{outcome}: {count}"
            );
        }
    }
}

/// Runs random scripts until enough operations were applied.
fn explore(operations: u64, config: impl Fn(u64) -> SimConfig) -> Seen {
    explore_on(operations, scripts(SCRIPT), |seed| {
        SimHost::with(config(seed))
    })
}

fn explore_on(
    operations: u64,
    scripts: impl Strategy<Value = Readable>,
    host: impl Fn(u64) -> SimHost,
) -> Seen {
    let seen = Seen::default();
    while seen.operations.get() < operations {
        let mut runner = TestRunner::new(Config {
            cases: 64,
            failure_persistence: None,
            max_shrink_iters: 10_000,
            ..Config::default()
        });
        let explored = runner.run(&(&scripts, 0..1000_u64), |(script, seed)| {
            let mut runner = Runner::new(host(seed)).expect("good settings");
            let ran = runner.run(&script.0);
            ran.map_err(|mismatch| TestCaseError::fail(mismatch.to_string()))?;
            seen.note(&script.0, &runner.ksm().stats());
            Ok(())
        });
        if let Err(failure) = explored {
            panic!("{failure}");
        }
    }
    println!("{} operations", seen.operations.get());
    seen
}

#[test]
fn the_engine_agrees_with_a_naive_oracle() {
    let seen = explore(operations(), |seed| SimConfig {
        seed,
        ..SimConfig::default()
    });
    seen.demand_variety();
}

/// Short stops, few frames, huge pages of two: limits that are far away
/// otherwise.
#[test]
fn it_agrees_where_everything_is_tight() {
    explore(operations() / 10, |seed| SimConfig {
        seed,
        max_stop: 1 + seed % 5,
        pages_per_huge: 2,
        ..SimConfig::default()
    });
}

/// A host that write-protects a guest's own pages, and cannot split huge ones.
#[test]
fn it_agrees_where_pages_are_protected() {
    explore(operations() / 10, |seed| SimConfig {
        seed,
        stop: Stop::Protect,
        ..SimConfig::default()
    });
}

/// A host whose guest memory is a file of its own.
#[test]
fn it_agrees_where_memory_is_a_file() {
    explore(operations() / 10, |seed| SimConfig {
        seed,
        stop: Stop::Memfd,
        ..SimConfig::default()
    });
}

/// An engine that may spend few mappings: it gives some back, and comes to rest.
#[test]
fn it_agrees_where_mappings_are_scarce() {
    for stop in [Stop::Move, Stop::Protect, Stop::Memfd] {
        let seen = explore_on(operations() / 10, scripts(SCRIPT), |seed| {
            let config = SimConfig {
                seed,
                stop,
                max_stop: 1 + seed % 7,
                ..SimConfig::default()
            };
            SimHost::with(config).with_budget(3 + seed % 11)
        });
        let given_back = seen.vmas_given_back.get();
        println!("{stop:?}: {given_back} mappings given back");
        assert!(given_back > 100, "{stop:?}: {given_back}");
        assert!(seen.outcomes.get()[Outcome::VmaBudget] > 100);
    }
}

/// As [`explore`], with many small regions that come and go.
#[test]
fn it_agrees_on_what_is_registered() {
    let op = any::<[u8; BYTES_PER_OP]>();
    let bytes = prop::collection::vec(op, 1..200).prop_map(|ops| ops.concat());
    let scripts = bytes.prop_map(|bytes| Readable(Script(decode_layout(&bytes))));
    let seen = explore_on(operations() / 5, scripts, |seed| {
        SimHost::with(SimConfig {
            seed,
            stop: [Stop::Move, Stop::Protect, Stop::Memfd]
                [usize::try_from(seed % 3).expect("small")],
            ..SimConfig::default()
        })
    });
    assert!(seen.cow_breaks.get() > 0, "no COW");
    assert!(
        seen.outcomes.get()[Outcome::Merged] > 0,
        "nothing was merged"
    );
}

/// Inputs of the fuzzer, those among them that once found a bug.
fn run_seeds(target: &str, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    let files = fs::read_dir(folder.join(target)).expect("the folder of seeds");
    let mut ran = 0;
    for file in files {
        run(&fs::read(file.expect("a file").path()).expect("a seed"));
        ran += 1;
    }
    assert!(ran > 0, "no seeds");
}

fn run_script_seeds(target: &str, decode: fn(&[u8]) -> Vec<Op>) {
    run_seeds(target, |bytes| {
        let (first, rest) = bytes.split_first().expect("a seed has a byte");
        let mut runner = Runner::new(SimHost::chosen_by(*first)).expect("good settings");
        let script = Script(decode(rest));
        runner
            .run(&script)
            .unwrap_or_else(|mismatch| panic!("{mismatch}"));
    });
}

#[test]
fn the_seeds_of_the_fuzzer_run() {
    run_script_seeds("engine", decode);
    run_script_seeds("layout", decode_layout);
}

#[cfg(feature = "internals")]
#[test]
fn the_seeds_of_the_trees_run() {
    use ksm_core::internals::trees;
    run_seeds("trees", |bytes| {
        trees::run(bytes).unwrap_or_else(|reason| panic!("{reason}\n{}", trees::script(bytes)));
    });
}
