//! The structures with keys, each against a sorted map: the stable and the
//! unstable tree, in shards that are cut anew.
//!
//! A finding is printed as a list of operations; its input belongs into
//! `fuzz/seeds/trees`, from where a test runs it again.
#![no_main]

use ksm_core::internals::trees;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(reason) = trees::run(bytes) {
        eprintln!("# {reason}\n{}", trees::script(bytes));
        std::process::abort();
    }
});
