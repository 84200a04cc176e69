//! Runs the program as a user does, on small images made here.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs::File;
use std::process::Command;

use common::{Dir, estimate, good_report, number, report};
use ksm_core::page::PAGE_SIZE;
use serde_json::json;

/// An image of pages that hold these bytes.
fn image(pages: &[u8]) -> Vec<u8> {
    pages.iter().flat_map(|&byte| [byte; PAGE_SIZE]).collect()
}

/// Standard error of a run that ended with `status`.
fn complaint(args: &[&str], status: i32) -> String {
    let output = estimate(args);
    assert_eq!(output.status.code(), Some(status), "{args:?}");
    assert!(output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn counts_pages_as_help_says() {
    let dir = Dir::new("counts");
    let a = dir.write("a", &image(&[0, 1, 2, 1, 1, 3]));
    let b = dir.write("b", &image(&[2, 1, 0, 4, 4, 3]));
    let report = report(&[&a, &b]);
    for (name, expected) in [
        ("pages", 12),
        ("zero_pages", 2),
        ("distinct_pages", 4),
        ("duplicate_pages", 6),
        // Two of 1 in the first image, one of 4 in the second.
        ("within_pages", 3),
        // 2, 1 and 3 in the second.
        ("between_pages", 3),
        // 1 1 in the first; 2 1, and 4 3, in the second.
        ("runs", 3),
        ("longest_run", 2),
    ] {
        assert_eq!(number(&report, name), expected, "{name}");
    }
    assert_eq!(
        report["run_lengths"],
        json!([{"from": 1, "runs": 0, "pages": 0}, {"from": 2, "runs": 3, "pages": 6}])
    );
    assert_eq!(report["matrix"], json!([[2, 3], [3, 1]]));
    assert_eq!(number(&report["images"][1], "distinct_pages"), 4);
}

#[test]
fn what_is_saved_depends_on_who_is_in_a_domain() {
    let dir = Dir::new("domains");
    let files = [[1, 2, 9], [1, 2, 9], [1, 1, 7]].map(|pages| image(&pages));
    let files = ["a", "b", "c"].map(|name| {
        let place = usize::from(name.as_bytes()[0] - b'a');
        dir.write(name, &files[place])
    });
    let [a, b, c] = &files;
    let report = report(&[a, b, c, "--domain", "1,2"]);
    let saved = |policy: usize| number(&report["policies"][policy], "pages_sharing");
    assert_eq!([saved(0), saved(1), saved(2)], [5, 1, 4]);
    assert_eq!(report["policies"][2]["domains"], json!([[1, 2], [3]]));
    for (domains, words) in [
        (vec!["--domain", "1,4"], "no image 4"),
        (vec!["--domain", "0"], "no image 0"),
        (
            vec!["--domain", "1,2", "--domain", "2,3"],
            "image 2 is in two",
        ),
        (vec!["--domain", "1,x"], "invalid digit"),
    ] {
        let said = complaint(&[&[a.as_str(), b, c][..], &domains].concat(), 2);
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn blocks_save_mappings_and_a_budget_is_kept() {
    let dir = Dir::new("blocks");
    // A stretch of 64, a run of 20 that another image has, and single pages.
    let run: Vec<_> = (10..30).collect();
    let single = |byte| [100, byte, 101, byte, 102];
    let a = [&[1; 64][..], &run, &single(50)].concat();
    let b = [&run[..], &[2], &single(50)].concat();
    let (a, b) = (dir.write("a", &image(&a)), dir.write("b", &image(&b)));
    let free = report(&[&a, &b]);
    assert!(number(&free, "vmas_without_blocks") > number(&free, "vmas") + 50);
    let duplicates = number(&free, "duplicate_pages");
    let merged = &free["policies"][0];
    let saved = number(merged, "pages_sharing");
    assert_eq!(saved + number(merged, "stable_node_dups"), duplicates);

    let tight = report(&[&a, &b, "--max-vmas", "6"]);
    let merged = &tight["policies"][0];
    assert!(number(&tight, "vmas") <= 6);
    assert!(number(merged, "held_back_pages") > 0);
    assert!((1..saved).contains(&number(merged, "pages_sharing")));
    assert_eq!(number(&tight, "duplicate_pages"), duplicates);
}

#[test]
fn a_tail_is_left_out_and_said_to_be() {
    let dir = Dir::new("tail");
    let mut bytes = image(&[1, 1]);
    bytes.extend([1; 100]);
    let file = dir.write("odd", &bytes);
    let output = estimate(&[&file, "--json"]);
    assert!(output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("odd") && said.contains("last 100 bytes are left out"),
        "{said}"
    );
    let report = report(&[&file]);
    assert_eq!(
        (number(&report, "pages"), number(&report, "duplicate_pages")),
        (2, 1)
    );
    assert_eq!(number(&report["images"][0], "tail_bytes"), 100);
}

#[test]
fn what_cannot_be_read_is_named() {
    let dir = Dir::new("errors");
    let good = dir.write("good", &image(&[1]));
    let short = dir.write("short", &[1; 100]);
    let missing = good.replace("good", "missing");
    let folder = good.replace("/good", "");
    for (file, words) in [
        (&missing, "No such file"),
        (&short, "no whole page"),
        (&folder, "not a file"),
    ] {
        let said = complaint(&[&good, file], 1);
        assert!(
            said.contains(file.as_str()) && said.contains(words),
            "{said}"
        );
    }
    assert!(complaint(&[], 2).contains("FILE"));
}

#[test]
fn pages_are_not_kept() {
    const IMAGE_BYTES: u64 = 512 << 20;
    const LIMIT_KIB: u64 = (IMAGE_BYTES >> 10) / 2;
    let dir = Dir::new("memory");
    let file = dir.write("sparse", &image(&[1, 2, 1]));
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(IMAGE_BYTES)
        .unwrap();
    let limited = format!("ulimit -v {LIMIT_KIB} && exec \"$0\" \"$@\"");
    let output = Command::new("sh")
        .args([
            "-c",
            &limited,
            env!("CARGO_BIN_EXE_estimate"),
            &file,
            "--json",
        ])
        // Each thread takes address space.
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    let report = good_report(&output);
    assert_eq!(number(&report, "pages"), IMAGE_BYTES / PAGE_SIZE as u64);
    assert_eq!(number(&report, "duplicate_pages"), 1);
}

#[test]
fn help_says_what_is_counted() {
    let output = estimate(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    for name in [
        "pages",
        "zero_pages",
        "distinct_pages",
        "duplicate_pages",
        "within_pages",
        "between_pages",
        "runs",
        "vmas",
        "stable_node_dups",
        "Exit status",
    ] {
        assert!(
            help.lines().any(|line| line.trim().starts_with(name)),
            "{name}"
        );
    }
}
