//! What tests of the program share.
#![allow(dead_code, reason = "no test uses all of it")]

use std::env;
use std::fs;
use std::io::{Write as _, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Where the images are, if not beside the repository.
const IMAGES: &str = "KSM_IMAGES";

/// Runs the program.
pub(crate) fn estimate(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_estimate"))
        .args(args)
        .output()
        .unwrap()
}

/// The last line of standard output, of a run that ended well.
pub(crate) fn report(args: &[&str]) -> Value {
    good_report(&estimate(&[args, &["--json"]].concat()))
}

/// The same, once it has ended.
pub(crate) fn good_report(output: &Output) -> Value {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{}\n{err}{out}", output.status);
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

/// A figure of a report.
pub(crate) fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// A folder that goes when this is dropped.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new(name: &str) -> Self {
        let dir = format!("estimate-{}-{name}", std::process::id());
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> String {
        let file = self.0.join(name);
        fs::write(&file, bytes).unwrap();
        file.to_str().unwrap().to_owned()
    }

    /// The files of an archive of images, sorted by name. `None`, and a word about
    /// it, where there is no such archive: CI fails then.
    pub(crate) fn unpack(&self, archive: &str, long: bool) -> Option<Vec<PathBuf>> {
        let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/images");
        let images = env::var_os(IMAGES).map_or(beside, PathBuf::from);
        let archive = images.join(archive);
        if !archive.is_file() {
            let missing = format!(
                "NOT TESTED: {} is not there; {IMAGES} can name the folder that holds it",
                archive.display()
            );
            assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
            // Not by eprintln, which is swallowed where the test passes.
            stderr()
                .write_all(format!("{missing}\n").as_bytes())
                .unwrap();
            return None;
        }
        let mut zstd = Command::new("zstd");
        zstd.args(["-dc"]).args(long.then_some("--long=29"));
        let mut zstd = zstd
            .arg(&archive)
            .stdout(Stdio::piped())
            .spawn()
            .expect("zstd is installed (Debian: apt-get install zstd)");
        let tar = Command::new("tar")
            .arg("x")
            .current_dir(&self.0)
            .stdin(zstd.stdout.take().unwrap())
            .status();
        assert!(tar.unwrap().success() && zstd.wait().unwrap().success());
        let mut files: Vec<_> = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        Some(files)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // What is left goes with the target folder.
        drop(fs::remove_dir_all(&self.0));
    }
}
