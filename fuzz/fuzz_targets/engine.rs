//! Bytes become a script, which the engine runs on the simulated backend, with
//! everything checked after every operation.
//!
//! A finding is printed as a script. Put it into a file of
//! `ksm-core/tests/scenarios` to see it again without the fuzzer, and the input
//! into `fuzz/seeds/engine`.
#![no_main]

use std::panic;
use std::sync::Once;

use ksm_core::script::{Runner, Script, SimHost, decode};
use libfuzzer_sys::fuzz_target;

static HOOK: Once = Once::new();

fuzz_target!(|bytes: &[u8]| {
    // The fuzzer's own hook ends the process at once, before the script is out.
    HOOK.call_once(|| panic::set_hook(Box::new(|panicked| eprintln!("{panicked}"))));
    let Some((&first, rest)) = bytes.split_first() else {
        return;
    };
    let host = SimHost::chosen_by(first);
    let line = host.line();
    let mut runner = Runner::new(host).expect("the settings are good");
    if let Err(mismatch) = runner.run(&Script(decode(rest))) {
        eprintln!("# {}\n{line}\n{}", mismatch.reason, mismatch.script);
        std::process::abort();
    }
});
