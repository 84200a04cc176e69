//! The engine against a naive oracle, on the simulated backend: random
//! operations, with everything checked after each.
#![cfg(feature = "script")]

use std::cell::Cell;
use std::fmt;

use ksm_core::backend::sim::SimConfig;
use ksm_core::script::{BYTES_PER_OP, Runner, Script, SimHost, decode};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Operations that one run of this test applies at least.
const OPERATIONS: u64 = 100_000;

/// A script that prints as one.
#[derive(Clone)]
struct Readable(Script);

impl fmt::Debug for Readable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "script\n{}", self.0)
    }
}

fn scripts() -> impl Strategy<Value = Readable> {
    let op = any::<[u8; BYTES_PER_OP]>();
    let ops = prop::collection::vec(op, 1..120);
    ops.prop_map(|ops| Readable(Script(decode(&ops.concat()))))
}

fn run(config: SimConfig, script: &Script) -> Result<(), TestCaseError> {
    let mut runner = Runner::new(SimHost::with(config)).expect("good settings");
    let ran = runner.run(script);
    ran.map_err(|mismatch| TestCaseError::fail(mismatch.to_string()))
}

/// Runs random scripts until enough operations were applied.
fn explore(operations: u64, config: impl Fn(u64) -> SimConfig) {
    let applied = Cell::new(0);
    while applied.get() < operations {
        let mut runner = TestRunner::new(Config {
            cases: 64,
            failure_persistence: None,
            max_shrink_iters: 10_000,
            ..Config::default()
        });
        let explored = runner.run(&(scripts(), 0..1000_u64), |(script, seed)| {
            applied.set(applied.get() + script.0.0.len() as u64);
            run(config(seed), &script.0)
        });
        if let Err(failure) = explored {
            panic!("{failure}");
        }
    }
    println!("{} operations", applied.get());
}

#[test]
fn the_engine_agrees_with_a_naive_oracle() {
    explore(OPERATIONS, |seed| SimConfig {
        seed,
        ..SimConfig::default()
    });
}

/// Short stops, few frames, huge pages of two: limits that are far away
/// otherwise.
#[test]
fn it_agrees_where_everything_is_tight() {
    explore(OPERATIONS / 10, |seed| SimConfig {
        seed,
        max_stop: 1 + seed % 5,
        pages_per_huge: 2,
        ..SimConfig::default()
    });
}
