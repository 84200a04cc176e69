//! [`Report`]: what was found, as tables and as JSON.

use comfy_table::{Cell, CellAlignment, Table};
use ksm_core::page::bytes_in;
use serde::Serialize;

use crate::image::Image;
use crate::place::{Merged, Placement};
use crate::tally::{Counts, RunLengths, Tally};

/// The most images whose matrix is shown to people.
const MATRIX_IMAGES: usize = 16;

/// What was found in one image.
#[derive(Clone, Debug, Serialize)]
struct ImageReport {
    file: String,
    tail_bytes: u64,
    #[serde(flatten)]
    counts: Counts,
    duplicate_pages: u64,
}

/// What was found. The names are explained in `--help`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    counts: Counts,
    duplicate_pages: u64,
    runs: u64,
    longest_run: u64,
    run_lengths: Vec<RunLengths>,
    vmas: u64,
    vmas_without_blocks: u64,
    images: Vec<ImageReport>,
    matrix: Vec<Vec<u64>>,
    policies: Vec<Placement>,
}

impl Report {
    /// `policies` begins with one domain for all.
    pub(crate) fn new(
        images: &[Image],
        tally: Tally,
        matrix: Vec<Vec<u64>>,
        policies: Vec<Placement>,
    ) -> Self {
        let image = |(image, counts): (&Image, Counts)| ImageReport {
            file: image.name(),
            tail_bytes: image.tail_bytes(),
            counts,
            duplicate_pages: counts.duplicate_pages(),
        };
        let vmas = |of: fn(&Placement) -> u64| policies.first().map_or(0, of);
        Self {
            counts: tally.all,
            duplicate_pages: tally.all.duplicate_pages(),
            runs: tally.runs.runs,
            longest_run: tally.runs.longest,
            run_lengths: tally.runs.lengths,
            vmas: vmas(|placement| placement.merged.vmas),
            vmas_without_blocks: vmas(|placement| placement.without_blocks.vmas),
            images: images.iter().zip(tally.images).map(image).collect(),
            matrix,
            policies,
        }
    }

    /// One line of JSON.
    pub(crate) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// Tables for people.
    pub(crate) fn text(&self) -> String {
        let mut text = format!(
            "Pages of 4 KiB (--help says what is counted)\n{}\n",
            self.image_table()
        );
        if self.runs > 0 {
            text += &format!(
                "\nRuns of neighbouring duplicates: {}, the longest of {} pages\n{}\n",
                self.runs,
                self.longest_run,
                self.run_table()
            );
        }
        if (2..=MATRIX_IMAGES).contains(&self.images.len()) {
            text += &format!(
                "\nWho shares with whom: contents in common; on the diagonal, duplicates within\n{}\n",
                self.matrix_table()
            );
        }
        text += &format!("\nWhat merging comes to\n{}\n", self.policy_table());
        text
    }

    fn image_table(&self) -> Table {
        let mut table = table(&[
            "",
            "image",
            "pages",
            "zero",
            "distinct",
            "duplicates",
            "within",
            "between",
        ]);
        let row = |number: String, name: &str, counts: &Counts| {
            let counts = [
                counts.pages,
                counts.zero_pages,
                counts.distinct_pages,
                counts.duplicate_pages(),
                counts.within_pages,
                counts.between_pages,
            ];
            let counts = counts.map(|count| right(count.to_string()));
            [right(number), Cell::new(name)].into_iter().chain(counts)
        };
        for (number, image) in (1..).zip(&self.images) {
            table.add_row(row(number.to_string(), &image.file, &image.counts));
        }
        table.add_row(row(String::new(), "all", &self.counts));
        table
    }

    fn run_table(&self) -> Table {
        let mut table = table(&["length", "runs", "pages", "of all duplicates"]);
        for lengths in &self.run_lengths {
            let range = match lengths.from {
                1 => "1".to_owned(),
                from => format!("{from}-{}", 2 * from - 1),
            };
            table.add_row([
                right(range),
                right(lengths.runs.to_string()),
                right(lengths.pages.to_string()),
                right(percent(lengths.pages, self.duplicate_pages)),
            ]);
        }
        table
    }

    fn matrix_table(&self) -> Table {
        let numbers = 1..=self.images.len();
        let header: Vec<_> = numbers.clone().map(|number| number.to_string()).collect();
        let header: Vec<_> = std::iter::once("")
            .chain(header.iter().map(String::as_str))
            .collect();
        let mut table = table(&header);
        for (number, row) in numbers.zip(&self.matrix) {
            let row = row.iter().map(|cell| right(cell.to_string()));
            table.add_row(std::iter::once(right(number.to_string())).chain(row));
        }
        table
    }

    fn policy_table(&self) -> Table {
        let mut table = table(&[
            "policy",
            "blocks",
            "pages saved",
            "MiB saved",
            "and zero, MiB",
            "extra frames",
            "VMAs",
            "per 100 merged",
            "held back",
        ]);
        for placement in &self.policies {
            for (blocks, merged) in [
                ("yes", &placement.merged),
                ("no", &placement.without_blocks),
            ] {
                table.add_row(policy_row(placement.policy.policy, blocks, merged));
            }
        }
        table
    }
}

fn policy_row(policy: &str, blocks: &str, merged: &Merged) -> Vec<Cell> {
    let numbers = [
        merged.pages_sharing.to_string(),
        mib(merged.pages_sharing),
        mib(merged.zero_pages),
        merged.stable_node_dups.to_string(),
        merged.vmas.to_string(),
        ratio(
            merged.vmas * 100,
            merged.pages_shared + merged.pages_sharing,
        ),
        merged.held_back_pages.to_string(),
    ];
    let names = [Cell::new(policy), Cell::new(blocks)];
    names.into_iter().chain(numbers.map(right)).collect()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.set_header(header);
    table
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn mib(pages: u64) -> String {
    ratio(bytes_in(pages), 1 << 20)
}

fn percent(part: u64, whole: u64) -> String {
    ratio(part * 100, whole) + "%"
}

fn ratio(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    #[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let ratio = part as f64 / whole as f64;
    format!("{ratio:.1}")
}
