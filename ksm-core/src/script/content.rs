//! What a page is filled with.

use std::fmt;
use std::str::FromStr;

use crate::backend::sim::pattern;
use crate::page::{PAGE_SIZE, PageBuf};

/// A page's content, by name: equal names are equal bytes, and different ones
/// different bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Content {
    /// Which pattern: 0 is all zeros.
    pub number: u32,
    /// What is added to the last byte.
    pub last: u8,
}

impl Content {
    /// The bytes.
    #[must_use]
    pub fn bytes(self) -> Box<PageBuf> {
        let mut page = pattern(self.number.into());
        let last = &mut page.bytes_mut()[PAGE_SIZE - 1];
        *last = last.wrapping_add(self.last);
        page
    }

    /// The content whose pattern is `n` further on.
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Self {
            number: self.number.wrapping_add(n),
            ..self
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.number, self.last) {
            (0, 0) => write!(f, "zero"),
            (number, 0) => write!(f, "c{number}"),
            (number, last) => write!(f, "c{number}.{last}"),
        }
    }
}

impl FromStr for Content {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is no content: zero, c7 or c7.1");
        if text == "zero" {
            return Ok(Self { number: 0, last: 0 });
        }
        let name = text.strip_prefix('c').ok_or_else(bad)?;
        let (number, last) = name.split_once('.').unwrap_or((name, "0"));
        Ok(Self {
            number: number.parse().map_err(|_| bad())?,
            last: last.parse().map_err(|_| bad())?,
        })
    }
}
