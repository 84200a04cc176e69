//! On memory of real guests: what the program says agrees, to the page, with a
//! count by brute force over whole pages, and with the engine run on the bytes.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::collections::HashMap;
use std::path::PathBuf;

use common::{Dir, number, report};
use ksm_core::backend::sim::{SimBackend, SimConfig};
use ksm_core::page::{PAGE_SIZE, PageBuf};
use ksm_core::{Config, Ksm, PageIndex, RegionOptions, Stats};
use serde_json::{Value, json};

/// What brute force finds: every page compared with all others, whole.
#[derive(Debug, Default, PartialEq, Eq)]
struct Brute {
    pages: u64,
    zero_pages: u64,
    distinct_pages: u64,
    within_pages: u64,
    between_pages: u64,
    runs: u64,
    longest_run: u64,
}

impl Brute {
    fn count(images: &[Vec<u8>]) -> Self {
        let mut brute = Self::default();
        // By their bytes: all images that hold a page.
        let mut seen: HashMap<&[u8], Vec<usize>> = HashMap::new();
        for (number, image) in images.iter().enumerate() {
            let mut run = 0;
            for page in image.chunks_exact(PAGE_SIZE) {
                brute.pages += 1;
                let zero = page.iter().all(|&byte| byte == 0);
                brute.zero_pages += u64::from(zero);
                let mut duplicate = false;
                if !zero {
                    let holders = seen.entry(page).or_default();
                    duplicate = !holders.is_empty();
                    if holders.contains(&number) {
                        brute.within_pages += 1;
                    } else {
                        brute.between_pages += u64::from(duplicate);
                        holders.push(number);
                    }
                }
                brute.runs += u64::from(duplicate && run == 0);
                run = if duplicate { run + 1 } else { 0 };
                brute.longest_run = brute.longest_run.max(run);
            }
        }
        brute.distinct_pages = seen.len() as u64;
        brute
    }

    /// The same figures, as the program says them.
    fn said(report: &Value) -> Self {
        let said = |name| number(report, name);
        Self {
            pages: said("pages"),
            zero_pages: said("zero_pages"),
            distinct_pages: said("distinct_pages"),
            within_pages: said("within_pages"),
            between_pages: said("between_pages"),
            runs: said("runs"),
            longest_run: said("longest_run"),
        }
    }
}

/// For each pair of images, the contents in common, by brute force.
fn in_common(images: &[Vec<u8>]) -> Vec<Vec<u64>> {
    let counts = images.iter().map(|image| {
        let mut counts: HashMap<&[u8], u64> = HashMap::new();
        for page in image.chunks_exact(PAGE_SIZE) {
            if page.iter().any(|&byte| byte != 0) {
                *counts.entry(page).or_default() += 1;
            }
        }
        counts
    });
    let counts: Vec<_> = counts.collect();
    let cell = |row: usize, column: usize| {
        let row_counts = counts[row].iter();
        if row == column {
            return row_counts.map(|(_, count)| count - 1).sum();
        }
        row_counts
            .filter(|(page, _)| counts[column].contains_key(*page))
            .count() as u64
    };
    let numbers = 0..images.len();
    let row = |row| numbers.clone().map(|column| cell(row, column)).collect();
    numbers.clone().map(row).collect()
}

/// The engine as an embedder runs it, on guests that hold the images' bytes.
fn merge_bytes(images: &[Vec<u8>]) -> (Stats, u64) {
    let sim = SimBackend::new(SimConfig::default());
    let ksm = Ksm::new(sim.clone(), Config::default()).unwrap();
    let domain = ksm.create_domain().unwrap();
    let guests: Vec<_> = images
        .iter()
        .map(|image| {
            let guest = sim.guest((image.len() / PAGE_SIZE) as u64);
            let mut buf = PageBuf::zeroed();
            for (number, page) in (0..).zip(image.chunks_exact(PAGE_SIZE)) {
                buf.bytes_mut().copy_from_slice(page);
                guest.write(PageIndex(number), &buf);
            }
            let space = ksm.create_space(domain).unwrap();
            let options = RegionOptions::default();
            ksm.register(space, guest.clone(), options).unwrap();
            guest
        })
        .collect();
    let vmas_before = sim.vmas();
    while ksm.stats().full_scans < 3 {
        ksm.scan(u64::MAX).unwrap();
    }
    assert_eq!(sim.violation(), None);
    drop(guests);
    (ksm.stats(), sim.vmas() - vmas_before)
}

/// Runs the program and brute force on the images of an archive; the images.
fn agrees_with_brute_force(archive: &str, long: bool) -> Option<(Vec<Vec<u8>>, Value)> {
    let dir = Dir::new(archive);
    let files = dir.unpack(archive, long)?;
    let names: Vec<_> = files.iter().map(|file| file.to_str().unwrap()).collect();
    let report = report(&names);
    let images: Vec<_> = files.iter().map(read).collect();

    let brute = Brute::count(&images);
    assert_eq!(Brute::said(&report), brute, "{archive}");
    let duplicates = brute.pages - brute.zero_pages - brute.distinct_pages;
    assert_eq!(number(&report, "duplicate_pages"), duplicates, "{archive}");
    assert_eq!(brute.within_pages + brute.between_pages, duplicates);
    assert_eq!(report["matrix"], json!(in_common(&images)), "{archive}");
    for (image, said) in images.iter().zip(report["images"].as_array().unwrap()) {
        let alone = Brute::count(std::slice::from_ref(image));
        assert_eq!(number(said, "zero_pages"), alone.zero_pages);
        assert_eq!(number(said, "distinct_pages"), alone.distinct_pages);
        assert_eq!(number(said, "within_pages"), alone.within_pages);
    }
    for policy in report["policies"].as_array().unwrap() {
        every_duplicate_is_merged(policy, &images);
    }
    assert!(number(&report, "vmas") < number(&report, "vmas_without_blocks"));
    Some((images, report))
}

/// Brute force domain by domain: the engine merged all that is equal.
fn every_duplicate_is_merged(policy: &Value, images: &[Vec<u8>]) {
    let (mut duplicates, mut zero) = (0, 0);
    for domain in policy["domains"].as_array().unwrap() {
        let numbers = domain.as_array().unwrap().iter();
        let members: Vec<_> = numbers
            .map(|number| images[usize::try_from(number.as_u64().unwrap()).unwrap() - 1].clone())
            .collect();
        let brute = Brute::count(&members);
        duplicates += brute.within_pages + brute.between_pages;
        zero += brute.zero_pages;
    }
    for merged in [policy, &policy["without_blocks"]] {
        let gone = number(merged, "pages_sharing") + number(merged, "stable_node_dups");
        assert_eq!(gone, duplicates, "{policy}");
        assert_eq!(number(merged, "zero_pages"), zero, "{policy}");
        let pages = number(merged, "pages_sharing") + zero;
        assert_eq!(number(merged, "saved_bytes"), pages * PAGE_SIZE as u64);
    }
    assert_eq!(number(&policy["without_blocks"], "stable_node_dups"), 0);
}

fn read(file: &PathBuf) -> Vec<u8> {
    std::fs::read(file).unwrap()
}

#[test]
fn two_small_guests() {
    let Some((images, report)) = agrees_with_brute_force("small.tar.zst", false) else {
        return;
    };
    assert_eq!((images.len(), number(&report, "pages")), (2, 2 * 16384));

    // What the model says is what the engine does with the bytes.
    let (stats, vmas) = merge_bytes(&images);
    let said = &report["policies"][0];
    assert_eq!(number(said, "pages_shared"), stats.pages_shared);
    assert_eq!(number(said, "pages_sharing"), stats.pages_sharing);
    assert_eq!(number(said, "stable_node_dups"), stats.stable_node_dups);
    assert_eq!(number(said, "zero_pages"), stats.ksm_zero_pages);
    assert_eq!(number(&report, "vmas"), stats.vmas);
    assert_eq!(
        number(&report, "vmas"),
        vmas,
        "as the simulated host counts"
    );
}

#[test]
fn three_guests_of_128_mib() {
    let Some((images, report)) = agrees_with_brute_force("guests.tar.zst", true) else {
        return;
    };
    assert_eq!((images.len(), number(&report, "pages")), (3, 3 * 32768));
}
