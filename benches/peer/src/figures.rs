//! [`Figures`]: named numbers; and a [`Line`] of them for each case.

use std::collections::BTreeMap;

use clap::ValueEnum;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

/// The name of a choice, as on the command line.
pub(crate) fn name_of(choice: &impl ValueEnum) -> String {
    let value = choice.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Named numbers, each with its unit in its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub(crate) struct Figures(BTreeMap<String, f64>);

impl Figures {
    /// Adds one.
    pub(crate) fn set(&mut self, name: impl Into<String>, value: f64) {
        self.0.insert(name.into(), value);
    }

    /// Adds all of `others`.
    pub(crate) fn extend(&mut self, others: &Self) {
        let others = others.0.iter().map(|(name, value)| (name.clone(), *value));
        self.0.extend(others);
    }

    /// One that there must be.
    pub(crate) fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(f64::NAN)
    }

    /// The median of each over several runs. `spread` names those of which the
    /// smallest and the largest are told too.
    pub(crate) fn median(runs: &[Self], spread: &[&str]) -> Self {
        let mut medians = Self::default();
        for name in runs.iter().flat_map(|run| run.0.keys()) {
            let mut values: Vec<f64> = runs.iter().map(|run| run.get(name)).collect();
            values.sort_by(f64::total_cmp);
            medians.set(name, median_of_sorted(&values));
            if let ([smallest, .., largest], true) = (&values[..], spread.contains(&&**name)) {
                medians.set(format!("{name}_min"), *smallest);
                medians.set(format!("{name}_max"), *largest);
            }
        }
        medians
    }
}

fn median_of_sorted(values: &[f64]) -> f64 {
    let upper = values[values.len() / 2];
    let lower = values[(values.len() - 1) / 2];
    (lower + upper) / 2.0
}

/// What came of one case, on both sides.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) workload: &'static str,
    pub(crate) case: String,
    pub(crate) ours: Figures,
    pub(crate) kernel: Figures,
    /// Ours divided by the kernel's: of what, the workload's help says.
    pub(crate) ratio: f64,
}

/// Prints lines, for people or programs.
#[derive(Debug)]
pub(crate) struct Printer {
    json: bool,
}

impl Printer {
    pub(crate) const fn new(json: bool) -> Self {
        Self { json }
    }

    pub(crate) fn print(&self, line: &Line) -> anyhow::Result<()> {
        if self.json {
            println!("{}", serde_json::to_string(line)?);
        } else {
            println!("{}", table(line));
        }
        Ok(())
    }
}

fn table(line: &Line) -> Table {
    let mut table = Table::new();
    let case = format!("{} {}", line.workload, line.case);
    table.set_header([&case, "ours", "kernel"]);
    let mut names: Vec<&String> = line.ours.0.keys().chain(line.kernel.0.keys()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let cells = [&line.ours, &line.kernel].map(|side| {
            let value = side.0.get(name).map(|value| short(*value));
            Cell::new(value.unwrap_or_default()).set_alignment(CellAlignment::Right)
        });
        let [ours, kernel] = cells;
        table.add_row([Cell::new(name), ours, kernel]);
    }
    table.add_row(["ratio", &short(line.ratio), ""]);
    table
}

/// Three digits or more, as many as say something.
fn short(value: f64) -> String {
    let magnitude = value.abs();
    if value.fract() == 0.0 || magnitude >= 1000.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seconds: f64) -> Figures {
        let mut figures = Figures::default();
        figures.set("merge_seconds", seconds);
        figures
    }

    #[test]
    fn medians_are_of_each_figure() {
        let runs = [run(9.0), run(1.0), run(2.0)];
        let median = Figures::median(&runs, &["merge_seconds"]);
        let names = ["merge_seconds", "merge_seconds_min", "merge_seconds_max"];
        assert_eq!(names.map(|name| median.get(name)), [2.0, 1.0, 9.0]);
        assert_eq!(Figures::median(&runs[1..], &[]).get("merge_seconds"), 1.5);
    }
}
