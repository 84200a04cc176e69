//! Domains, spaces and many small regions that come and go, with pin guards and
//! discards on pages that are merged, on the simulated backend.
//!
//! The same language as `engine`, in another mix; a finding is printed and kept
//! in the same way, its input in `fuzz/seeds/layout`.
#![no_main]

mod scripts;

use ksm_core::script::decode_layout;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| scripts::run(bytes, decode_layout));
