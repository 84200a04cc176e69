//! Golden scenarios: operations and what the counters say after them, side by
//! side, one file a story in `tests/scenarios`.
//!
//! A line is an operation of the script language, or `look r0 3`, and behind
//! `=>` what must be seen after it: counters such as `shared=1`, of everything
//! or of `d0` or `r0` (`r0.copied=1`); `skipped` or `refused` where the operation
//! was; for a look, what became of the page. What the fuzzer prints when it finds
//! something can be put there as it is. The test writes each line anew with
//! what it saw and compares the texts. With `KSM_BLESS=1` it writes the files.
#![cfg(feature = "script")]

use std::fmt::Write;
use std::fs;
use std::path::Path;

use ksm_core::backend::sim::SimBackend;
use ksm_core::page::{PageIndex, pages_in};
use ksm_core::script::{Applied, Op, Runner, SimHost};
use ksm_core::{MemoryStats, Stats};

/// A scenario under way.
struct Stage {
    runner: Runner<SimHost>,
    sim: SimBackend,
}

impl Stage {
    /// On the host that the file's first line asks for, if it does.
    fn new(golden: &str) -> Self {
        let first = golden.lines().next().unwrap_or_default();
        let host = SimHost::from_line(first).unwrap_or_else(|| SimHost::new(1));
        let sim = host.sim().clone();
        let runner = Runner::new(host).expect("good settings");
        Self { runner, sim }
    }

    /// Plays one line. Returns it with what was seen.
    fn play(&mut self, line: &str) -> String {
        let (code, comment) = match line.split_once('#') {
            Some((code, comment)) => (code, format!("#{comment}")),
            None => (line, String::new()),
        };
        let (op, wanted) = code.split_once("=>").unwrap_or((code, ""));
        if op.trim().is_empty() {
            return line.to_owned();
        }
        let seen = match op.trim().strip_prefix("look ") {
            Some(page) => self.look(page),
            None => self.act(op.trim(), wanted),
        };
        let mut played = op.trim_end().to_owned();
        if !seen.is_empty() {
            // Where the author put the arrow, if there was one.
            let column = code.find("=>").unwrap_or(0);
            write!(
                played,
                "{:pad$} => {seen}",
                "",
                pad = column.saturating_sub(played.len() + 1)
            )
            .expect("a string takes everything");
        }
        if !comment.is_empty() {
            write!(played, "  {comment}").expect("a string takes everything");
        }
        played
    }

    fn act(&mut self, op: &str, wanted: &str) -> String {
        let op: Op = op.parse().unwrap_or_else(|error| panic!("{op}: {error}"));
        let applied = self
            .runner
            .apply(&op)
            .unwrap_or_else(|error| panic!("{error}"));
        let mut seen = match applied {
            Applied::Done => Vec::new(),
            Applied::Skipped => vec!["skipped".to_owned()],
            Applied::Refused(_) => vec!["refused".to_owned()],
        };
        let keys = wanted
            .split_whitespace()
            .filter_map(|word| word.split_once('='));
        seen.extend(keys.map(|(key, _)| format!("{key}={}", self.counter(key))));
        seen.join(" ")
    }

    fn counter(&self, key: &str) -> u64 {
        let (ksm, runner) = (self.runner.ksm(), &self.runner);
        let Some((owner, key)) = key.split_once('.') else {
            return match key {
                "vmas" => self.sim.vmas(),
                "frames" => pages_in(ksm.store_bytes().expect("the model can say")),
                key => of_all(&ksm.stats(), key),
            };
        };
        let number = owner[1..].parse().expect("a name like r0 or d0");
        if owner.starts_with('d') {
            let domain = runner.domain(number).expect("a domain that was made");
            return of_all(&ksm.domain_stats(domain).expect("a domain"), key);
        }
        let region = runner.region(number).expect("a registered region");
        of_region(&ksm.region_stats(region).expect("a region"), key)
    }

    fn look(&self, page: &str) -> String {
        let (region, page) = page.split_once(' ').expect("look r0 3");
        let region = region[1..].parse().expect("a name like r0");
        let page = PageIndex(page.trim().parse().expect("a page"));
        let id = self.runner.region(region).expect("a registered region");
        let found = self.runner.ksm().explain(id, page).expect("a page of it");
        let guest = self.runner.guest(region).expect("its memory");
        let state = format!("{:?}", guest.state(page)).to_lowercase();
        match found.sharers {
            0 => format!("{state}: {}", found.outcome),
            sharers => format!("{state}: {} sharers={sharers}", found.outcome),
        }
    }
}

fn of_all(stats: &Stats, key: &str) -> u64 {
    match key {
        "shared" => stats.pages_shared,
        "sharing" => stats.pages_sharing,
        "unshared" => stats.pages_unshared,
        "volatile" => stats.pages_volatile,
        "zero" => stats.ksm_zero_pages,
        "scanned" => stats.pages_scanned,
        "passes" => stats.full_scans,
        "cow" => stats.cow_breaks,
        "lingering" => stats.frames_lingering,
        "vmas_back" => stats.vmas_given_back,
        "pages_back" => stats.pages_given_back,
        _ => panic!("no counter is named {key}"),
    }
}

fn of_region(stats: &MemoryStats, key: &str) -> u64 {
    match key {
        "items" => stats.ksm_rmap_items,
        "merging" => stats.ksm_merging_pages,
        "zero" => stats.ksm_zero_pages,
        "unshared" => stats.pages_unshared,
        "volatile" => stats.pages_volatile,
        "copied" => stats.pages_copied,
        "cow" => stats.cow_breaks,
        _ => panic!("no counter of a region is named {key}"),
    }
}

/// Plays a file. Returns what differs.
fn play(path: &Path) -> String {
    let golden = fs::read_to_string(path).expect("a scenario to read");
    let mut stage = Stage::new(&golden);
    let played: Vec<String> = golden.lines().map(|line| stage.play(line)).collect();
    if std::env::var_os("KSM_BLESS").is_some() {
        fs::write(path, played.join("\n") + "\n").expect("a scenario to write");
        return String::new();
    }
    let mut diff = String::new();
    for (number, (golden, played)) in (1..).zip(golden.lines().zip(&played)) {
        if golden != played {
            writeln!(diff, "{}:{number}\n- {golden}\n+ {played}", path.display())
                .expect("a string takes everything");
        }
    }
    diff
}

#[test]
fn scenarios_play_as_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let files = fs::read_dir(folder).expect("the folder of scenarios");
    let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    assert!(paths.len() >= 8, "only {} scenarios", paths.len());
    let diffs: String = paths.iter().map(|path| play(path)).collect();
    assert!(diffs.is_empty(), "\n{diffs}");
}
