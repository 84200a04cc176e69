//! What would these RAM images save?
//!
//! First the images are read once, page by page, and every page's content gets a
//! number ([`count`], by `ksm_core::census`): what is equal is known exactly from
//! there on, and no page is kept. Then the real engine merges a [`model`] of the
//! images ([`place`]): pages that hold nothing but their content's number. All it
//! ever asks is which pages are equal, so frames, blocks and mappings come out as
//! they would on memory with the images' bytes. See `--help`.
#![deny(unsafe_code)]

mod args;
mod count;
mod image;
mod matrix;
mod model;
mod place;
mod progress;
mod report;
mod tally;

use std::io::{ErrorKind, Write as _, stdout};
use std::process::ExitCode;

use crate::args::Args;
use crate::report::Report;

/// A file cannot be read, or what was found cannot be printed.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let args = Args::parse_checked();
    match report(&args).and_then(|report| show(&report, args.json)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("estimate: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

fn report(args: &Args) -> anyhow::Result<Report> {
    let images = image::look(&args.files)?;
    for image in &images {
        if let Some(warning) = image.warning() {
            eprintln!("estimate: {warning}");
        }
    }
    let counted = count::count(&images)?;
    let mut policies = Vec::new();
    for policy in args.policies() {
        policies.push(place::place(&counted, policy, args.max_vmas)?);
    }
    let (tally, matrix) = (tally::tally(&counted)?, matrix::matrix(&counted)?);
    Ok(Report::new(&images, tally, matrix, policies))
}

fn show(report: &Report, json: bool) -> anyhow::Result<()> {
    let mut text = report.text();
    if json {
        text += &format!("{}\n", report.json()?);
    }
    match stdout().lock().write_all(text.as_bytes()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        done => Ok(done?),
    }
}
