//! [`Report`]: what came of a run, as tables and as JSON.

use comfy_table::{Cell, CellAlignment, Table};
use indicatif::BinaryBytes;
use ksm_core::page::bytes_in;
use serde::Serialize;

use crate::chaos::ChaosTally;
use crate::forks::ForkTally;
use crate::guest::Tally;
use crate::hotplug::HotplugTally;
use crate::image::ImageTally;
use crate::savings::saved_bytes;

/// How one guest stands.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct GuestReport {
    /// Its number.
    pub(crate) guest: usize,
    /// The guest that it was cloned from while that ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) clone_of: Option<usize>,
    /// Memory that maps frames as shared.
    pub(crate) merged_bytes: u64,
    /// Memory that maps the host's page of zeros.
    pub(crate) zero_bytes: u64,
    /// Memory of its own, and of a clone what it was born without: its zeros.
    pub(crate) private_bytes: u64,
    /// Its part of what is saved.
    pub(crate) saved_bytes: u64,
    /// Pages whose content the guest has checked.
    pub(crate) pages_checked: u64,
    /// Stores whose effect the guest has checked.
    pub(crate) stores_checked: u64,
    /// Pages that did not hold what they must.
    pub(crate) lost_pages: u64,
}

impl GuestReport {
    /// One guest of `pages` pages by its own tally and, if it is registered, the
    /// engine's counters. Of a frame's memory every sharer pays its part.
    pub(crate) fn new(
        (guest, clone_of): (usize, Option<usize>),
        pages: u64,
        tally: Tally,
        counters: Option<(&ksm_core::MemoryStats, &ksm_core::Stats)>,
    ) -> Self {
        let (merged, zero, saved_bytes) = counters.map_or((0, 0, 0), |(mine, all)| {
            let saved = saved_bytes(mine, all);
            (mine.ksm_merging_pages, mine.ksm_zero_pages, saved)
        });
        Self {
            guest,
            clone_of,
            merged_bytes: bytes_in(merged),
            zero_bytes: bytes_in(zero),
            private_bytes: bytes_in(pages.saturating_sub(merged + zero)),
            saved_bytes,
            pages_checked: tally.pages_checked,
            stores_checked: tally.stores_checked,
            lost_pages: tally.lost_pages,
        }
    }

    /// One line of progress.
    pub(crate) fn line(&self) -> String {
        let mib = |bytes: u64| bytes >> 20;
        format!(
            "{} {:>2}: merged {:>5} MiB, zero {:>5}, private {:>5}, saved {:>5} | checked {} pages, {} stores, {} lost",
            if self.clone_of.is_some() {
                "clone"
            } else {
                "guest"
            },
            self.guest,
            mib(self.merged_bytes),
            mib(self.zero_bytes),
            mib(self.private_bytes),
            mib(self.saved_bytes),
            self.pages_checked,
            self.stores_checked,
            self.lost_pages,
        )
    }
}

/// What there was in images, and what of it is merged.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct ImageReport {
    /// Pages of all images.
    pub(crate) image_pages: u64,
    /// Pages of zeros among them, which are holes.
    pub(crate) image_zero_pages: u64,
    /// Pages whose content stands earlier, as `estimate` counts them.
    pub(crate) duplicate_pages: u64,
    /// Those that are merged: `pages_sharing` and `stable_node_dups`.
    pub(crate) merged_duplicates: u64,
    /// In percent of all.
    pub(crate) merged_percent: f64,
    /// Mappings that this costs for 100 merged pages (`pages_shared` and
    /// `pages_sharing`).
    pub(crate) vmas_per_100_merged: f64,
}

impl ImageReport {
    /// What became of `tally`'s pages, at the cost of `vmas` mappings.
    pub(crate) fn new(tally: &ImageTally, stats: &ksm_core::Stats, vmas: u64) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "shown with few decimals")]
        let per_100 = |part: u64, whole: u64| part as f64 * 100.0 / whole.max(1) as f64;
        let duplicate_pages = tally.duplicate_pages();
        let merged_duplicates = stats.pages_sharing + stats.stable_node_dups;
        Self {
            image_pages: tally.pages,
            image_zero_pages: tally.zero_pages,
            duplicate_pages,
            merged_duplicates,
            merged_percent: per_100(merged_duplicates, duplicate_pages),
            vmas_per_100_merged: per_100(vmas, stats.pages_shared + stats.pages_sharing),
        }
    }

    fn summary(&self) -> String {
        format!(
            "images: {} pages, {} of zeros; {:.2}% of {} duplicates merged, at {:.2} VMAs per 100 merged pages\n",
            self.image_pages,
            self.image_zero_pages,
            self.merged_percent,
            self.duplicate_pages,
            self.vmas_per_100_merged,
        )
    }
}

/// What came of a run.
///
/// `before` is when all guests had filled their memory and nothing was
/// registered yet; `after` is at the end, guests paused and the scanner stopped,
/// after as many passes as it takes to merge what rests.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    /// `kvm` or `host-threads`.
    pub(crate) mode: &'static str,
    /// `linux`: ours on Linux; `kernel`: the host's KSM; `none`.
    pub(crate) engine: &'static str,
    /// How many guests ran.
    pub(crate) guests: u8,
    /// Memory of each that could be merged, of the largest if they differ.
    pub(crate) guest_bytes: u64,
    /// What they filled it with, or the names of their images.
    pub(crate) recipe: String,
    /// What everything was drawn from.
    pub(crate) seed: u64,
    /// Whether all pages held what they must; null if it was not asked.
    pub(crate) verified: Option<bool>,
    /// Pages that guests checked, word by word.
    pub(crate) pages_checked: u64,
    /// Stores that guests checked.
    pub(crate) stores_checked: u64,
    /// Pages that did not hold what they must, as guests or VMM found.
    pub(crate) lost_pages: u64,
    /// Anonymous memory of the process, memory of the stores and of the guests'
    /// memfds, before.
    pub(crate) resident_before_bytes: u64,
    /// The same, after.
    pub(crate) resident_after_bytes: u64,
    /// Anonymous memory of the process that is in huge pages, before.
    pub(crate) huge_before_bytes: u64,
    /// The same, after.
    pub(crate) huge_after_bytes: u64,
    /// The host's free memory, before.
    pub(crate) free_before_bytes: u64,
    /// The same, after.
    pub(crate) free_after_bytes: u64,
    /// What the engine's counters say is saved.
    pub(crate) saved_bytes: u64,
    /// What recipe or images let be saved at most.
    pub(crate) mergeable_bytes: u64,
    /// What the engine's own records take.
    pub(crate) metadata_bytes: u64,
    /// Saved less spent on records.
    pub(crate) general_profit: i64,
    /// Frames that are mapped as shared.
    pub(crate) pages_shared: u64,
    /// Pages that map them beyond the first of each.
    pub(crate) pages_sharing: u64,
    /// Frames beyond the first of their content.
    pub(crate) stable_node_dups: u64,
    /// Zero pages that the engine made.
    pub(crate) zero_pages: u64,
    /// Pages looked at.
    pub(crate) pages_scanned: u64,
    /// Passes over all guests.
    pub(crate) full_scans: u64,
    /// Merged pages that a guest wrote to.
    pub(crate) cow_breaks: u64,
    /// Merges of pages that guests rewrite: those that were written to again
    /// (nothing else is written to while it is merged), and those that are
    /// merged now.
    pub(crate) rewritten_merges: u64,
    /// Mappings of the process, after.
    pub(crate) vmas: u64,
    /// How many more those are than before.
    pub(crate) vmas_added: i64,
    /// Mappings given back where what they were made for was mostly written to.
    pub(crate) vmas_given_back: u64,
    /// Pages that were taken off frames for that.
    pub(crate) pages_given_back: u64,
    /// What was merged of what there was in images.
    #[serde(flatten)]
    pub(crate) images: Option<ImageReport>,
    /// When the savings first reached 95% of the most they came to while guests
    /// worked, counted from the scanner's start; null without savings.
    pub(crate) seconds_to_settle: Option<f64>,
    /// Processor time of the process, vCPUs included, and of the kernel's ksmd, if
    /// it is the engine, while guests worked.
    pub(crate) cpu_seconds: f64,
    /// ksmd's part of it.
    pub(crate) ksmd_cpu_seconds: f64,
    /// What `--chaos` did.
    pub(crate) chaos: Option<ChaosTally>,
    /// What `--hotplug` did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hotplug: Option<HotplugTally>,
    /// What `--fork` did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) forks: Option<ForkTally>,
    /// What became of the pages looked at, by the engine's names.
    pub(crate) outcomes: std::collections::BTreeMap<&'static str, u64>,
    /// What was missing on this host.
    pub(crate) notes: Vec<String>,
    /// Guest by guest.
    pub(crate) by_guest: Vec<GuestReport>,
}

/// A report as it is shown.
#[derive(Debug)]
pub(crate) struct Shown {
    /// For people.
    pub(crate) tables: String,
    /// One line for machines.
    pub(crate) json: String,
    /// Whether the run was good.
    pub(crate) is_good: bool,
}

impl Report {
    /// What is shown of it.
    pub(crate) fn shown(&self) -> serde_json::Result<Shown> {
        Ok(Shown {
            tables: self.tables(),
            json: self.json()?,
            is_good: self.is_good(),
        })
    }

    /// Whether the run was good: nothing lost, and verified if that was asked.
    fn is_good(&self) -> bool {
        self.lost_pages == 0 && self.verified != Some(false)
    }

    /// One line of JSON.
    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// Tables for people.
    fn tables(&self) -> String {
        format!(
            "{}\n{}\n{}",
            self.guest_table(),
            self.memory_table(),
            self.summary()
        )
    }

    fn guest_table(&self) -> Table {
        let mut table = Table::new();
        table.set_header([
            "guest",
            "merged",
            "zero",
            "private",
            "saved",
            "pages checked",
            "stores checked",
            "lost",
        ]);
        for guest in &self.by_guest {
            let bytes = [
                guest.merged_bytes,
                guest.zero_bytes,
                guest.private_bytes,
                guest.saved_bytes,
            ];
            let counts = [guest.pages_checked, guest.stores_checked, guest.lost_pages];
            let name = match guest.clone_of {
                Some(parent) => format!("{} (clone of {parent})", guest.guest),
                None => guest.guest.to_string(),
            };
            let cells = std::iter::once(name)
                .chain(bytes.map(|bytes| BinaryBytes(bytes).to_string()))
                .chain(counts.map(|count| count.to_string()));
            table.add_row(cells.map(right));
        }
        table
    }

    fn memory_table(&self) -> Table {
        let mut table = Table::new();
        table.set_header(["", "before", "after", "difference", "of what counters say"]);
        let resident =
            self.resident_before_bytes.cast_signed() - self.resident_after_bytes.cast_signed();
        let free = self.free_after_bytes.cast_signed() - self.free_before_bytes.cast_signed();
        for (name, before, after, saved) in [
            (
                "resident",
                self.resident_before_bytes,
                self.resident_after_bytes,
                resident,
            ),
            (
                "free on host",
                self.free_before_bytes,
                self.free_after_bytes,
                free,
            ),
        ] {
            let sign = if saved < 0 { "-" } else { "" };
            table.add_row([
                Cell::new(name),
                right(BinaryBytes(before).to_string()),
                right(BinaryBytes(after).to_string()),
                right(format!("{sign}{}", BinaryBytes(saved.unsigned_abs()))),
                right(percent(saved, self.saved_bytes.cast_signed())),
            ]);
        }
        table
    }

    fn summary(&self) -> String {
        let settled = self
            .seconds_to_settle
            .map_or("never".to_owned(), |seconds| {
                format!("after {seconds:.1} s")
            });
        let verified = match self.verified {
            Some(true) => "verified: every page holds what it must",
            Some(false) => "NOT VERIFIED",
            None => "not verified (--verify)",
        };
        let images = self.images.map_or(String::new(), |images| images.summary());
        let hotplug = self
            .hotplug
            .map_or(String::new(), |tally| tally.line() + "\n");
        let forks = self
            .forks
            .map_or(String::new(), |tally| tally.line() + "\n");
        let ksmd = match self.engine {
            "kernel" => format!(" ({:.1} of them ksmd's)", self.ksmd_cpu_seconds),
            _ => String::new(),
        };
        format!(
            "{images}{hotplug}{forks}saved {} of {} that are equal ({} frames, {} pages beyond them, {} zero pages, {} VMAs), settled {settled}\n\
             {} pages scanned in {} passes, {} merges of rewritten pages, CPU {:.1} s{ksmd}, records {}\n\
             {} pages and {} stores checked, {} lost; {verified}",
            BinaryBytes(self.saved_bytes),
            BinaryBytes(self.mergeable_bytes),
            self.pages_shared,
            self.pages_sharing,
            self.zero_pages,
            self.vmas,
            self.pages_scanned,
            self.full_scans,
            self.rewritten_merges,
            self.cpu_seconds,
            BinaryBytes(self.metadata_bytes),
            self.pages_checked,
            self.stores_checked,
            self.lost_pages,
        )
    }
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn percent(part: i64, whole: i64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    #[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let percent = part as f64 * 100.0 / whole as f64;
    format!("{percent:.1}%")
}
