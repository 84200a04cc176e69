//! What pages hold, and in which order copies of the same content stand.

use clap::ValueEnum;
use ksm_core::PAGE_SIZE;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::memory::Memory;

/// In which order the copies of a set of pages stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// The whole set, again and again: equal pages stand in long runs.
    #[value(name = "in-order")]
    Sequential,
    /// Eight neighbours of the set together, these groups shuffled.
    #[value(name = "runs-of-8")]
    RunsOf8,
    /// Every page anywhere.
    Shuffled,
}

impl Order {
    /// What each of `unique * copies` pages holds, by number.
    pub(crate) fn contents(self, unique: usize, copies: usize) -> Vec<usize> {
        let run = match self {
            Self::Sequential => unique * copies,
            Self::RunsOf8 => 8,
            Self::Shuffled => 1,
        };
        let in_order: Vec<usize> = (0..unique * copies).map(|page| page % unique).collect();
        let mut runs: Vec<&[usize]> = in_order.chunks(run).collect();
        runs.shuffle(&mut StdRng::seed_from_u64(1));
        runs.concat()
    }
}

/// Fills the page of a number: no two numbers give the same page, and none the
/// page of zeros.
pub(crate) fn fill(number: usize, page: &mut [u8; PAGE_SIZE]) {
    // Marsaglia's xorshift, from a start that is never 0.
    let mut x = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in page.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_ne_bytes());
    }
    page[..8].copy_from_slice(&(number as u64 + 1).to_ne_bytes());
}

/// Maps memory of pages of these numbers.
pub(crate) fn memory_of(contents: &[usize]) -> anyhow::Result<Memory> {
    let memory = Memory::map(contents.len())?;
    memory.no_huge_pages()?;
    let mut page = [0; PAGE_SIZE];
    for (at, &number) in contents.iter().enumerate() {
        fill(number, &mut page);
        memory.write(at, &page)?;
    }
    Ok(memory)
}
