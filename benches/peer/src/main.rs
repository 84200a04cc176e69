//! The engine beside the kernel's KSM: one workload on both sides in the same
//! run, and what came of it, with the ratio of the two. See `--help`.
#![deny(unsafe_code)]

mod args;
mod churn;
mod content;
mod cpu;
mod figures;
mod host;
mod memory;
mod oracle;
mod unmerge;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Args, Workload};
use crate::figures::Printer;
use crate::host::Host;

/// Something that must hold did not.
const FAILED: u8 = 1;
/// Nothing can run on this host.
const CANNOT_RUN: u8 = 3;

fn main() -> ExitCode {
    if let Some(exit) = kernel_ksm::keeper::serve_if_asked().or_else(churn::serve_if_asked) {
        return exit;
    }
    let args = Args::parse();
    let host = match Host::take() {
        Ok(host) => host,
        Err(error) => {
            eprintln!("peer: {error:#}");
            return ExitCode::from(CANNOT_RUN);
        }
    };
    let printer = Printer::new(args.json);
    let done = match &args.workload {
        Workload::Churn(options) => churn::run(&host, options, &printer),
        Workload::Unmerge(options) => unmerge::run(&host, options, &printer),
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
