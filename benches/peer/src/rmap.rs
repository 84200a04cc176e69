//! `peer rmap`: from a frame to the pages that map it.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::internals::{WalkFigures, walk};
use ksm_core::{Config, PageIndex, RegionId};

use crate::args::RmapArgs;
use crate::content::fill;
use crate::engine::Engine;
use crate::figures::{Figures, Line, Printer, name_of};
use crate::memory::Memory;

/// For how long walks are repeated, to tell what one takes.
const REPEAT_FOR: Duration = Duration::from_millis(200);
/// Walks before the clock is looked at.
const WALKS: u32 = 16;

/// What becomes of the region before its page is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// It is cut into regions of a page each
    Split,
    /// The same, and the page's region moves to another host address
    Moved,
    /// It is cloned, again and again
    Forks,
}

/// Runs it, and says what did not hold that must.
pub(crate) fn run(args: &RmapArgs, printer: &Printer) -> anyhow::Result<Vec<String>> {
    let backend = LinuxBackend::open().context("our side cannot run here")?;
    let mut complaints = Vec::new();
    for &case in &args.cases {
        let (intervals, forks) = if args.quick {
            (args.intervals.min(1000), args.forks.min(8))
        } else {
            (args.intervals, args.forks)
        };
        let found = measure(&backend, case, intervals, forks, &mut complaints)?;
        let ratio = found.get("exact_us") / found.get("whole_us");
        printer.print(&Line {
            workload: "rmap",
            case: name_of(&case),
            ours: found,
            kernel: Figures::default(),
            ratio,
        })?;
    }
    Ok(complaints)
}

fn measure(
    backend: &LinuxBackend,
    case: Case,
    intervals: usize,
    forks: usize,
    complaints: &mut Vec<String>,
) -> anyhow::Result<Figures> {
    let engine = Engine::new(backend, Config::default())?;
    // The page stands in the middle, and has its equal in a region of its own.
    let memory = Memory::map(intervals)?;
    let page = intervals / 2;
    let twin = Memory::map(1)?;
    let mut bytes = [0; ksm_core::PAGE_SIZE];
    fill(1, &mut bytes);
    memory.write(page, &bytes)?;
    twin.write(0, &bytes)?;
    let region = engine.register(&memory)?;
    engine.register(&twin)?;
    engine.merge(region, PageIndex(page as u64))?;

    let mut clones = Vec::new();
    let (region, page) = match case {
        Case::Split | Case::Moved => {
            let cut = cut(&engine, region, intervals, page)?;
            match case {
                Case::Moved => {
                    let elsewhere = Memory::map(1)?;
                    let source = HostRegion::new(elsewhere.region());
                    clones.push(elsewhere);
                    (engine.ksm.move_region(cut, source)?, 0)
                }
                _ => (cut, 0),
            }
        }
        Case::Forks => {
            for _ in 0..forks {
                let clone = Memory::map(intervals)?;
                engine.fork(region, &clone)?;
                clones.push(clone);
            }
            (region, page)
        }
    };
    let mappers = match case {
        Case::Split | Case::Moved => 2,
        Case::Forks => forks as u64 + 2,
    };
    let place = PageIndex(page as u64);
    let exact = time(|| Ok(walk(&engine.ksm, region, place, false)?))?;
    let whole = time(|| Ok(walk(&engine.ksm, region, place, true)?))?;
    check(case, mappers, exact.0, whole.0, complaints);
    let mut figures = Figures::default();
    for (name, (found, us)) in [("exact", exact), ("whole", whole)] {
        put(&mut figures, name, found, us);
    }
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    for (name, value) in [
        ("mappers", mappers),
        ("regions_of_anon_vma", exact.0.regions),
        ("tree_depth", exact.0.depth),
    ] {
        figures.set(name, value as f64);
    }
    // Regions before their memory.
    engine.ksm.remove_space(engine.space)?;
    drop(clones);
    Ok(figures)
}

/// Cuts a region into single pages. Returns that of `page`.
fn cut(engine: &Engine, region: RegionId, pages: usize, page: usize) -> anyhow::Result<RegionId> {
    let (mut rest, mut found) = (region, region);
    for at in 0..pages - 1 {
        let [one, behind] = engine.ksm.split(rest, PageIndex(1))?;
        if at == page {
            found = one;
        }
        rest = behind;
    }
    Ok(found)
}

/// What a walk finds, and how long it takes, in microseconds.
fn time(walk: impl Fn() -> anyhow::Result<WalkFigures>) -> anyhow::Result<(WalkFigures, f64)> {
    let found = walk()?;
    let (began, mut walks) = (Instant::now(), 0);
    while began.elapsed() < REPEAT_FOR {
        for _ in 0..WALKS {
            walk()?;
        }
        walks += WALKS;
    }
    let us = began.elapsed().as_secs_f64() * 1e6 / f64::from(walks);
    Ok((found, us))
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn put(figures: &mut Figures, walk: &str, found: WalkFigures, us: f64) {
    figures.set(format!("{walk}_us"), us);
    figures.set(format!("{walk}_us_per_lock_hold"), us / found.holds as f64);
    let counts = [
        ("intervals", found.intervals),
        ("nodes", found.nodes),
        ("lock_holds", found.holds),
        ("longest_hold_nodes", found.longest_hold),
        ("sharers", found.sharers),
    ];
    for (name, count) in counts {
        figures.set(format!("{walk}_{name}"), count as f64);
    }
}

/// The exact walk finds as many intervals as there are mappers, and looks at that
/// many nodes and a path down the tree of each item; the other finds the same pages.
fn check(
    case: Case,
    mappers: u64,
    exact: WalkFigures,
    whole: WalkFigures,
    complaints: &mut Vec<String>,
) {
    if (exact.sharers, whole.sharers) != (mappers, mappers) {
        let found = format!("{} and {}", exact.sharers, whole.sharers);
        complaints.push(format!(
            "{case:?}: {mappers} pages map the frame, found {found}"
        ));
    }
    if exact.intervals != mappers {
        let intervals = exact.intervals;
        complaints.push(format!(
            "{case:?}: {intervals} intervals visited for {mappers} mappers"
        ));
    }
    // Each of the two items has a tree of its own, one of them with one node.
    let most = mappers + exact.depth * exact.holds;
    if exact.nodes > most {
        complaints.push(format!(
            "{case:?}: {} nodes visited, not {most}",
            exact.nodes
        ));
    }
}
