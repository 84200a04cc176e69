//! What a page holds: the generator that guests and their VMM share.
//!
//! The payload computes the same words in the guest; `payload`'s tests hold the
//! two together.

/// Words of 8 bytes in a page.
pub(crate) const WORDS: usize = ksm_core::PAGE_SIZE / 8;
/// Counters in a rewritten page.
pub(crate) const COUNTERS: usize = 8;
/// Words from one counter of a rewritten page to the next: the first is the
/// page's first word, the last its last.
pub(crate) const COUNTER_STRIDE: usize = (WORDS - 1) / (COUNTERS - 1);

const _: () = assert!(COUNTER_STRIDE * (COUNTERS - 1) == WORDS - 1);

/// How a page's words come about. The numbers stand in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    /// Unknown: the guest neither writes nor checks it.
    Skip = 0,
    /// Every word is the key.
    Repeat = 1,
    /// A stream of random words that starts from the key.
    Stream = 2,
    /// The same, with counters in it that are incremented again and again.
    Lockstep = 3,
}

/// What one page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageSpec {
    /// How its words come about.
    pub(crate) kind: Kind,
    /// What they come from; not 0 in a stream.
    pub(crate) key: u64,
    /// XORed into the last word of a stream.
    pub(crate) tail: u64,
    /// What the counters hold.
    pub(crate) counter: u64,
}

impl PageSpec {
    /// A page of zeros.
    pub(crate) const ZERO: Self = Self::repeat(0);

    /// A page that is one word over and over.
    pub(crate) const fn repeat(key: u64) -> Self {
        Self {
            kind: Kind::Repeat,
            key,
            tail: 0,
            counter: 0,
        }
    }

    /// A page of random words.
    pub(crate) const fn stream(key: u64) -> Self {
        Self {
            kind: Kind::Stream,
            key,
            tail: 0,
            counter: 0,
        }
    }

    /// A page of random words and counters that stand at 0.
    pub(crate) const fn lockstep(key: u64) -> Self {
        Self {
            kind: Kind::Lockstep,
            ..Self::stream(key)
        }
    }

    /// The same page, but for its last byte, if `byte` is not 0.
    pub(crate) const fn with_last_byte(self, byte: u8) -> Self {
        Self {
            tail: (byte as u64) << 56,
            ..self
        }
    }

    /// The page's words, in order.
    pub(crate) fn words(self) -> impl Iterator<Item = u64> {
        let mut x = self.key;
        (0..WORDS).map(move |at| {
            if self.kind == Kind::Repeat {
                return self.key;
            }
            x = step(x);
            if self.kind == Kind::Lockstep && at % COUNTER_STRIDE == 0 {
                return self.counter;
            }
            if at + 1 == WORDS { x ^ self.tail } else { x }
        })
    }

    /// The first word that differs in `bytes`, a whole page.
    pub(crate) fn difference(self, bytes: &[u8; ksm_core::PAGE_SIZE]) -> Option<usize> {
        let found = bytes.as_chunks::<8>().0;
        self.words()
            .zip(found)
            .position(|(word, bytes)| word != u64::from_le_bytes(*bytes))
    }
}

/// The next word of a stream: xorshift64 (Marsaglia, "Xorshift RNGs", 2003).
pub(crate) const fn step(mut x: u64) -> u64 {
    x ^= x << 13;
    x ^= x >> 7;
    x ^ (x << 17)
}

/// A stream's key, never 0, from what it is to depend on (`SplitMix64`).
pub(crate) fn key(of: [u64; 3]) -> u64 {
    let mixed = of.into_iter().fold(0u64, |seed, part| {
        let mut z = (seed ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    });
    mixed | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(spec: PageSpec) -> [u8; ksm_core::PAGE_SIZE] {
        let mut page = [0; ksm_core::PAGE_SIZE];
        for (place, word) in page.as_chunks_mut::<8>().0.iter_mut().zip(spec.words()) {
            *place = word.to_le_bytes();
        }
        page
    }

    #[test]
    fn a_last_byte_is_the_only_difference() {
        let page = PageSpec::stream(key([1, 2, 3]));
        let near = bytes(page.with_last_byte(5));
        assert_eq!(page.difference(&near), Some(WORDS - 1));
        assert_eq!(page.difference(&bytes(page)), None);
        let differing: Vec<_> = (0..near.len())
            .filter(|&i| near[i] != bytes(page)[i])
            .collect();
        assert_eq!(differing, [ksm_core::PAGE_SIZE - 1]);
    }

    #[test]
    fn counters_stand_in_first_and_last_word() {
        let page = PageSpec {
            counter: 7,
            ..PageSpec::lockstep(9)
        };
        let words: Vec<_> = page.words().collect();
        assert_eq!((words[0], words[WORDS - 1]), (7, 7));
        assert_eq!(words.iter().filter(|&&word| word == 7).count(), COUNTERS);
    }
}
