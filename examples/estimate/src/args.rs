//! The command line.

use std::collections::BTreeSet;
use std::num::ParseIntError;
use std::path::PathBuf;
use std::str::FromStr;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser};

use crate::place::Policy;

/// Tells what merging equal pages of these RAM images would save.
///
/// Each FILE is the memory of one guest, raw, in the order of its addresses. Files are
/// read once and no page is kept: memory is needed for records only, at most about 130
/// bytes a page, which is 3% of the images.
#[derive(Debug, Parser)]
#[command(version, after_long_help = MEANINGS, max_term_width = 100)]
pub(crate) struct Args {
    /// Raw images; a file named twice is two guests with equal memory
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,

    /// A trust domain: these images, by their places on the command line from 1 on,
    /// share with one another and with nobody else. Can be given again; images that
    /// are in none are alone. Adds a policy to the two that are always reported
    #[arg(long = "domain", value_name = "N,N...")]
    domains: Vec<Group>,

    /// The most virtual memory areas that merging may cost: what is worth least is then
    /// left alone
    #[arg(long, value_name = "N")]
    pub(crate) max_vmas: Option<u64>,

    /// End standard output with one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const MEANINGS: &str = "\
What is counted (names are those of --json; pages are of 4096 bytes):
  pages            whole pages; what stands behind the last one is left out, with a warning
  zero_pages       pages of zeros, which are none of the following
  distinct_pages   different contents
  duplicate_pages  the other pages: a page is a duplicate if its content stands earlier, in
                   the order of files and of addresses
  within_pages     duplicates whose content stands earlier in the same image
  between_pages    the other duplicates: earlier in another image only
  runs             runs of neighbouring duplicates of one image, as long as they can be
  run_lengths      how many runs are of `from` duplicates to fewer than twice as many, and
                   how many duplicates those hold
  matrix           contents that two images have in common: what they save by sharing with
                   each other; on the diagonal, what an image saves by itself
So pages = zero_pages + distinct_pages + duplicate_pages, and duplicate_pages = within_pages +
between_pages.

What merging comes to, for each policy (who is in one trust domain); vmas and all other
figures outside `policies` are those of one domain for all:
  pages_shared     frames that pages map as shared
  pages_sharing    pages beyond the first of each frame: what is saved, zero pages apart
  stable_node_dups frames beyond the first of their content: 8 and more neighbours of one
                   content get a block of equal frames, so that 64 need one mapping. Each
                   costs a page of the saving, so pages_sharing + stable_node_dups =
                   duplicate_pages where nothing was held back
  vmas             virtual memory areas that merging costs the VMM (without_blocks: with a
                   single frame for every content)
  held_back_pages  pages not merged because of --max-vmas
  saved_bytes      pages_sharing and zero_pages. A zero page is saved only if the guest has
                   written it: one that was never touched takes no memory anyway

Exit status: 0; 1 if a file cannot be read; 2 if the command line is wrong.";

/// Images of one trust domain, from 1 on.
#[derive(Clone, Debug)]
struct Group(Vec<usize>);

impl FromStr for Group {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Args {
    /// The command line; ends the program if that makes no sense.
    pub(crate) fn parse_checked() -> Self {
        let args = Self::parse();
        if let Err(text) = args.check_domains() {
            Self::command()
                .error(ErrorKind::ValueValidation, text)
                .exit();
        }
        args
    }

    fn check_domains(&self) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for &number in self.domains.iter().flat_map(|Group(numbers)| numbers) {
            if !(1..=self.files.len()).contains(&number) {
                return Err(format!("--domain: there is no image {number}\n"));
            }
            if !seen.insert(number) {
                return Err(format!("--domain: image {number} is in two domains\n"));
            }
        }
        Ok(())
    }

    /// Who is to share with whom: one domain for all first.
    pub(crate) fn policies(&self) -> Vec<Policy> {
        let all = 1..=self.files.len();
        let mut policies = vec![
            Policy {
                policy: "one domain for all",
                domains: vec![all.clone().collect()],
            },
            Policy {
                policy: "a domain for each",
                domains: all.clone().map(|image| vec![image]).collect(),
            },
        ];
        if !self.domains.is_empty() {
            let given = self.domains.iter().map(|Group(numbers)| numbers);
            let given = || given.clone();
            let alone = all.filter(|image| !given().flatten().any(|given| given == image));
            let domains = given()
                .cloned()
                .chain(alone.map(|image| vec![image]))
                .collect();
            policies.push(Policy {
                policy: "as given",
                domains,
            });
        }
        policies
    }
}
