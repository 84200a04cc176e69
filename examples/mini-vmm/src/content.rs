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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// A page of an image, known by its [`hash`].
    Image = 4,
}

/// What one page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PageSpec {
    /// How its words come about.
    pub(crate) kind: Kind,
    /// What they come from; not 0 in a stream. The hash of an image's page.
    pub(crate) key: u64,
    /// XORed into the last word of a stream. The hash that an image's page has
    /// once it is rewritten.
    pub(crate) tail: u64,
    /// What the counters hold. In an image's page, what is XORed into the words
    /// where others have counters.
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

    /// A page that holds `bytes`, and is rewritten by XORing `mask` into some of
    /// its words, then restored in the same way.
    pub(crate) fn image(bytes: &[u8; ksm_core::PAGE_SIZE], mask: u64) -> Self {
        let rewritten = words_of(bytes).enumerate().map(|(at, word)| {
            let is_changed = at % COUNTER_STRIDE == 0;
            if is_changed { word ^ mask } else { word }
        });
        Self {
            kind: Kind::Image,
            key: hash(words_of(bytes)),
            tail: hash(rewritten),
            counter: mask,
        }
    }

    /// The same page, but for its last byte, if `byte` is not 0.
    pub(crate) const fn with_last_byte(self, byte: u8) -> Self {
        Self {
            tail: (byte as u64) << 56,
            ..self
        }
    }

    /// The page's words, in order. Of an image's page they are not known.
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

    /// The first word that differs in `bytes`, a whole page; of an image's page,
    /// where only the hash can differ, the first of all.
    pub(crate) fn difference(self, bytes: &[u8; ksm_core::PAGE_SIZE]) -> Option<usize> {
        if self.kind == Kind::Image {
            return (hash(words_of(bytes)) != self.key).then_some(0);
        }
        self.words()
            .zip(words_of(bytes))
            .position(|(word, found)| word != found)
    }
}

fn words_of(bytes: &[u8; ksm_core::PAGE_SIZE]) -> impl Iterator<Item = u64> {
    let words = bytes.as_chunks::<8>().0.iter();
    words.map(|word| u64::from_le_bytes(*word))
}

/// What [`hash`] multiplies by: odd, so that no word's change is lost.
pub(crate) const HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// By how many bits it rotates then.
pub(crate) const HASH_ROTATE: u32 = 29;

/// What a guest knows an image's page by, at the speed of its memory. Each step
/// is a bijection of word and of state: a single word that differs is always
/// found, several are missed once in 2^64. The VMM compares bytes in the end.
pub(crate) fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, |state: u64, word| {
        let mixed = (state ^ word).wrapping_mul(HASH_FACTOR);
        mixed.rotate_left(HASH_ROTATE)
    })
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
    fn an_image_is_rewritten_and_restored_by_the_same_mask() {
        let original = bytes(PageSpec::stream(5));
        let spec = PageSpec::image(&original, 0xf0f0);
        assert_eq!(spec.difference(&original), None);
        let mut page = original;
        for at in 0..COUNTERS {
            let place = &mut page.as_chunks_mut::<8>().0[at * COUNTER_STRIDE];
            *place = (u64::from_le_bytes(*place) ^ 0xf0f0).to_le_bytes();
        }
        assert_eq!(spec.difference(&page), Some(0));
        assert_eq!(PageSpec::image(&page, 0xf0f0).tail, spec.key);
        assert_eq!(PageSpec::image(&page, 0xf0f0).key, spec.tail);
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
