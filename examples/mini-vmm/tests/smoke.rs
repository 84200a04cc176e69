//! Runs the program as a user does, and reads what it prints.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};

use serde_json::Value;

/// A user without rights.
const NOBODY: u32 = 65_534;

fn mini_vmm(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mini-vmm"))
        .args(args.split_whitespace())
        .output()
        .unwrap()
}

/// The last line of standard output, of a run that ended well.
fn report(args: &str) -> Value {
    good_report(&mini_vmm(&format!("{args} --verify --json")))
}

fn good_report(output: &Output) -> Value {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{}\n{err}{out}", output.status);
    let report: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(report["verified"], true, "{out}");
    assert_eq!(report["lost_pages"], 0, "{out}");
    assert!(number(&report, "pages_checked") > 0, "{out}");
    report
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// Everything that is equal when the guests rest is saved.
fn saves_what_is_equal(report: &Value) {
    assert_eq!(
        report["engine"], "linux",
        "what is missing: {}",
        report["notes"]
    );
    assert_eq!(
        number(report, "saved_bytes"),
        number(report, "mergeable_bytes"),
        "{report}"
    );
}

#[test]
fn guests_under_kvm_shrink_and_lose_nothing() {
    let report = report("--guests 3 --mem 16M --seconds 4 --recipe default,rest=500");
    assert_eq!(
        report["mode"], "kvm",
        "this test needs /dev/kvm: {}",
        report["notes"]
    );
    saves_what_is_equal(&report);
    assert!(number(&report, "rewritten_merges") > 0, "{report}");
    assert!(number(&report, "stores_checked") > 0, "{report}");
    let before = number(&report, "resident_before_bytes");
    assert!(number(&report, "resident_after_bytes") < before, "{report}");
}

/// Memory falls by what the counters claim, whatever it is made of: the pages
/// of memfds are freed one by one.
#[test]
fn guests_of_memfds_and_of_mixed_kinds_shrink_and_lose_nothing() {
    for memory in ["memfd", "mixed"] {
        let report = report(&format!(
            "--memory {memory} --guests 3 --mem 32M --seconds 3 --recipe default,rest=500"
        ));
        assert_eq!(report["mode"], "kvm", "this test needs /dev/kvm");
        saves_what_is_equal(&report);
        assert!(number(&report, "rewritten_merges") > 0, "{report}");
        let [before, after] =
            ["before", "after"].map(|when| number(&report, &format!("resident_{when}_bytes")));
        let saved = number(&report, "saved_bytes");
        assert!(before - after > saved / 10 * 9, "{memory}: {report}");
    }
}

#[test]
fn host_threads_shrink_and_lose_nothing() {
    let report =
        report("--host-threads --guests 2 --mem 8M --seconds 3 --recipe scattered,rest=500");
    assert_eq!(report["mode"], "host-threads");
    saves_what_is_equal(&report);
}

#[test]
fn disturbed_guests_lose_nothing() {
    let report = report("--guests 3 --mem 16M --seconds 5 --recipe chaos,rest=300 --chaos");
    for deed in ["unmerges", "pages_unmerged", "discards", "reregistrations"] {
        assert!(number(&report["chaos"], deed) > 0, "no {deed}: {report}");
    }
    assert!(number(&report, "rewritten_merges") > 0, "{report}");
}

/// Whatever the lock policy: all that is equal is merged in the end, clones included.
#[test]
fn memory_vcpus_and_guests_come_and_go_and_nothing_is_lost() {
    for policy in ["per-region", "global", "try-skip"] {
        let report = report(&format!(
            "--guests 2 --mem 16M --seconds 5 --recipe default,rest=300 --hotplug 3 --hotplug-mem 4M --fork 3 --lock-policy {policy}"
        ));
        assert_eq!(report["mode"], "kvm", "this test needs /dev/kvm");
        saves_what_is_equal(&report);
        let hotplug = &report["hotplug"];
        assert_eq!(number(hotplug, "vcpus_added"), 3, "{report}");
        assert!(number(hotplug, "withdrawals") > 3, "{report}");
        assert_eq!(number(hotplug, "additions"), number(hotplug, "withdrawals"));
        assert!(number(hotplug, "stores_checked") > 0, "{report}");
        assert_eq!(number(&report["forks"], "clones"), 3, "{report}");
        let guests = report["by_guest"].as_array().unwrap();
        let parents: Vec<_> = guests
            .iter()
            .map(|guest| guest["clone_of"].as_u64())
            .collect();
        assert_eq!(parents, [None, None, Some(0), Some(1), Some(0)]);
        for guest in guests {
            assert!(number(guest, "stores_checked") > 0, "{report}");
        }
    }
}

#[test]
fn host_threads_are_cloned_too() {
    let report =
        report("--host-threads --guests 2 --mem 8M --seconds 4 --fork 2 --recipe default,rest=300");
    saves_what_is_equal(&report);
    assert_eq!(number(&report["forks"], "clones"), 2, "{report}");
}

#[test]
fn guests_that_do_not_trust_one_another_share_nothing() {
    let report = report("--isolate --guests 2 --mem 4M --seconds 2 --recipe common=50,zero=50");
    assert_eq!(number(&report, "pages_sharing"), 0, "{report}");
    assert!(number(&report, "zero_pages") > 0, "{report}");
}

#[test]
fn without_dedup_nothing_is_merged() {
    let report = report("--no-dedup --guests 1 --mem 4M --seconds 1");
    assert_eq!(report["engine"], "none");
    assert_eq!(number(&report, "saved_bytes"), 0);
}

/// Without any right there is no KVM and nothing stops the kernel's writes, but
/// host threads can still be merged.
#[test]
fn without_rights_host_threads_are_guests() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test gives up root's rights, so it must be run as root"
    );
    // The build directory may be closed to others.
    let program = std::env::temp_dir().join(format!("mini-vmm-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_mini-vmm"), &program).unwrap();
    let output = Command::new(&program)
        .args(
            "--guests 2 --mem 4M --seconds 2 --recipe default,rest=500 --verify --json".split(' '),
        )
        .uid(NOBODY)
        .gid(NOBODY)
        .output();
    std::fs::remove_file(&program).unwrap();
    let report = good_report(&output.unwrap());
    assert_eq!(report["mode"], "host-threads");
    assert!(report["notes"][0].as_str().unwrap().contains("/dev/kvm"));
    saves_what_is_equal(&report);
}

#[test]
fn mistakes_on_the_command_line_end_with_status_2() {
    for (args, told) in [
        ("--recipe common=50", "50%, not 100%"),
        ("--guests 64 --mem 64G", "--mem"),
        ("--chaos --no-dedup", "--no-dedup"),
    ] {
        let output = mini_vmm(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args}: {err}");
        assert!(err.contains(told), "{args}: {err}");
    }
}

/// A picture that names every guest, and counters that say what the report says.
#[test]
fn a_picture_and_counters_are_written() {
    let folder = std::env::temp_dir().join(format!("mini-vmm-files-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (plot, metrics) = (folder.join("memory.svg"), folder.join("ksm.prom"));
    let report = report(&format!(
        "--guests 2 --mem 8M --seconds 2 --recipe default,rest=500 --plot {} --metrics {}",
        plot.display(),
        metrics.display()
    ));
    let [svg, text] = [&plot, &metrics].map(|path| std::fs::read_to_string(path).unwrap());
    let left = std::fs::read_dir(&folder).unwrap().count();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(left, 2, "nothing else is left there");

    for words in [
        "guest 0",
        "guest 1",
        "2 guests together",
        "saved",
        "seconds",
        "MiB",
    ] {
        assert!(
            svg.lines().any(|line| line.trim() == words),
            "{words}: {svg}"
        );
    }
    let saved = format!(
        "ksm_saved_bytes{{domain=\"d0\"}} {}",
        number(&report, "saved_bytes")
    );
    let pages = |guest| format!("ksm_guest_pages{{domain=\"d0\",guest=\"{guest}\"}} 2048");
    for line in [&saved[..], &pages(0), &pages(1), "# EOF"] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named_before_guests_run() {
    for option in ["--plot", "--metrics"] {
        let output = mini_vmm(&format!(
            "{option} no/such/folder/file --guests 1 --mem 1M --seconds 1"
        ));
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(
            err.contains("no/such/folder/file cannot be written"),
            "{err}"
        );
        assert!(!err.contains("guest  0"), "{err}");
    }
}
