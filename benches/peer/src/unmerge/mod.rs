//! `peer unmerge`: giving merged pages copies of their own.

mod sides;

use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use ksm_core::PAGE_SIZE;

use crate::args::UnmergeArgs;
use crate::content::memory_of;
use crate::cpu;
use crate::figures::{Figures, Line, Printer, name_of};
use crate::host::Host;
use crate::memory::Memory;
use crate::oracle;
use sides::{Kernel, Ours, Side};

/// Figures whose smallest and largest are told.
const SPREAD: &[&str] = &["mib_per_second"];
/// Copies of each content that is merged.
const COPIES: usize = 4;
/// Where half is merged, so many neighbours are, and as many are not.
const STRETCH: usize = 64;
/// Of the memory that is available, this part is used at most.
const PART_OF_AVAILABLE: u64 = 3;

/// How much is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// Everything
    All,
    /// Half of it, in stretches of 64 pages
    Half,
    /// One page of memory that is reserved, and empty but for it
    Sparse,
}

/// Runs it, and says what did not hold that must.
pub(crate) fn run(
    host: &Host,
    args: &UnmergeArgs,
    printer: &Printer,
) -> anyhow::Result<Vec<String>> {
    let bench = Bench {
        host,
        pages: pages_that_fit(args)?,
        reserved: pages(usize::from(args.sparse_tib) << 40),
        kernel_reserved: pages(usize::from(args.kernel_sparse_gib) << 30),
        limit: Duration::from_secs(args.limit_seconds),
    };
    let repeat = if args.quick { 1 } else { args.repeat };
    let mut complaints = Vec::new();
    for &case in &args.cases {
        let (mut ours, mut kernel) = (Vec::new(), Vec::new());
        for _ in 0..repeat {
            kernel.push(bench.trial(case, true, &mut complaints)?);
            ours.push(bench.trial(case, false, &mut complaints)?);
        }
        let [ours, kernel] = [ours, kernel].map(|runs| Figures::median(&runs, SPREAD));
        printer.print(&Line {
            workload: "unmerge",
            case: name_of(&case),
            ratio: ours.get("mib_per_second") / kernel.get("mib_per_second"),
            ours,
            kernel,
        })?;
    }
    Ok(complaints)
}

const fn pages(bytes: usize) -> usize {
    bytes / PAGE_SIZE
}

/// Pages of the dense cases.
fn pages_that_fit(args: &UnmergeArgs) -> anyhow::Result<usize> {
    let asked = if args.quick { 64 } else { args.mib };
    let available = procfs::Current::current()
        .map(|info: procfs::Meminfo| info.mem_available)
        .context("/proc/meminfo")?
        .unwrap_or(u64::MAX);
    let mib = asked.min((available / PART_OF_AVAILABLE) >> 20);
    // Whole stretches, merged and not, of all copies.
    let step = STRETCH * 2 * COPIES;
    Ok((usize::try_from(mib << 20)? / PAGE_SIZE).next_multiple_of(step))
}

struct Bench<'h> {
    host: &'h Host,
    pages: usize,
    reserved: usize,
    kernel_reserved: usize,
    limit: Duration,
}

impl Bench<'_> {
    fn trial(
        &self,
        case: Case,
        kernel: bool,
        complaints: &mut Vec<String>,
    ) -> anyhow::Result<Figures> {
        let mut side: Box<dyn Side> = if kernel {
            Box::new(Kernel::new(self.host)?)
        } else {
            Box::new(Ours::new(self.host)?)
        };
        let figures = match case {
            Case::Sparse if kernel => {
                sparse(self.kernel_reserved, self.limit, &mut *side, complaints)
            }
            Case::Sparse => sparse(self.reserved, self.limit, &mut *side, complaints),
            Case::All | Case::Half => self.dense(case, &mut *side, complaints),
        };
        side.end()?;
        figures
    }

    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    fn dense(
        &self,
        case: Case,
        side: &mut dyn Side,
        complaints: &mut Vec<String>,
    ) -> anyhow::Result<Figures> {
        let contents = contents(case, self.pages);
        let memory = memory_of(&contents)?;
        let merged = if case == Case::All { 1 } else { 2 };
        let merged = self.pages / merged;
        side.merge(&memory, &memory, 0..self.pages, merged, self.limit)?;
        let cpu = cpu::of_process();
        let seconds = side.unmerge(&memory)?.as_secs_f64();
        let cpu = (cpu::of_process() - cpu).as_secs_f64();
        let own = oracle::count_own(&memory)?;
        oracle::check_contents(&memory, &contents)?;
        if own != self.pages as u64 {
            complaints.push(format!(
                "{case:?}: {own} of {} pages are their own",
                self.pages
            ));
        }
        let mut figures = figures(self.pages, merged, seconds);
        figures.set("cpu_us_per_merged_page", cpu * 1e6 / merged as f64);
        Ok(figures)
    }
}

fn sparse(
    pages: usize,
    limit: Duration,
    side: &mut dyn Side,
    complaints: &mut Vec<String>,
) -> anyhow::Result<Figures> {
    let twin = memory_of(&[0])?;
    let memory = Memory::map(pages)?;
    let page = pages / 2;
    let mut bytes = [0; PAGE_SIZE];
    twin.read(0, &mut bytes)?;
    memory.write(page, &bytes)?;
    side.merge(&memory, &twin, page..page + 1, 2, limit)?;
    let seconds = side.unmerge(&memory)?.as_secs_f64();
    let mut found = [0; PAGE_SIZE];
    memory.read(page, &mut found)?;
    if found != bytes || !oracle::is_own(&memory, page)? {
        complaints.push("Sparse: the page is not as it was written".to_owned());
    }
    Ok(figures(pages, 1, seconds))
}

/// What pages hold of which all or half are merged.
fn contents(case: Case, pages: usize) -> Vec<usize> {
    let unique = match case {
        Case::Half => pages / 2 / COPIES,
        Case::All | Case::Sparse => pages / COPIES,
    };
    let mut merged = (0..unique).cycle();
    let content = |page: usize| match case {
        Case::Half if page / STRETCH % 2 == 1 => Some(pages + page),
        _ => merged.next(),
    };
    (0..pages).map_while(content).collect()
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn figures(pages: usize, merged: usize, seconds: f64) -> Figures {
    let mib = (pages * PAGE_SIZE) as f64 / f64::from(1 << 20);
    let mut figures = Figures::default();
    figures.set("memory_mib", mib);
    figures.set("merged_pages", merged as f64);
    figures.set("unmerge_ms", seconds * 1e3);
    figures.set("unmerge_us_per_merged_page", seconds * 1e6 / merged as f64);
    figures.set("mib_per_second", mib / seconds);
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_pages_have_equals() {
        let contents = contents(Case::Half, 1024);
        assert_eq!(contents.len(), 1024);
        let equals = |content: usize| contents.iter().filter(|&&other| other == content).count();
        let shared = contents
            .iter()
            .filter(|&&content| equals(content) == COPIES);
        assert_eq!(shared.count(), 512);
        assert!(
            contents
                .iter()
                .all(|&content| [1, COPIES].contains(&equals(content)))
        );
    }
}
