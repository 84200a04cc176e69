//! [`Tally`]: how many pages are what, counted one by one.

use serde::Serialize;

use crate::count::{Content, Counted};

/// What the pages of one image are, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    /// All pages.
    pub(crate) pages: u64,
    /// Pages of zeros.
    pub(crate) zero_pages: u64,
    /// Different contents, zeros apart.
    pub(crate) distinct_pages: u64,
    /// Duplicates whose content stands earlier in the same image.
    pub(crate) within_pages: u64,
    /// Other duplicates: the content stands in an earlier image only.
    pub(crate) between_pages: u64,
}

/// Runs of at least `from` duplicates and fewer than twice as many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct RunLengths {
    pub(crate) from: u64,
    pub(crate) runs: u64,
    /// Duplicates in them.
    pub(crate) pages: u64,
}

/// Runs of neighbouring duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Runs {
    pub(crate) runs: u64,
    pub(crate) longest: u64,
    /// By length: from 1, 2, 4, 8... on.
    pub(crate) lengths: Vec<RunLengths>,
}

/// All counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) all: Counts,
    /// Image by image.
    pub(crate) images: Vec<Counts>,
    pub(crate) runs: Runs,
}

/// What one page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Zero,
    First,
    Within,
    /// The first of its content in this image, not in all.
    Between,
}

/// In which image each content was met last: its number from 1 on, 0 for none.
struct Met(Vec<usize>);

impl Met {
    fn kind(&mut self, content: Content, image: usize) -> Kind {
        let Some(content) = content else {
            return Kind::Zero;
        };
        let met = &mut self.0[content.get() as usize];
        match std::mem::replace(met, image + 1) {
            0 => Kind::First,
            last if last == image + 1 => Kind::Within,
            _ => Kind::Between,
        }
    }
}

/// Counts all pages, in the order of images and addresses.
pub(crate) fn tally(counted: &Counted) -> anyhow::Result<Tally> {
    let mut met = Met(vec![0; usize::try_from(counted.distinct)? + 1]);
    let mut tally = Tally::default();
    for (number, image) in counted.images.iter().enumerate() {
        let mut counts = Counts::default();
        let mut run = 0;
        for &content in image.iter() {
            let kind = met.kind(content, number);
            counts.add_page(kind);
            match kind {
                Kind::Within | Kind::Between => run += 1,
                Kind::Zero | Kind::First => tally.runs.add(std::mem::take(&mut run)),
            }
        }
        tally.runs.add(run);
        tally.all.add_image(&counts);
        tally.images.push(counts);
    }
    tally.all.distinct_pages = counted.distinct;
    Ok(tally)
}

impl Counts {
    /// Pages that stand for a content that was met before.
    pub(crate) const fn duplicate_pages(&self) -> u64 {
        self.within_pages + self.between_pages
    }

    fn add_page(&mut self, kind: Kind) {
        self.pages += 1;
        match kind {
            Kind::Zero => self.zero_pages += 1,
            Kind::First => self.distinct_pages += 1,
            Kind::Within => self.within_pages += 1,
            Kind::Between => {
                self.distinct_pages += 1;
                self.between_pages += 1;
            }
        }
    }

    /// All but `distinct_pages`, which images have in common.
    fn add_image(&mut self, image: &Self) {
        self.pages += image.pages;
        self.zero_pages += image.zero_pages;
        self.within_pages += image.within_pages;
        self.between_pages += image.between_pages;
    }
}

impl Runs {
    /// A run of `len` duplicates; 0 for none.
    fn add(&mut self, len: u64) {
        let Some(place) = len.checked_ilog2() else {
            return;
        };
        self.runs += 1;
        self.longest = self.longest.max(len);
        while self.lengths.len() <= place as usize {
            let from = 1 << self.lengths.len();
            self.lengths.push(RunLengths {
                from,
                ..RunLengths::default()
            });
        }
        let lengths = &mut self.lengths[place as usize];
        lengths.runs += 1;
        lengths.pages += len;
    }
}
