//! The engine beside the kernel's KSM: one workload on both sides in the same
//! run, and what came of it, with the ratio of the two. See `--help`.
#![deny(unsafe_code)]

mod args;
mod churn;
mod content;
mod cpu;
mod engine;
mod figures;
mod fork;
mod host;
mod memory;
mod oracle;
mod rmap;
mod unmerge;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Args, Workload};
use crate::figures::Printer;
use crate::host::Host;

/// Something that must hold did not.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    if let Some(exit) = kernel_ksm::keeper::serve_if_asked().or_else(churn::serve_if_asked) {
        return exit;
    }
    let args = Args::parse();
    let printer = Printer::new(args.json);
    let done = match &args.workload {
        Workload::Churn(options) => with_ksmd(|host| churn::run(host, options, &printer)),
        Workload::Rmap(options) => rmap::run(options, &printer),
        Workload::Unmerge(options) => with_ksmd(|host| unmerge::run(host, options, &printer)),
        Workload::Fork(options) => fork::run(options, &printer),
    };
    match done {
        Ok(complaints) if complaints.is_empty() => ExitCode::SUCCESS,
        Ok(complaints) => {
            for complaint in complaints {
                eprintln!("peer: {complaint}");
            }
            ExitCode::from(FAILED)
        }
        Err(error) => {
            eprintln!("peer: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

/// Runs what has a side that is the kernel's KSM.
fn with_ksmd(
    run: impl FnOnce(&Host) -> anyhow::Result<Vec<String>>,
) -> anyhow::Result<Vec<String>> {
    run(&Host::take()?)
}
