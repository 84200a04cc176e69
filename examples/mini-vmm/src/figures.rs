//! What a run comes to: counters, memory, verification.

use anyhow::Context as _;

use crate::args::Args;
use crate::cast::Cast;
use crate::guest::{Guest, Tally, Work};
use crate::ksmd::Ksmd;
use crate::merger::Merger;
use crate::phase::run_guests;
use crate::ram::Ram;
use crate::report::{GuestReport, Report};
use crate::usage::{Usage, anonymous_bytes};

/// How guests stand, and clones of them: those have a parent.
pub(crate) fn family_reports(
    rams: &[(usize, Option<usize>, Ram)],
    merger: Option<&Merger>,
) -> anyhow::Result<Vec<GuestReport>> {
    let all = merger.map(Merger::stats).transpose()?;
    let report = |(index, parent, ram): &(usize, Option<usize>, Ram)| {
        let mine = merger.map(|merger| merger.guest_stats(*index));
        let mine = mine.transpose()?;
        let counters = mine.as_ref().zip(all.as_ref());
        Ok(GuestReport::new(
            (*index, *parent),
            ram.pages(),
            Tally::of(ram)?,
            counters,
        ))
    };
    rams.iter().map(report).collect()
}

pub(crate) fn add_counters(
    report: &mut Report,
    merger: &Merger,
    cast: &Cast,
) -> anyhow::Result<()> {
    let stats = merger.stats()?;
    report.saved_bytes = stats.saved_bytes();
    report.metadata_bytes = stats.metadata_bytes;
    report.general_profit = stats.general_profit();
    report.pages_shared = stats.pages_shared;
    report.pages_sharing = stats.pages_sharing;
    report.stable_node_dups = stats.stable_node_dups;
    report.zero_pages = stats.ksm_zero_pages;
    report.pages_scanned = stats.pages_scanned;
    report.full_scans = stats.full_scans;
    report.cow_breaks = stats.cow_breaks;
    report.rewritten_merges = stats.cow_breaks;
    report.vmas_given_back = stats.vmas_given_back;
    report.pages_given_back = stats.pages_given_back;
    match merger {
        Merger::Ours(dedup) => {
            for (index, guest) in cast.guests.iter().enumerate() {
                report.rewritten_merges += dedup.merged_among(index, guest.rewritten_pages())?;
            }
        }
        Merger::Kernel(_) => {
            let foreign = kernel_ksm::foreign_pages()?;
            if foreign > 0 {
                let note = format!("{foreign} merged pages of other processes are in the figures.");
                eprintln!("{note}");
                report.notes.push(note);
            }
        }
    }
    let outcomes = stats.outcomes.iter();
    report.outcomes = outcomes.map(|(outcome, n)| (outcome.name(), n)).collect();
    Ok(())
}

/// Memory of the process and of its files, each page counted once.
pub(crate) fn resident_bytes(rams: &[Ram], merger: Option<&Merger>) -> anyhow::Result<u64> {
    let mut bytes = anonymous_bytes()?;
    for ram in rams {
        bytes += ram.file_bytes()?;
    }
    match merger {
        Some(Merger::Ours(dedup)) => Ok(bytes + dedup.ksm().store_bytes()?),
        // Its counters are not of this moment, nor perhaps of this process alone.
        Some(Merger::Kernel(_)) => Ok(bytes.saturating_sub(Ksmd::counted_twice_bytes()?)),
        None => Ok(bytes),
    }
}

pub(crate) fn measure(
    report: &mut Report,
    before: Usage,
    cast: &Cast,
    merger: Option<&Merger>,
) -> anyhow::Result<()> {
    let mut after = Usage::now(0)?;
    after.resident_bytes = resident_bytes(&cast.rams(), merger)?;
    report.vmas_added = after.vmas.cast_signed() - before.vmas.cast_signed();
    report.resident_before_bytes = before.resident_bytes;
    report.resident_after_bytes = after.resident_bytes;
    report.huge_before_bytes = before.huge_bytes;
    report.huge_after_bytes = after.huge_bytes;
    report.free_before_bytes = before.free_bytes;
    report.free_after_bytes = after.free_bytes;
    report.vmas = after.vmas;
    Ok(())
}

/// With `--verify`, lets every guest check all of its pages, then checks them
/// here. Counts what was lost, in either case.
pub(crate) fn check(
    args: &Args,
    cast: &mut Cast,
    merger: Option<&Merger>,
    work: &Work,
    report: &mut Report,
) -> anyhow::Result<()> {
    if args.verify {
        run_guests(&mut cast.guests, &cast.sides, Guest::check_all, |_| Ok(()))?;
    }
    report.by_guest = family_reports(&cast.family(usize::from(args.guests())), merger)?;
    for (guest, mine) in cast.guests.iter().zip(&mut report.by_guest) {
        if args.verify {
            let lost = guest.lost_pages(work)?;
            if let Some(first) = lost.first() {
                eprintln!(
                    "guest {}: {} pages do not hold what they must, the first is page {first}",
                    mine.guest,
                    lost.len()
                );
            }
            mine.lost_pages = mine.lost_pages.max(lost.len() as u64);
        }
        report.pages_checked += mine.pages_checked;
        report.stores_checked += mine.stores_checked;
        report.lost_pages += mine.lost_pages;
    }
    if let Some(added) = &report.hotplug {
        report.pages_checked += added.pages_checked;
        report.stores_checked += added.stores_checked;
        report.lost_pages += added.lost_pages;
    }
    if args.verify {
        if let Some(dedup) = merger.and_then(Merger::ours) {
            dedup.check().context("the engine's records disagree")?;
        }
        report.verified = Some(report.lost_pages == 0);
    }
    Ok(())
}
