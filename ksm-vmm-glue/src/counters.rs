//! Counters as text, in the kernel's form: one `name value` a line.

use std::fmt::Write as _;

use ksm_core::{MemoryStats, OutcomeCounts, Stats};

/// Counters of an engine or a domain, named as the files in
/// `/sys/kernel/mm/ksm`. Those the kernel does not have come last.
///
/// ```
/// use ksm_core::Stats;
///
/// let text = ksm_vmm_glue::counters::engine(&Stats::default());
/// assert!(text.starts_with("pages_shared 0\npages_sharing 0\n"));
/// ```
#[must_use]
pub fn engine(stats: &Stats) -> String {
    let mut text = lines(&[
        ("pages_shared", stats.pages_shared),
        ("pages_sharing", stats.pages_sharing),
        ("pages_unshared", stats.pages_unshared),
        ("pages_volatile", stats.pages_volatile),
        ("stable_node_dups", stats.stable_node_dups),
        ("pages_scanned", stats.pages_scanned),
        ("full_scans", stats.full_scans),
        ("ksm_zero_pages", stats.ksm_zero_pages),
        ("cow_breaks", stats.cow_breaks),
        ("vmas_given_back", stats.vmas_given_back),
        ("pages_given_back", stats.pages_given_back),
        ("frames_lingering", stats.frames_lingering),
        ("vmas", stats.vmas),
        ("rmap_walks", stats.rmap_walks),
        ("rmap_intervals", stats.rmap_intervals),
        ("rmap_longest_hold", stats.rmap_longest_hold),
        ("saved_bytes", stats.saved_bytes()),
        ("metadata_bytes", stats.metadata_bytes),
    ]);
    line(&mut text, "general_profit", stats.general_profit());
    outcomes(&mut text, &stats.outcomes);
    text
}

/// Counters of a guest or a region, named as the lines of
/// `/proc/PID/ksm_stat`. Those the kernel does not have come last.
#[must_use]
pub fn guest(stats: &MemoryStats) -> String {
    let mut text = lines(&[
        ("ksm_rmap_items", stats.ksm_rmap_items),
        ("ksm_zero_pages", stats.ksm_zero_pages),
        ("ksm_merging_pages", stats.ksm_merging_pages),
        ("pages", stats.pages),
        ("pages_unshared", stats.pages_unshared),
        ("pages_volatile", stats.pages_volatile),
        ("pages_copied", stats.pages_copied),
        ("vmas", stats.vmas),
        ("cow_breaks", stats.cow_breaks),
        ("vmas_given_back", stats.vmas_given_back),
        ("pages_given_back", stats.pages_given_back),
        ("lease_waits", stats.lease_waits),
        ("lease_refusals", stats.lease_refusals),
    ]);
    outcomes(&mut text, &stats.outcomes);
    text
}

fn lines(counters: &[(&str, u64)]) -> String {
    let mut text = String::new();
    for (name, value) in counters {
        line(&mut text, name, value);
    }
    text
}

fn line(text: &mut String, name: &str, value: impl std::fmt::Display) {
    writeln!(text, "{name} {value}").expect("a String takes everything");
}

fn outcomes(text: &mut String, counts: &OutcomeCounts) {
    for (outcome, count) in counts.iter() {
        line(text, &format!("outcome_{outcome}"), count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn parse(text: &str) -> HashMap<&str, i64> {
        let pairs = text.lines().map(|line| {
            let (name, value) = line.split_once(' ').unwrap();
            (name, value.parse().unwrap())
        });
        let map: HashMap<_, _> = pairs.collect();
        assert_eq!(map.len(), text.lines().count(), "a name comes twice");
        map
    }

    #[test]
    fn each_counter_has_a_line_of_its_own() {
        let mut stats = Stats::default();
        stats.pages_shared = 3;
        stats.pages_sharing = 5;
        stats.metadata_bytes = 5 * 4096 + 1;
        stats.vmas_given_back = 4;
        let text = engine(&stats);
        let counters = parse(&text);
        assert_eq!(counters["pages_shared"], 3);
        assert_eq!(counters["pages_sharing"], 5);
        assert_eq!(counters["general_profit"], -1);
        assert_eq!(counters["vmas_given_back"], 4);
        assert_eq!(counters["outcome_merged"], 0);

        let mut stats = MemoryStats::default();
        stats.ksm_merging_pages = 7;
        let text = guest(&stats);
        assert_eq!(parse(&text)["ksm_merging_pages"], 7);
    }
}
