//! Running bytes as a script: what `engine` and `layout` have in common.

use std::panic;
use std::sync::Once;

use ksm_core::script::{Op, Runner, Script, SimHost};

static HOOK: Once = Once::new();

/// Runs what `decode` makes of all bytes but the first, which chooses the host.
pub(crate) fn run(bytes: &[u8], decode: fn(&[u8]) -> Vec<Op>) {
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
}
