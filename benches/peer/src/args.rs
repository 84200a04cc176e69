//! The command line.

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::churn::{Load, Policy};
use crate::content::Order;
use crate::rmap;
use crate::unmerge::Case;

/// Runs a workload on both sides, ours and the kernel's KSM, in the same run, and
/// prints what came of each, and the ratio.
///
/// The kernel's side is driven through /sys/kernel/mm/ksm, for which this must be
/// root; its settings are restored in the end, however this ends. Machines are
/// noisy: the sides take turns, figures are medians of all repetitions, and only
/// ratios of one run mean something. The exit status is 1 if something that must
/// hold in any case did not.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Args {
    /// What is run
    #[command(subcommand)]
    pub(crate) workload: Workload,

    /// Print one JSON object a line
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What is run.
#[derive(Debug, Subcommand)]
pub(crate) enum Workload {
    /// Merging 32 MiB while threads add and withdraw regions of 256 MiB
    Churn(ChurnArgs),
    /// From a frame to the pages that map it
    Rmap(RmapArgs),
    /// Giving merged pages copies of their own
    Unmerge(UnmergeArgs),
    /// Cloning a guest
    Fork(ForkArgs),
}

/// Time until 8192 pages, 2048 contents four times each, are all merged, alone,
/// beside threads that burn CPU time, and beside threads that map 256 MiB, touch a
/// page and unmap it, again and again (ours: registered with the engine, too). The
/// rate is the same on both sides: what the kernel's side reaches when nothing
/// holds it back.
///
/// Churners wait for one another, and for whoever merges, and so leave CPU time
/// that threads which only burn it do not leave. Hence two controls: `burners` burn
/// all that they get, `matched` as much as the churners of that side took. Either are
/// a process of their own: in the one that is merged every change of a mapping would
/// interrupt them.
///
/// The ratio of a case is that of merge_seconds, ours to the kernel's. In the cases
/// `.../contended-over-burners` and `.../contended-over-matched` it is the ratio of
/// ratios: what churn costs a side beyond the CPU time that it takes.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ChurnArgs {
    /// Threads that burn, or churn
    #[arg(long, default_value_t = 4)]
    pub(crate) threads: u32,

    /// How the copies of a content stand
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["in-order", "runs-of-8", "shuffled"])]
    pub(crate) orders: Vec<Order>,

    /// Which of our lock policies
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["per-region", "global", "try-skip"])]
    pub(crate) policies: Vec<Policy>,

    /// What goes on beside the merging
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["idle", "burners", "churners", "matched"])]
    pub(crate) loads: Vec<Load>,

    /// How often each case is run
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,

    /// When to give up waiting until everything is merged, for `try-skip`; others get
    /// 15 times that
    #[arg(long, default_value_t = 2.0)]
    pub(crate) limit_seconds: f64,

    /// Layout changes a second, of all threads together [default: what the kernel's
    /// side reaches]
    #[arg(long)]
    pub(crate) rate: Option<f64>,

    /// The kernel's side makes what it maps mergeable, as ours registers it
    #[arg(long)]
    pub(crate) mergeable_churn: bool,

    /// Once each, for a look at whether it works
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Walks from a frame to the pages that map it, where one of them is in a region with
/// very many others in its anon_vma: exactly at its linear index, and over the whole
/// index space, as the kernel walked.
///
/// The ratio is that of the two times, exact to whole. The kernel's own walk has no
/// door by which to call it, and so no figures. The exact walk must visit as many
/// intervals as there are pages that map the frame.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct RmapArgs {
    /// Pages of the region, and regions that it is cut into
    #[arg(long, default_value_t = 22_169)]
    pub(crate) intervals: usize,

    /// Clones
    #[arg(long, default_value_t = 200)]
    pub(crate) forks: usize,

    /// What becomes of the region first
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "moved", "forks"])]
    pub(crate) cases: Vec<rmap::Case>,

    /// Smaller, for a look at whether it works
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Clones of a guest, and of one restored from a snapshot file, against copying it and
/// against mapping the file privately.
///
/// The ratio is that of clone_ms, ours to the time of copying. What the guest and its
/// clones write afterwards must not meet.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ForkArgs {
    /// The guest's memory, in MiB
    #[arg(long, default_value_t = 1024)]
    pub(crate) mib: usize,

    /// Clones
    #[arg(long, default_value_t = 5, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..))]
    pub(crate) clones: usize,

    /// A small guest, for a look at whether it works
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Unmerging memory that is merged, wholly, half, or one page of what is reserved:
/// ours by the engine, the kernel's by MADV_UNMERGEABLE.
///
/// The ratio is that of mib_per_second, of the whole memory, ours to the kernel's.
/// Afterwards the page map must say of every page that it is anonymous and
/// nobody else's.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct UnmergeArgs {
    /// Memory, in MiB; a third of what is available if that is less
    #[arg(long, default_value_t = 2048)]
    pub(crate) mib: u64,

    /// Memory that is reserved for one page, in TiB
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) sparse_tib: u8,

    /// The same for the kernel's side, which goes through it page by page, in GiB:
    /// 32 TiB would take it a quarter of an hour
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) kernel_sparse_gib: u16,

    /// How much is merged
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["all", "half", "sparse"])]
    pub(crate) cases: Vec<Case>,

    /// How often each case is run
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,

    /// When to give up waiting until everything is merged
    #[arg(long, default_value_t = 120)]
    pub(crate) limit_seconds: u64,

    /// Once each, with less memory, for a look at whether it works
    #[arg(long)]
    pub(crate) quick: bool,
}
