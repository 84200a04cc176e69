//! [`LinuxReport`]: what came of a run of Linux guests, as tables and as JSON.

use comfy_table::{Cell, CellAlignment, Table};
use indicatif::BinaryBytes;
use ksm_core::page::bytes_in;
use ksm_core::{MemoryStats, Stats};
use serde::Serialize;

/// What an engine has found equal.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Found {
    /// Frames that are mapped as shared.
    pub(super) pages_shared: u64,
    /// Pages that map them beyond the first of each.
    pub(super) pages_sharing: u64,
    /// Frames beyond the first of their content.
    pub(super) stable_node_dups: u64,
    /// Zero pages that the engine made.
    pub(super) zero_pages: u64,
    /// Pages that are saved: sharing and zero.
    pub(super) saved_pages: u64,
}

impl From<&Stats> for Found {
    fn from(stats: &Stats) -> Self {
        Self {
            pages_shared: stats.pages_shared,
            pages_sharing: stats.pages_sharing,
            stable_node_dups: stats.stable_node_dups,
            zero_pages: stats.ksm_zero_pages,
            saved_pages: stats.pages_sharing + stats.ksm_zero_pages,
        }
    }
}

impl Found {
    fn row(&self, name: &str, seconds: Option<f64>) -> Vec<Cell> {
        let counts = [
            self.pages_shared,
            self.pages_sharing,
            self.zero_pages,
            self.saved_pages,
        ];
        let seconds = seconds.map_or_else(String::new, |seconds| format!("{seconds:.1}"));
        std::iter::once(Cell::new(name))
            .chain(counts.map(|count| right(count.to_string())))
            .chain([right(seconds)])
            .collect()
    }
}

/// Two engines on the same guests, at the same moment.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Comparison {
    /// Ours.
    pub(super) ours: Found,
    /// How long it took, in seconds.
    pub(super) ours_seconds: f64,
    /// The host's ksmd.
    pub(super) kernel: Found,
    /// How long it took, in seconds.
    pub(super) kernel_seconds: f64,
    /// Pages that ours saves, in percent of those that ksmd saves.
    pub(super) percent_of_kernel: f64,
}

impl Comparison {
    /// What each has found, and in how many seconds.
    pub(super) fn new(ours: (Found, f64), kernel: (Found, f64)) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "shown with few decimals")]
        let percent = ours.0.saved_pages as f64 * 100.0 / kernel.0.saved_pages.max(1) as f64;
        Self {
            ours: ours.0,
            ours_seconds: ours.1,
            kernel: kernel.0,
            kernel_seconds: kernel.1,
            percent_of_kernel: percent,
        }
    }
}

/// How one guest stands at the end.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct LinuxGuestReport {
    /// Its number.
    pub(super) guest: usize,
    /// How long it took to boot, in seconds, where that can be told.
    pub(super) boot_seconds: Option<f64>,
    /// Beats before anything was merged.
    pub(super) beats_before: u64,
    /// Beats while memory was being merged.
    pub(super) beats_meanwhile: u64,
    /// Beats after everything was merged.
    pub(super) beats_after: u64,
    /// Whether it has reset its machine.
    pub(super) has_reset: bool,
    /// Memory that maps frames as shared.
    pub(super) merged_bytes: u64,
    /// Memory that maps the host's page of zeros.
    pub(super) zero_bytes: u64,
}

impl LinuxGuestReport {
    /// Adds the engine's counters.
    pub(super) fn count(&mut self, stats: &MemoryStats) {
        self.merged_bytes = bytes_in(stats.ksm_merging_pages);
        self.zero_bytes = bytes_in(stats.ksm_zero_pages);
    }
}

/// What came of a run.
///
/// `before` is when guests had booted and nothing was registered yet; `after` is at
/// the end, guests paused and the scanner stopped, after as many passes as it takes
/// to merge what rests.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct LinuxReport {
    /// `kvm`.
    pub(super) mode: &'static str,
    /// `linux`: ours on Linux; `kernel`: the host's KSM; `none`.
    pub(super) engine: &'static str,
    /// How many guests ran.
    pub(super) guests: u8,
    /// CPUs of each.
    pub(super) vcpus: u8,
    /// Memory of each.
    pub(super) guest_bytes: u64,
    /// Name of their kernel's file.
    pub(super) kernel: String,
    /// Anonymous memory of the process and memory of the stores, before.
    pub(super) resident_before_bytes: u64,
    /// The same, after.
    pub(super) resident_after_bytes: u64,
    /// What the engine's counters say is saved.
    pub(super) saved_bytes: u64,
    /// What the engine's own records take.
    pub(super) metadata_bytes: u64,
    /// What is merged at the end.
    #[serde(flatten)]
    pub(super) found: Found,
    /// Pages looked at.
    pub(super) pages_scanned: u64,
    /// Passes over all guests.
    pub(super) full_scans: u64,
    /// Merged pages that a guest wrote to.
    pub(super) cow_breaks: u64,
    /// Mappings of the process, after.
    pub(super) vmas: u64,
    /// Ours beside ksmd, if that was asked.
    pub(super) comparison: Option<Comparison>,
    /// What was missing on this host.
    pub(super) notes: Vec<String>,
    /// Guest by guest.
    pub(super) by_guest: Vec<LinuxGuestReport>,
}

impl LinuxReport {
    /// One line of JSON.
    pub(super) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// Tables for people.
    pub(super) fn tables(&self) -> String {
        let comparison = self.comparison.map_or_else(String::new, |comparison| {
            format!("{}\n", table(&comparison))
        });
        format!("{}\n{comparison}{}", self.guest_table(), self.summary())
    }

    fn guest_table(&self) -> Table {
        let mut table = Table::new();
        table.set_header([
            "guest",
            "booted after",
            "merged",
            "zero",
            "beats before",
            "meanwhile",
            "after",
        ]);
        for guest in &self.by_guest {
            let booted = guest
                .boot_seconds
                .map_or_else(String::new, |seconds| format!("{seconds:.1} s"));
            table.add_row(
                [
                    guest.guest.to_string(),
                    booted,
                    BinaryBytes(guest.merged_bytes).to_string(),
                    BinaryBytes(guest.zero_bytes).to_string(),
                    guest.beats_before.to_string(),
                    guest.beats_meanwhile.to_string(),
                    guest.beats_after.to_string(),
                ]
                .map(right),
            );
        }
        table
    }

    fn summary(&self) -> String {
        format!(
            "saved {} ({} frames, {} pages beyond them, {} zero pages, {} VMAs), records {}\n\
             resident {} before, {} after; {} pages scanned in {} passes, {} merged pages written to",
            BinaryBytes(self.saved_bytes),
            self.found.pages_shared,
            self.found.pages_sharing,
            self.found.zero_pages,
            self.vmas,
            BinaryBytes(self.metadata_bytes),
            BinaryBytes(self.resident_before_bytes),
            BinaryBytes(self.resident_after_bytes),
            self.pages_scanned,
            self.full_scans,
            self.cow_breaks,
        )
    }
}

fn table(comparison: &Comparison) -> String {
    let mut table = Table::new();
    table.set_header([
        "the same guests, paused",
        "pages_shared",
        "pages_sharing",
        "zero pages",
        "saved",
        "seconds",
    ]);
    let Comparison { ours, kernel, .. } = comparison;
    table.add_row(ours.row("ours", Some(comparison.ours_seconds)));
    table.add_row(kernel.row("the host's ksmd", Some(comparison.kernel_seconds)));
    format!(
        "{table}\nours saves {:.1}% of what ksmd saves",
        comparison.percent_of_kernel
    )
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}
