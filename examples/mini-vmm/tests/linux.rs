//! Boots guests by the Linux boot protocol, as a user does. The kernel is a tiny one
//! made here; what Linux itself makes of this machine shows `lab/run`.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod tiny_kernel;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A user without rights.
const NOBODY: u32 = 65_534;

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    /// With a kernel and a ramdisk in it.
    fn new(test: &str, kernel: &[u8]) -> Self {
        let name = format!("mini-vmm-linux-{test}-{}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        std::fs::create_dir(&folder.0).unwrap();
        std::fs::write(folder.0.join("kernel"), kernel).unwrap();
        std::fs::write(folder.0.join("ramdisk"), "from the ramdisk").unwrap();
        folder
    }

    /// What a file holds that is gone then.
    fn take(&self, name: &str) -> String {
        let path = self.0.join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        text
    }

    fn console(&self, guest: usize) -> String {
        std::fs::read_to_string(self.0.join(format!("guest-{guest}.log"))).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn mini_vmm(folder: &Path, cmdline: &str, args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mini-vmm"))
        .current_dir(folder)
        .args(["--kernel", "kernel", "--serial-dir", ".", "--json"])
        .args(["--cmdline", cmdline])
        .args(args.split_whitespace())
        .output()
        .unwrap()
}

fn report(output: &Output) -> Value {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{}\n{err}{out}", output.status);
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// Both kinds of kernel files are started, and are told what they must be; a guest
/// that resets its machine has come to a good end.
#[test]
fn kernels_learn_what_they_are_to_know() {
    let kinds = [
        ("elf", tiny_kernel::elf()),
        ("bzimage", tiny_kernel::bz_image()),
    ];
    for (kind, kernel) in kinds {
        for cmdline in ["reset, by the keyboard", "chipset"] {
            let folder = Folder::new(kind, &kernel);
            let args = "--guests 1 --mem 16M --initrd ramdisk --no-dedup --seconds 30";
            let report = report(&mini_vmm(&folder.0, cmdline, args));
            let told = format!("cmdline: {cmdline}\nramdisk: from the ramdisk\ne820: 2\nready\n");
            assert_eq!(folder.console(0), told, "{kind}");
            assert_eq!(report["by_guest"][0]["has_reset"], true, "{kind}: {report}");
        }
    }
}

/// Guests that run in turns are merged, and go on.
#[test]
fn guests_are_merged_and_go_on() {
    let folder = Folder::new("merged", &tiny_kernel::elf());
    for turns in ["", "--one-at-a-time"] {
        let args = format!(
            "--guests 3 --mem 16M --boot-marker ready --beat-marker beat --seconds 5 --plot memory.svg --metrics ksm.prom {turns}"
        );
        let report = report(&mini_vmm(&folder.0, "beat", &args));
        assert_eq!(report["engine"], "linux", "{report}");
        assert!(
            number(&report, "pages_sharing") + number(&report, "stable_node_dups")
                >= 3 * tiny_kernel::PAGES - 1,
            "{report}"
        );
        for guest in report["by_guest"].as_array().unwrap() {
            assert!(guest["boot_seconds"].as_f64().is_some(), "{report}");
            assert!(number(guest, "beats_meanwhile") > 0, "{report}");
            assert!(number(guest, "beats_after") >= 2, "{report}");
        }
        let lines = folder.console(2);
        assert!(lines.contains("ramdisk: \n"), "there is none: {lines}");
        let [plot, metrics] = ["memory.svg", "ksm.prom"].map(|name| folder.take(name));
        assert!(plot.contains("guest 2"), "{plot}");
        let merged = metrics.lines().filter_map(|line| {
            let value = line
                .strip_prefix("ksm_guest_merging_pages{")?
                .rsplit(' ')
                .next()?;
            value.parse::<u64>().ok()
        });
        assert!(merged.sum::<u64>() >= 3 * tiny_kernel::PAGES, "{metrics}");
    }
}

/// Ours and ksmd merge the same guests, one after the other.
#[test]
fn ours_saves_what_the_kernel_saves() {
    let folder = Folder::new("compared", &tiny_kernel::elf());
    let args = "--guests 2 --mem 16M --boot-marker ready --beat-marker beat --seconds 2 --one-at-a-time --compare-kernel --no-blocks";
    let report = report(&mini_vmm(&folder.0, "beat", args));
    let comparison = &report["comparison"];
    let [ours, kernels] = ["ours", "kernel"].map(|who| number(&comparison[who], "saved_pages"));
    assert!(kernels >= 2 * tiny_kernel::PAGES - 2, "{report}");
    assert!(ours >= kernels, "{report}");
}

#[test]
fn what_goes_wrong_is_said() {
    let folder = Folder::new("wrong", &tiny_kernel::elf());
    for (cmdline, args, told) in [
        ("fault", "--mem 16M", "a guest failed: "),
        (
            "reset",
            "--mem 16M --beat-marker beat",
            "a guest has not gone on: 0 of 2",
        ),
        ("beat", "--mem 16M --initrd missing", "cannot load missing"),
        ("beat", "--mem 1M", "cannot load kernel"),
    ] {
        let all = format!("{args} --guests 1 --boot-marker ready --no-dedup --seconds 1");
        let output = mini_vmm(&folder.0, cmdline, &all);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{cmdline} {args}: {err}");
        assert!(err.contains(told), "{cmdline} {args}: {err}");
    }
}

/// Without what it takes no guest is booted, and the program says what it is.
#[test]
fn without_rights_no_guest_is_booted() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test gives up root's rights, so it must be run as root"
    );
    let folder = Folder::new("rights", &tiny_kernel::elf());
    // The build directory may be closed to others.
    let program = folder.0.join("mini-vmm");
    std::fs::copy(env!("CARGO_BIN_EXE_mini-vmm"), &program).unwrap();
    let output = Command::new(&program)
        .current_dir(&folder.0)
        .args(["--guests", "1", "--mem", "16M", "--kernel", "kernel"])
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(err.contains("/dev/kvm cannot be opened"), "{err}");
}
