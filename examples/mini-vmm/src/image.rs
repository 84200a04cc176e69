//! [`Image`]: the RAM of a real guest, from a file, as a guest's work memory.
//!
//! Pages of zeros stay holes: nobody touches them, so that they cost nothing
//! before there is anything to merge, and count nowhere. Guests know all other
//! pages by their hash, rewrite some and restore them; the VMM compares every
//! byte, zeros included, with the file in the end.

use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use ksm_core::census::Census;
use ksm_core::page::{PAGE_SIZE, PageBuf, is_page_aligned, pages_in};
use vm_memory::Bytes as _;

use crate::content::{PageSpec, key};
use crate::layout::{MAX_WORK_BYTES, SKIPPED};
use crate::plan::Plan;
use crate::ram::{Ram, page_address};

/// Pages that are read and counted at once.
const BATCH: usize = 256;

/// A raw image: guest-physical memory from address 0 on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    path: PathBuf,
    pages: u64,
}

impl Image {
    /// Looks at a file, so that one that cannot serve is found before work begins.
    pub(crate) fn look(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
        let bytes = file.metadata()?.len();
        if bytes == 0 || !is_page_aligned(bytes) {
            bail!("{name} is not made of whole pages of {PAGE_SIZE} bytes: it has {bytes} bytes");
        }
        if bytes > MAX_WORK_BYTES {
            bail!("{name} is larger than a guest can be, {MAX_WORK_BYTES} bytes");
        }
        Ok(Self {
            path: path.to_owned(),
            pages: pages_in(bytes),
        })
    }

    /// Its length, in pages.
    pub(crate) const fn pages(&self) -> u64 {
        self.pages
    }

    /// Its file's name, as given.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Calls `each` with all pages, in order, and the number of the first.
    fn read(
        &self,
        mut each: impl FnMut(u64, &[PageBuf]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let failed = || format!("cannot read {}", self.name());
        let mut file = BufReader::new(File::open(&self.path).with_context(failed)?);
        let mut pages = vec![*PageBuf::zeroed(); BATCH];
        let mut next = 0;
        while next < self.pages {
            let len = usize::try_from(self.pages - next).map_or(BATCH, |left| left.min(BATCH));
            for page in &mut pages[..len] {
                file.read_exact(page.bytes_mut()).with_context(failed)?;
            }
            each(next, &pages[..len])?;
            next += len as u64;
        }
        Ok(())
    }

    /// Copies the image to `ram`, counting its pages. Guest number `guest`
    /// rewrites `rewrites` of them, drawn from `seed`, each in a way of its own:
    /// no rewritten page has an equal.
    pub(crate) fn load(
        &self,
        ram: &Ram,
        tally: &mut ImageTally,
        guest: u64,
        seed: u64,
        rewrites: u64,
    ) -> anyhow::Result<Plan> {
        let mut pages = vec![SKIPPED; usize::try_from(self.pages)?];
        let mut filled = Vec::new();
        self.read(|first, read| {
            tally.count(read)?;
            for (page, buf) in (first..).zip(read).filter(|(_, buf)| !buf.is_zero()) {
                ram.work.write_slice(buf.bytes(), page_address(page))?;
                let mask = key([seed, guest, page]);
                pages[usize::try_from(page)?] = PageSpec::image(buf.bytes(), mask);
                filled.push(page);
            }
            Ok(())
        })?;
        Ok(Plan {
            pages,
            lockstep: spread(&filled, rewrites),
            discardable: self.pages..self.pages,
        })
    }

    /// The pages of `ram` that differ from the file in any byte, in order.
    pub(crate) fn wrong_pages(&self, ram: &Ram) -> anyhow::Result<Vec<u64>> {
        let mut wrong = Vec::new();
        let mut found = [0; PAGE_SIZE];
        self.read(|first, read| {
            for (page, buf) in (first..).zip(read) {
                ram.read_page(page, &mut found)?;
                if &found != buf.bytes() {
                    wrong.push(page);
                }
            }
            Ok(())
        })?;
        Ok(wrong)
    }
}

/// `count` of `pages`, or as many as there are, all over them.
fn spread(pages: &[u64], count: u64) -> Vec<u64> {
    let len = pages.len() as u64;
    let count = count.min(len);
    let place = |n: u64| usize::try_from(n * len / count).expect("less than the length");
    (0..count).map(|n| pages[place(n)]).collect()
}

/// What the pages of all images are, counted as `estimate` does.
#[derive(Debug)]
pub(crate) struct ImageTally {
    census: Census,
    /// Different contents in domains that are counted already.
    distinct_before: u64,
    /// All pages.
    pub(crate) pages: u64,
    /// Pages of zeros.
    pub(crate) zero_pages: u64,
}

impl ImageTally {
    /// No image is counted yet.
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            census: Census::new(None)?,
            distinct_before: 0,
            pages: 0,
            zero_pages: 0,
        })
    }

    fn count(&mut self, pages: &[PageBuf]) -> anyhow::Result<()> {
        let contents = self.census.count(pages)?;
        self.pages += contents.len() as u64;
        self.zero_pages += contents.iter().filter(|content| content.is_none()).count() as u64;
        Ok(())
    }

    /// Images from here on are in another trust domain.
    pub(crate) fn next_domain(&mut self) -> anyhow::Result<()> {
        self.distinct_before += self.census.distinct();
        self.census = Census::new(None)?;
        Ok(())
    }

    /// Pages whose content stands earlier in the same domain, zeros apart: all
    /// that can be saved.
    pub(crate) fn duplicate_pages(&self) -> u64 {
        self.pages - self.zero_pages - self.distinct_before - self.census.distinct()
    }
}

#[cfg(test)]
mod tests {
    use ksm_core::page::PAGE_SIZE_U64;

    use super::*;

    #[test]
    fn rewritten_pages_lie_all_over_the_image() {
        assert_eq!(spread(&[2, 3, 5, 7, 11], 2), [2, 5]);
        assert_eq!(spread(&[2, 3], 9), [2, 3]);
        assert_eq!(spread(&[], 9), [0u64; 0]);
    }

    #[test]
    fn an_image_is_loaded_without_its_zeros_and_compared_by_every_byte() {
        let path = std::env::temp_dir().join(format!("mini-vmm-image-{}", std::process::id()));
        let mut bytes = vec![0; 5 * PAGE_SIZE];
        bytes[PAGE_SIZE] = 1;
        bytes[4 * PAGE_SIZE - 1] = 1;
        bytes[4 * PAGE_SIZE] = 1;
        std::fs::write(&path, &bytes).unwrap();
        let image = Image::look(&path).unwrap();
        let ram = Ram::new(image.pages(), crate::args::MemoryKind::Anonymous).unwrap();
        let mut tally = ImageTally::new().unwrap();
        let plan = image.load(&ram, &mut tally, 0, 1, 1).unwrap();
        assert_eq!(
            (tally.pages, tally.zero_pages, tally.duplicate_pages()),
            (5, 2, 1)
        );
        assert_eq!((plan.page(0), plan.page(2)), (SKIPPED, SKIPPED));
        assert_eq!(plan.lockstep, [1]);

        assert_eq!(image.wrong_pages(&ram).unwrap(), [0u64; 0]);
        for page in [2, 3] {
            let last = page_address(page).0 + PAGE_SIZE_U64 - 1;
            let last = vm_memory::GuestAddress(last);
            ram.work.write_obj(7u8, last).unwrap();
        }
        assert_eq!(image.wrong_pages(&ram).unwrap(), [2, 3]);

        tally.next_domain().unwrap();
        image.load(&ram, &mut tally, 1, 1, 0).unwrap();
        assert_eq!(tally.duplicate_pages(), 2, "one in each domain");
        std::fs::write(&path, [1; 100]).unwrap();
        assert!(Image::look(&path).is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
