//! What the benchmarks share.
//!
//! `cargo bench -p ksm-benches` measures; with `-- --test` each runs once. Times
//! belong to the machine they were taken on: compare those of one run.
#![forbid(unsafe_code)]

use ksm_core::page::PageBuf;

/// Numbers that look random and are the same in every run (splitmix64:
/// Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Numbers(pub u64);

impl Iterator for Numbers {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(z ^ (z >> 31))
    }
}

/// `count` pages of such numbers.
#[must_use]
pub fn pages(count: usize) -> Vec<Box<PageBuf>> {
    let mut numbers = Numbers(1);
    let page = |_| {
        let mut page = PageBuf::zeroed();
        for (word, number) in page.bytes_mut().chunks_mut(8).zip(&mut numbers) {
            word.copy_from_slice(&number.to_ne_bytes());
        }
        page
    };
    (0..count).map(page).collect()
}
