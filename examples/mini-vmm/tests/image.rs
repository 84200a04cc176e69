//! Guests that are loaded from images, under our engine and under the kernel's.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

const PAGE: usize = 4096;
/// Pages of an image.
const PAGES: usize = 4096;
const KSM: &str = "/sys/kernel/mm/ksm";
/// Settings that the kernel as the engine changes.
const SETTINGS: [&str; 6] = [
    "run",
    "pages_to_scan",
    "sleep_millisecs",
    "use_zero_pages",
    "advisor_mode",
    "smart_scan",
];
const PATIENCE: Duration = Duration::from_secs(60);

/// The host has one ksmd.
static KSMD: Mutex<()> = Mutex::new(());

fn ksmd() -> MutexGuard<'static, ()> {
    KSMD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settings() -> Vec<String> {
    let read = |name| fs::read_to_string(Path::new(KSM).join(name)).unwrap_or_default();
    SETTINGS.map(read).to_vec()
}

/// Two images of which every fourth page holds something, in runs of 32; half of
/// that stands in both. Removed when dropped.
struct Images([PathBuf; 2]);

impl Images {
    fn new(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Self([1u8, 2].map(|image| {
            let mut bytes = vec![0; PAGES * PAGE];
            for page in (0..PAGES).filter(|page| page / 32 % 4 == 0) {
                let owner = if page / 128 % 2 == 0 { 0 } else { image };
                let place = u16::try_from(page).unwrap().to_le_bytes();
                let content = [place[0], place[1], 1, owner];
                let at = page * PAGE + page % (PAGE - 4);
                bytes[at..at + 4].copy_from_slice(&content);
            }
            let path = dir.join(format!("{name}-{}-{image}.ram", std::process::id()));
            fs::write(&path, bytes).unwrap();
            path
        }))
    }

    fn args(&self) -> String {
        let [a, b] = &self.0;
        format!("--image {} {}", a.display(), b.display())
    }

    /// Pages that are not the first of their content, and those of zeros.
    fn count(&self) -> (u64, u64) {
        let files = self.0.each_ref().map(|path| fs::read(path).unwrap());
        let mut met = HashSet::new();
        let (mut duplicates, mut zeros) = (0, 0);
        for page in files.iter().flat_map(|file| file.chunks(PAGE)) {
            if page.iter().all(|byte| *byte == 0) {
                zeros += 1;
            } else if !met.insert(page) {
                duplicates += 1;
            }
        }
        (duplicates, zeros)
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        for path in &self.0 {
            drop(fs::remove_file(path));
        }
    }
}

fn command(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mini-vmm"));
    command.args(args.split_whitespace());
    command
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

/// What holds of a good run, whoever merges.
fn is_merged(report: &Value, images: &Images) {
    let (duplicates, zeros) = images.count();
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!(number(report, "image_zero_pages"), zeros);
    assert_eq!(number(report, "duplicate_pages"), duplicates);
    assert_eq!(number(report, "merged_duplicates"), duplicates, "{report}");
    assert_eq!(number(report, "saved_bytes"), duplicates * PAGE as u64);
    assert!(number(report, "pages_checked") > 0, "{report}");
    assert!(number(report, "stores_checked") > 0, "{report}");
}

#[test]
fn an_image_is_merged_and_its_zeros_stay_holes() {
    let images = Images::new("ours");
    let output = command(&images.args())
        .args("--seconds 5 --rewrites 64 --verify --json".split(' '))
        .output();
    let report = report(&output.unwrap());
    assert_eq!(report["engine"], "linux", "{}", report["notes"]);
    is_merged(&report, &images);
    let whole = 2 * PAGES * PAGE;
    let resident = number(&report, "resident_before_bytes");
    assert!(resident < whole as u64 / 2, "of {whole} bytes: {report}");
}

#[test]
fn the_kernel_merges_the_same() {
    let _alone = ksmd();
    let before = settings();
    let images = Images::new("kernel");
    let output = command(&images.args())
        .args("--engine kernel --seconds 3 --rewrites 64 --verify --json".split(' '))
        .output();
    let report = report(&output.unwrap());
    assert_eq!(report["engine"], "kernel");
    is_merged(&report, &images);
    let merged = number(&report, "pages_shared") + number(&report, "pages_sharing");
    let of_guests = report["by_guest"].as_array().unwrap().iter();
    let of_guests: u64 = of_guests.map(|guest| number(guest, "merged_bytes")).sum();
    assert_eq!(of_guests, merged * PAGE as u64, "{report}");
    assert_eq!(settings(), before);
}

/// A run that has begun to let ksmd merge. Killed when dropped.
struct Running(Child);

impl Running {
    fn new(images: &Images) -> Self {
        let args = format!("{} --engine kernel --seconds 600", images.args());
        let mut command = command(&args);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let running = Self(child.unwrap());
        let shared = Path::new(KSM).join("pages_shared");
        wait_until("ksmd merges", || {
            fs::read_to_string(&shared).unwrap().trim() != "0"
        });
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().unwrap(); // By SIGKILL, which no process can attend to.
        self.0.wait().unwrap();
    }
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_hosts_settings_survive_a_killed_run_and_a_second_one_is_refused() {
    let _alone = ksmd();
    let before = settings();
    let images = Images::new("killed");
    let running = Running::new(&images);
    assert_ne!(settings(), before);

    let second = command(&images.args())
        .args("--engine kernel --seconds 1".split(' '))
        .output();
    let second = second.unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains("the kernel merges other memory"), "{said}");

    drop(running);
    wait_until("settings are restored", || settings() == before);
    let merged = || fs::read_to_string(Path::new(KSM).join("pages_shared")).unwrap();
    wait_until("nothing is merged", || merged().trim() == "0");
}
