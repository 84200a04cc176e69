//! `peer fork`: clones of a guest, against copies of it.

use std::fs::File;
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::{Config, PAGE_SIZE, RegionId};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::args::ForkArgs;
use crate::content::{fill, memory_of};
use crate::engine::{Engine, OPTIONS};
use crate::figures::{Figures, Line, Printer};
use crate::memory::Memory;
use crate::oracle;

/// One page in so many is written to by each guest afterwards.
const WRITE_EVERY: usize = 1021;
/// Figures whose smallest and largest are told.
const SPREAD: &[&str] = &["clone_ms"];

/// Runs it, and says what did not hold that must.
pub(crate) fn run(args: &ForkArgs, printer: &Printer) -> anyhow::Result<Vec<String>> {
    let backend = LinuxBackend::open().context("our side cannot run here")?;
    let mib = if args.quick { 16 } else { args.mib };
    let bench = Bench {
        backend,
        contents: (0..(mib << 20) / PAGE_SIZE).map(content).collect(),
        clones: if args.quick { 2 } else { args.clones },
    };
    let mut complaints = Vec::new();
    let guest = memory_of(&bench.contents)?;
    let copy = bench.copy(&guest)?;
    let snapshot = bench.snapshot(&guest)?;
    let mapped = bench.map_snapshot(&snapshot)?;
    let mut kernel = copy;
    kernel.extend(&mapped);
    bench.of_a_guest(guest, &kernel, printer, &mut complaints)?;
    bench.of_a_snapshot(&snapshot, &kernel, printer, &mut complaints)?;
    Ok(complaints)
}

/// What a page holds: an eighth of a guest's memory is the same again and again, in
/// runs of 128 pages.
const fn content(page: usize) -> usize {
    match page % 1024 {
        equal @ 896.. => equal,
        _ => page,
    }
}

struct Bench {
    backend: LinuxBackend,
    contents: Vec<usize>,
    clones: usize,
}

impl Bench {
    /// Copying the guest.
    fn copy(&self, guest: &Memory) -> anyhow::Result<Figures> {
        let before = used_bytes(None)?;
        let began = Instant::now();
        let copy = Memory::map(guest.pages())?;
        copy.no_huge_pages()?;
        let mut page = [0; PAGE_SIZE];
        for at in 0..guest.pages() {
            guest.read(at, &mut page)?;
            copy.write(at, &page)?;
        }
        let time = began.elapsed();
        let used = used_bytes(None)? - before;
        let mut figures = Figures::default();
        figures.set("clone_ms", milliseconds(time));
        figures.set("memory_mib", mib(used));
        figures.set("memory_percent", self.percent(used));
        Ok(figures)
    }

    /// A file with what the guest holds.
    fn snapshot(&self, guest: &Memory) -> anyhow::Result<File> {
        let file = memfd_create("snapshot", MemfdFlags::CLOEXEC).context("memfd_create")?;
        let mut file = File::from(file);
        let mut page = [0; PAGE_SIZE];
        for at in 0..guest.pages() {
            guest.read(at, &mut page)?;
            file.write_all(&page)?;
        }
        Ok(file)
    }

    /// Mapping the file privately, and reading all of it once.
    fn map_snapshot(&self, snapshot: &File) -> anyhow::Result<Figures> {
        let before = used_bytes(None)?;
        let began = Instant::now();
        let clone = Memory::map_private(snapshot, self.contents.len())?;
        let mapped = began.elapsed();
        let used = used_bytes(None)? - before;
        let read = read_all(&clone)?;
        let mut figures = Figures::default();
        figures.set("private_file_ms", milliseconds(mapped));
        figures.set("private_file_memory_mib", mib(used));
        figures.set("private_file_read_all_ms", milliseconds(read));
        Ok(figures)
    }

    fn of_a_guest(
        &self,
        guest: Memory,
        kernel: &Figures,
        printer: &Printer,
        complaints: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let engine = Engine::new(&self.backend, Config::default())?;
        let parent = engine.register(&guest)?;
        let first = self.clone_of(&engine, parent)?;
        let mut family = vec![guest, first.0];
        let mut later = Vec::new();
        for _ in 1..self.clones {
            let (clone, figures) = self.clone_of(&engine, parent)?;
            family.push(clone);
            later.push(figures);
        }
        print(printer, "first-clone", first.1, kernel)?;
        print(
            printer,
            "later-clones",
            Figures::median(&later, SPREAD),
            kernel,
        )?;
        self.live_apart("guest", &family, complaints)?;
        engine.ksm.remove_space(engine.space)?;
        Ok(())
    }

    fn of_a_snapshot(
        &self,
        snapshot: &File,
        kernel: &Figures,
        printer: &Printer,
        complaints: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let engine = Engine::new(&self.backend, Config::default())?;
        let restored = Memory::map_private(snapshot, self.contents.len())?;
        let before = used_bytes(Some(&engine))?;
        let began = Instant::now();
        let source = HostRegion::new(restored.region());
        let parent = engine.ksm.take_over(engine.space, source, OPTIONS)?;
        let mut taken = Figures::default();
        taken.set("clone_ms", milliseconds(began.elapsed()));
        let used = used_bytes(Some(&engine))? - before;
        taken.set("memory_mib", mib(used));
        taken.set("memory_percent", self.percent(used));
        print(printer, "restored-snapshot-taken-over", taken, kernel)?;
        let (clone, figures) = self.clone_of(&engine, parent)?;
        print(printer, "clone-of-restored-snapshot", figures, kernel)?;
        self.live_apart("snapshot", &[restored, clone], complaints)?;
        engine.ksm.remove_space(engine.space)?;
        Ok(())
    }

    fn clone_of(&self, engine: &Engine, parent: RegionId) -> anyhow::Result<(Memory, Figures)> {
        let before = used_bytes(Some(engine))?;
        let began = Instant::now();
        let clone = Memory::map(self.contents.len())?;
        engine.fork(parent, &clone)?;
        let time = began.elapsed();
        let used = used_bytes(Some(engine))? - before;
        let read = read_all(&clone)?;
        let mut figures = Figures::default();
        figures.set("clone_ms", milliseconds(time));
        figures.set("memory_mib", mib(used));
        figures.set("memory_percent", self.percent(used));
        figures.set("read_all_ms", milliseconds(read));
        figures.set(
            "idle_after_read_memory_mib",
            mib(used_bytes(Some(engine))? - before),
        );
        Ok((clone, figures))
    }

    /// Guests that begin equal, each of which writes to pages of all: none sees
    /// what another wrote.
    fn live_apart(
        &self,
        what: &str,
        family: &[Memory],
        complaints: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        for (number, memory) in family.iter().enumerate() {
            for page in (number..memory.pages()).step_by(WRITE_EVERY) {
                write(memory, page, number)?;
            }
            // Some that all write to.
            for page in (0..memory.pages()).step_by(WRITE_EVERY * 2 + 1) {
                write(memory, page, number)?;
            }
        }
        for (number, memory) in family.iter().enumerate() {
            let mut expected = self.contents.clone();
            let mine = (number..memory.pages()).step_by(WRITE_EVERY);
            let all = (0..memory.pages()).step_by(WRITE_EVERY * 2 + 1);
            mine.chain(all)
                .for_each(|page| expected[page] = written(number, page));
            if let Err(error) = oracle::check_contents(memory, &expected) {
                complaints.push(format!("{what} {number}: {error}"));
            }
        }
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn percent(&self, bytes: i64) -> f64 {
        bytes as f64 * 100.0 / (self.contents.len() * PAGE_SIZE) as f64
    }
}

/// What guest `number` writes to a page.
const fn written(number: usize, page: usize) -> usize {
    (number + 1) << 32 | page
}

fn write(memory: &Memory, page: usize, number: usize) -> anyhow::Result<()> {
    let mut bytes = [0; PAGE_SIZE];
    fill(written(number, page), &mut bytes);
    memory.write(page, &bytes)
}

fn read_all(memory: &Memory) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let mut page = [0; PAGE_SIZE];
    for at in 0..memory.pages() {
        memory.read(at, &mut page)?;
    }
    Ok(began.elapsed())
}

fn print(printer: &Printer, case: &str, ours: Figures, kernel: &Figures) -> anyhow::Result<()> {
    printer.print(&Line {
        workload: "fork",
        case: case.to_owned(),
        ratio: ours.get("clone_ms") / kernel.get("clone_ms"),
        ours,
        kernel: kernel.clone(),
    })
}

/// Memory that this process uses, its page tables, the store and the engine's
/// records included. Pages of files that others hold anyway are not.
fn used_bytes(engine: Option<&Engine>) -> anyhow::Result<i64> {
    let status = procfs::process::Process::myself()?.status()?;
    let kib = status.rssanon.unwrap_or(0) + status.vmpte.unwrap_or(0);
    let store = match engine {
        Some(engine) => engine.ksm.store_bytes()?,
        None => 0,
    };
    Ok((kib * 1024 + store).cast_signed())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn mib(bytes: i64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
