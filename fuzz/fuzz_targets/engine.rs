//! Bytes become a script, which the engine runs on the simulated backend, with
//! everything checked after every operation.
//!
//! A finding is printed as a script. Put it into a file of
//! `ksm-core/tests/scenarios` to see it again without the fuzzer, and the input
//! into `fuzz/seeds/engine`.
#![no_main]

mod scripts;

use ksm_core::script::decode;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| scripts::run(bytes, decode));
