//! A small VMM whose running guests shrink.
//!
//! Several guests run in this process, under KVM. Each fills its memory to a
//! [`recipe`], or has it loaded from an [`image`], then works on: it rewrites some pages in step with the other
//! guests and checks all of them. Or they boot [`linux`]. Meanwhile `ksm-core`, or the kernel's KSM in
//! its place, merges pages that are equal. See `--help`.
#![deny(unsafe_code)]

mod args;
mod cast;
mod chaos;
mod content;
mod cpu;
mod dedup;
mod discard;
mod figures;
mod forks;
mod guest;
mod host;
mod host_cpu;
mod hotplug;
mod image;
mod ksmd;
mod kvm_slots;
mod layout;
mod linux;
mod lockstep;
mod long_mode;
mod mem_size;
mod merger;
mod metrics;
mod payload;
mod phase;
mod plan;
mod plot;
mod progress;
mod ram;
mod recipe;
mod recorder;
mod report;
mod reshape;
mod run;
mod savings;
mod timeline;
mod unrest;
mod usage;
mod vcpu_state;
mod verify;
mod vm;

use std::process::ExitCode;

use clap::CommandFactory as _;

use crate::args::{Args, guest_bytes};
use crate::host::Host;
use crate::image::Image;
use crate::report::Shown;

/// A page was lost, or something failed.
const FAILED: u8 = 1;
/// Nothing can run on this host.
const CANNOT_RUN: u8 = 3;

fn main() -> ExitCode {
    if let Some(exit) = kernel_ksm::keeper::serve_if_asked() {
        return exit;
    }
    let args = Args::parse_checked();
    let images = args.image.iter().map(|path| Image::look(path));
    let images: Vec<Image> = match images.collect() {
        Ok(images) => images,
        Err(error) => {
            eprintln!("mini-vmm: {error:#}");
            return ExitCode::from(FAILED);
        }
    };
    match usage::available_bytes() {
        Ok(available) => {
            let pages = cast::guest_pages(&args, &images);
            refuse_too_much(&pages, args.reshape.bytes(&pages), available);
        }
        Err(error) => {
            eprintln!("{error:#}: mount /proc, nothing can be measured without it");
            return ExitCode::from(CANNOT_RUN);
        }
    }
    let host = Host::look(&args);
    for note in &host.notes {
        eprintln!("{note}");
    }
    if args.reshape.hotplug > 0 && (host.kvm.is_none() || host.backend.is_none()) {
        eprintln!("mini-vmm: memory can be added to no guest: see above");
        return ExitCode::from(CANNOT_RUN);
    }
    if args.linux.kernel.is_some() && host.lacks_for_linux(&args) {
        eprintln!("mini-vmm: Linux guests cannot be run as asked: see above");
        return ExitCode::from(CANNOT_RUN);
    }
    let json = args.json;
    match run_guests(&args, &images, host) {
        Ok(shown) => {
            println!("{}", shown.tables);
            if json {
                println!("{}", shown.json);
            }
            if shown.is_good {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(FAILED)
            }
        }
        Err(error) => {
            eprintln!("mini-vmm: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

/// Runs Linux guests, or built-in ones.
fn run_guests(args: &Args, images: &[Image], host: Host) -> anyhow::Result<Shown> {
    if args.linux.kernel.is_some() {
        return linux::run(args, host);
    }
    Ok(run::run(args, images, host)?.shown()?)
}

/// Ends the program if the guests do not fit.
fn refuse_too_much(guest_pages: &[u64], further: u64, available: u64) {
    let wanted = guest_bytes(guest_pages) + further;
    if wanted > available {
        let text = format!(
            "{} guests need {} MiB, and {} MiB are available: use fewer (--guests) or smaller ones (--mem)\n",
            guest_pages.len(),
            wanted >> 20,
            available >> 20
        );
        Args::command()
            .error(clap::error::ErrorKind::ValueValidation, text)
            .exit()
    }
}
