//! [`MemSize`]: how much memory, as people write it.

use std::str::FromStr;

use ksm_core::page::{PAGE_SIZE_U64, pages_in};

use crate::layout::MAX_WORK_BYTES;

/// A number of bytes: whole pages, not more than a guest can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemSize(u64);

impl MemSize {
    /// In pages.
    pub(crate) const fn pages(self) -> u64 {
        pages_in(self.0)
    }
}

impl FromStr for MemSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, shift) = match text.char_indices().next_back() {
            Some((at, 'K' | 'k')) => (&text[..at], 10),
            Some((at, 'M' | 'm')) => (&text[..at], 20),
            Some((at, 'G' | 'g')) => (&text[..at], 30),
            _ => (text, 0),
        };
        let number: u64 = digits
            .parse()
            .map_err(|_| "expected a number with K, M or G behind it, such as 128M".to_owned())?;
        let bytes = number.saturating_mul(1 << shift);
        if !(MIN_BYTES..=MAX_WORK_BYTES).contains(&bytes) {
            return Err("expected 1M to 64G".to_owned());
        }
        if !bytes.is_multiple_of(PAGE_SIZE_U64) {
            return Err(format!("expected a multiple of {PAGE_SIZE_U64}"));
        }
        Ok(Self(bytes))
    }
}

/// The least memory of a guest.
const MIN_BYTES: u64 = 1 << 20;
