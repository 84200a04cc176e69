//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, ValueEnum};
use ksm_core::page::bytes_in;

use crate::layout::control_bytes;
use crate::linux::options::LinuxArgs;
use crate::mem_size::MemSize;
use crate::recipe::{PRESETS, Recipe};
use crate::reshape::ReshapeArgs;

/// Runs guests whose memory shrinks while they work: equal pages are merged.
///
/// Each guest fills its memory to a recipe, then goes on checking and rewriting
/// it until the time is up. What every page must hold is kept outside the memory
/// that is merged; the guests check it all the time, the VMM at the end.
#[derive(Debug, Parser)]
#[command(version, after_long_help = after_help(), max_term_width = 100)]
pub(crate) struct Args {
    /// How many guests [default: 4, or one for each image]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) guests: Option<u8>,

    /// Memory of each guest that can be merged, as 128M, 1G or bytes
    #[arg(long, default_value = "128M")]
    pub(crate) mem: MemSize,

    /// How long guests work once they have filled their memory
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seconds: u32,

    /// What contents, places and disturbances are drawn from
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// What guests fill their memory with: a preset, settings, or both with
    /// commas between them (see below)
    #[arg(long, default_value = "default")]
    pub(crate) recipe: Recipe,

    /// Raw RAM images that guests' memory is loaded from, one for each guest, from
    /// the first again if there are more guests. Their pages of zeros stay holes
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["mem", "recipe"])]
    pub(crate) image: Vec<PathBuf>,

    /// How many pages of its image each guest rewrites and restores, again and
    /// again, once our engine has merged them
    #[arg(long, value_name = "PAGES", default_value_t = 512)]
    pub(crate) rewrites: u32,

    /// What merges memory
    #[arg(long, value_enum, default_value_t = Engine::Ours)]
    pub(crate) engine: Engine,

    /// The most mappings that merging may cost [default: three quarters of what
    /// the process may have]
    #[arg(long, value_name = "N")]
    pub(crate) max_vmas: Option<u64>,

    /// No blocks of equal frames for stretches of one content: more mappings, up to
    /// 63 frames less for each such content
    #[arg(long)]
    pub(crate) no_blocks: bool,

    /// Check every page of every guest at the end, by guest and VMM; fail if
    /// one is wrong
    #[arg(long)]
    pub(crate) verify: bool,

    /// End standard output with one line of JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Draw memory over time: what each guest takes, and what is saved
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Write the counters for Prometheus, every second and at the end
    #[arg(long, value_name = "FILE", conflicts_with = "no_dedup")]
    pub(crate) metrics: Option<PathBuf>,

    /// Pages to scan before the scanner sleeps
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pages_to_scan: u32,

    /// How long the scanner sleeps then
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pub(crate) sleep_millisecs: u32,

    /// For how many passes a page must stay the same before it is merged with
    /// another private page
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) settle_passes: u8,

    /// How much of the time a guest works, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) busy: u8,

    /// Huge pages below guest memory
    #[arg(long, value_enum, default_value_t = Thp::Madvise)]
    pub(crate) thp: Thp,

    /// What guest memory is made of
    #[arg(long, value_enum, default_value_t = MemoryKind::Anonymous)]
    pub(crate) memory: MemoryKind,

    /// Unmerge, discard, unregister and register again at random meanwhile (the
    /// recipe `chaos` has pages that can be discarded)
    #[arg(long, conflicts_with = "no_dedup")]
    pub(crate) chaos: bool,

    /// A trust domain for each guest: only equal pages of one guest are merged
    #[arg(long)]
    pub(crate) isolate: bool,

    /// Merge nothing, for comparison
    #[arg(long)]
    pub(crate) no_dedup: bool,

    /// Host threads as guests, even if there is KVM
    #[arg(long)]
    pub(crate) host_threads: bool,

    #[command(flatten)]
    pub(crate) reshape: ReshapeArgs,

    #[command(flatten)]
    pub(crate) linux: LinuxArgs,
}

impl Args {
    /// The command line, if it makes sense; otherwise the program ends.
    pub(crate) fn parse_checked() -> Self {
        let args = Self::parse();
        if let Err(text) = args.check() {
            Self::command()
                .error(ErrorKind::ArgumentConflict, text)
                .exit();
        }
        args
    }

    fn check(&self) -> Result<(), String> {
        if self.linux.kernel.is_some() {
            self.check_linux()?;
        }
        self.check_reshape()?;
        if self.image.len() > MAX_GUESTS {
            return Err(format!("more than {MAX_GUESTS} images\n"));
        }
        if usize::from(self.guests()) < self.image.len() {
            let text = "--guests is less than there are images: name fewer of them\n";
            return Err(text.to_owned());
        }
        let only_ours = [
            (self.chaos, "--chaos"),
            (self.isolate, "--isolate"),
            (self.no_dedup, "--no-dedup"),
            (self.max_vmas.is_some(), "--max-vmas"),
            (self.no_blocks, "--no-blocks"),
            (self.metrics.is_some(), "--metrics"),
            // It merges private anonymous memory alone.
            (
                self.memory != MemoryKind::Anonymous,
                "--memory memfd or mixed",
            ),
        ];
        match only_ours.iter().find(|(given, _)| *given) {
            Some((_, name)) if self.engine == Engine::Kernel => {
                Err(format!("the kernel's KSM cannot do {name}\n"))
            }
            _ => Ok(()),
        }
    }

    fn check_linux(&self) -> Result<(), String> {
        if self.verify {
            let text = "--verify checks what built-in guests must hold in each page; what Linux must, nobody knows. That it goes on working shows --beat-marker\n";
            return Err(text.to_owned());
        }
        if self.memory != MemoryKind::Anonymous {
            return Err("Linux guests' memory is anonymous: no --memory\n".to_owned());
        }
        if self.linux.compare_kernel && self.engine == Engine::Kernel {
            let text = "--compare-kernel compares ours with the kernel's: no --engine\n";
            return Err(text.to_owned());
        }
        Ok(())
    }

    /// How many guests there are.
    pub(crate) fn guests(&self) -> u8 {
        let images = u8::try_from(self.image.len()).unwrap_or(u8::MAX);
        let default = if images > 0 { images } else { DEFAULT_GUESTS };
        self.guests.unwrap_or(default)
    }
}

/// Guests that are not loaded from images, unless a number is given.
const DEFAULT_GUESTS: u8 = 4;
/// The most guests.
const MAX_GUESTS: usize = 64;

/// Memory that guests of so many pages need, before any of it is merged.
pub(crate) fn guest_bytes(pages: &[u64]) -> u64 {
    let bytes = |&pages: &u64| bytes_in(pages) + control_bytes(pages);
    pages.iter().map(bytes).sum()
}

/// What merges memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// `ksm-core`, in this process
    Ours,
    /// The kernel's KSM, for comparison: needs root, and that nothing else is
    /// merged on this host (see below)
    Kernel,
}

/// What the kernel is advised on huge pages of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Thp {
    /// MADV_HUGEPAGE: wherever they fit, unless the system's setting is `never`
    Always,
    /// No advice: none if the system's setting is `madvise`, as it often is
    Madvise,
    /// MADV_NOHUGEPAGE
    Never,
}

/// What the memory that can be merged is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryKind {
    /// Private anonymous mappings
    Anonymous,
    /// A memfd for each guest, which nobody else maps
    Memfd,
    /// One region of each
    Mixed,
}

fn after_help() -> String {
    let presets: String = PRESETS
        .iter()
        .map(|(name, recipe, what)| format!("  {name}: {what}\n    {recipe}\n"))
        .collect();
    format!(
        "\
Recipes:
  common, unique, zero, rewritten, discardable   shares in percent, 100 in all; those not given are 0
  lastbyte=N     N% of the common pages differ from the others' in their last byte
  stretch=N      N% of the common pages are one content, 0xcc, in long stretches
  order=...      in-order; shuffled (runs of 16 pages change places); scattered (single pages do)
  rest=MS        how long a rewritten page rests before all guests increment its counters again
  times=N        how often they are incremented then
  slices=N       into how many parts the rewritten pages are cut; one is rewritten while the others rest

Presets:
{presets}
Images:
  Guests check their pages by hashes while they work, the VMM compares every byte
  with the files at the end. Before anything is counted all rewritten pages are
  restored, so duplicate_pages is what `estimate` counts, and merged_duplicates
  (pages_sharing + stable_node_dups) what of it is merged. With an image the guests
  have huge pages only with --thp always.

The kernel as the engine:
  It is set up through /sys/kernel/mm/ksm: use_zero_pages, pages_to_scan,
  sleep_millisecs and run; advisor_mode, if it is on; and, once guests rest and what
  is left is to be merged, smart_scan, which is off then. A process of its own
  restores them however this one ends, killed by any signal included; only if that
  one is killed as well (with all of a container, say), they stay as they are: run 1,
  use_zero_pages 1. If run was 0, pages that were merged are unmerged then.

Examples:
  mini-vmm --verify
  mini-vmm --guests 4 --mem 128M --seconds 20 --verify --json
  mini-vmm --seconds 60 --recipe lockstep --verify
  mini-vmm --seconds 60 --recipe chaos --chaos --verify
  mini-vmm --guests 3 --hotplug 4 --fork 2 --verify
  mini-vmm --recipe poison,order=scattered,rest=500
  mini-vmm --plot memory.svg --metrics ksm.prom
  mini-vmm --image a.ram b.ram c.ram --max-vmas 2400 --verify
  mini-vmm --image a.ram b.ram c.ram --engine kernel --verify
  mini-vmm --guests 2 --kernel bzImage --initrd initrd.img --boot-marker login:

Exit status:
  0  done; with --verify: and every page held what it must
  1  a page was lost, a guest or the engine failed
  2  the command line makes no sense
  3  this host lacks what is needed to run anything at all"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
        let args = Args::try_parse_from(["mini-vmm"]).unwrap();
        assert_eq!((args.guests(), args.mem.pages()), (4, 32_768));
    }

    #[test]
    fn sizes_are_read_with_their_unit() {
        for (text, pages) in [
            ("128M", 32_768),
            ("1g", 262_144),
            ("1048576", 256),
            ("2048K", 512),
        ] {
            assert_eq!(text.parse::<MemSize>().unwrap().pages(), pages, "{text}");
        }
        for text in ["", "M", "12Q", "100K", "65G", "1048577", "99999999999G"] {
            assert!(text.parse::<MemSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn mistakes_are_refused() {
        for wrong in [
            &["--guests", "0"][..],
            &["--recipe", "common=50"],
            &["--chaos", "--no-dedup"],
            &["--busy", "101"],
            &["--image", "a", "--recipe", "default"],
            &["--image"],
            &["--initrd", "a"],
            &["--vcpus", "2"],
            &["--one-at-a-time"],
            &["--kernel", "a", "--vcpus", "0"],
            &["--kernel", "a", "--vcpus", "65"],
            &["--kernel", "a", "--one-at-a-time"],
            &["--kernel", "a", "--image", "b"],
            &["--kernel", "a", "--recipe", "default"],
            &["--kernel", "a", "--host-threads"],
        ] {
            let line = ["mini-vmm"].iter().chain(wrong);
            assert!(Args::try_parse_from(line).is_err(), "{wrong:?}");
        }
        for wrong in [
            &["--engine", "kernel", "--isolate"][..],
            &["--engine", "kernel", "--memory", "mixed"],
            &["--image", "a", "b", "--guests", "1"],
            &["--kernel", "a", "--verify"],
            &["--kernel", "a", "--fork", "1"],
            &["--engine", "kernel", "--fork", "1"],
            &["--hotplug", "1", "--no-dedup"],
            &["--hotplug", "1", "--host-threads"],
            &["--kernel", "a", "--memory", "memfd"],
            &[
                "--kernel",
                "a",
                "--boot-marker",
                "b",
                "--compare-kernel",
                "--engine",
                "kernel",
            ],
        ] {
            let line = ["mini-vmm"].iter().chain(wrong);
            let args = Args::try_parse_from(line).unwrap();
            assert!(args.check().is_err(), "{wrong:?}");
        }
    }
}
