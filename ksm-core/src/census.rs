//! A census of pages: which of them are equal, counted exactly, without merging
//! anything.
//!
//! It knows contents as the engine does, by keyed fingerprint and digest, in the
//! engine's own stable tree. Pages with one fingerprint and one 128-bit digest
//! are taken to be equal; nobody looks at their bytes again, of which none are
//! kept. (The engine itself compares bytes, because guests may try to deceive
//! it. With keys that nobody knows, two different pages among 2^40 share a digest
//! with a chance of 2^-49.)
//!
//! ```
//! use ksm_core::backend::sim::pattern;
//! use ksm_core::census::Census;
//! use ksm_core::page::PageBuf;
//!
//! let mut census = Census::new(None)?;
//! let pages = [pattern(1), PageBuf::zeroed(), pattern(2), pattern(1)].map(|page| *page);
//! let contents = census.count(&pages)?;
//!
//! assert_eq!(contents[0], contents[3]);
//! assert_ne!(contents[0], contents[2]);
//! assert_eq!(contents[1], None); // Zeros are nobody's content.
//! assert_eq!(census.distinct(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::num::NonZeroU32;

use rayon::prelude::*;
use thiserror::Error;

use crate::error::Error;
use crate::fingerprint::{Digest, Fingerprint, Keys};
use crate::page::{FrameId, PageBuf};
use crate::stable::StableTree;

/// The number of a content: 1 for the first that was met, 2 for the next one
/// that differs, and so on. Pages of zeros have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentId(NonZeroU32);

impl ContentId {
    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

/// More than 2^32 - 1 contents: they can neither be numbered nor have frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("more than 2^32 - 1 different pages, 16 TiB of them")]
#[non_exhaustive]
pub struct TooManyContents;

/// Counts contents. Takes about 60 bytes for each, nothing for a page.
#[derive(Debug)]
pub struct Census {
    keys: Keys,
    /// In place of a frame's number stands the content's.
    contents: StableTree,
}

impl Census {
    /// A census that has met no page, with keys made from `seed`, random if
    /// `None`. What it counts does not depend on the seed.
    ///
    /// # Errors
    /// When the host has no random numbers to give.
    pub fn new(seed: Option<[u8; 32]>) -> Result<Self, Error> {
        Ok(Self {
            keys: Keys::new(seed)?,
            contents: StableTree::new(1),
        })
    }

    /// The content of each of `pages`; `None` for one of zeros. They are
    /// fingerprinted by the rayon pool that this is called in.
    ///
    /// # Errors
    /// [`TooManyContents`]; what it says of later pages means nothing then.
    pub fn count(&mut self, pages: &[PageBuf]) -> Result<Vec<Option<ContentId>>, TooManyContents> {
        let keys = &self.keys;
        let known_by =
            |page: &PageBuf| (!page.is_zero()).then(|| (keys.fingerprint(page), keys.digest(page)));
        let known_by: Vec<_> = pages.par_iter().map(known_by).collect();
        let contents = known_by
            .into_iter()
            .map(|known_by| known_by.map(|key| self.content(key)).transpose())
            .collect();
        self.contents.reshard(self.contents.len());
        contents
    }

    fn content(
        &self,
        (fingerprint, digest): (Fingerprint, Digest),
    ) -> Result<ContentId, TooManyContents> {
        let number = match self.contents.find_exact(fingerprint, &digest) {
            Some(FrameId(number)) => number,
            None => {
                let number = u32::try_from(self.contents.len() + 1);
                let number = number.map_err(|_| TooManyContents)?;
                self.contents.insert(fingerprint, digest, FrameId(number));
                number
            }
        };
        let number = NonZeroU32::new(number).expect("numbers are counted from 1");
        Ok(ContentId(number))
    }

    /// How many different contents it has met, zeros apart.
    #[must_use]
    pub fn distinct(&self) -> u64 {
        self.contents.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::page::PAGE_SIZE;

    fn page(at: usize, value: u8) -> PageBuf {
        let mut page = PageBuf::zeroed();
        page.bytes_mut()[at] = value;
        *page
    }

    #[test]
    fn equal_pages_have_one_number_in_any_batch() {
        let mut census = Census::new(Some([1; 32])).unwrap();
        let mut numbers = |pages: &[PageBuf]| {
            let contents = census.count(pages).unwrap();
            let numbers = contents.iter().map(|content| content.map(ContentId::get));
            numbers.collect::<Vec<_>>()
        };
        let last = PAGE_SIZE - 1;
        assert_eq!(
            numbers(&[page(0, 1), page(last, 1), page(0, 0), page(0, 1)]),
            [Some(1), Some(2), None, Some(1)]
        );
        assert_eq!(numbers(&[]), []);
        assert_eq!(numbers(&[page(last, 2), page(last, 1)]), [Some(3), Some(2)]);
        assert_eq!(census.distinct(), 3);
    }

    #[test]
    fn what_is_counted_does_not_depend_on_keys() {
        let marks = (0..600_u16).map(|n| (usize::from(n % 97), u8::try_from(n % 7).expect("< 7")));
        let pages: Vec<_> = marks.clone().map(|(at, value)| page(at, value)).collect();
        let distinct = marks
            .filter(|&(_, value)| value > 0)
            .collect::<HashSet<_>>();
        let [a, b] = [Some([1; 32]), None].map(|seed| {
            let mut census = Census::new(seed).unwrap();
            (census.count(&pages).unwrap(), census.distinct())
        });
        assert_eq!(a, b);
        assert_eq!(a.1, distinct.len() as u64);
    }
}
