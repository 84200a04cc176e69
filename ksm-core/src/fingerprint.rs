//! What a page's content is known by: a [`Fingerprint`] and a [`Digest`].
//!
//! Neither decides that two pages are equal, bytes compared with writes stopped
//! do; and no guest is ever told one. Still a guest that could predict
//! fingerprints could make its pages collide with another's, and read from the
//! time a pass takes what that other guest holds. So both are keyed with secrets
//! that each trust domain draws for itself.

use std::fmt;
use std::io;

use xxhash_rust::xxh3::xxh3_64_with_secret;

use crate::error::BackendError;
use crate::page::PageBuf;

/// xxh3 over a page: says whether its content changed since the last pass, and
/// is its key in both trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Fingerprint(pub(crate) u64);

/// Keyed BLAKE3 over a page, cut to 128 bits: the identity of a frame. At a
/// tenth of xxh3's speed it is taken only of pages that have a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Digest(pub(crate) [u8; 16]);

impl Digest {
    /// The first of all digests in order.
    pub(crate) const MIN: Self = Self([0; 16]);
}

/// Length of an xxh3 secret: that of the built-in one, which its authors chose
/// so that no 64-byte stripe of a 1 KiB block meets the same key bytes in the
/// same place twice (136 is the least it accepts).
const SECRET_LEN: usize = 192;

/// The secrets of one trust domain.
///
/// xxh3 gets a whole secret, expanded from 256 random bits, and not a seed: a
/// seed only adds 64 bits to a secret that is published, so that one fingerprint
/// found out by whatever means would give away all others to a search done at
/// leisure.
pub(crate) struct Keys {
    secret: [u8; SECRET_LEN],
    digest_key: [u8; blake3::KEY_LEN],
    zero: Fingerprint,
}

impl Keys {
    /// Keys made from `seed`, or drawn from the host's random numbers.
    ///
    /// # Errors
    /// When the host has none to give.
    pub(crate) fn new(seed: Option<[u8; 32]>) -> Result<Self, BackendError> {
        match seed {
            Some(seed) => Ok(Self::from_seed(seed)),
            None => Self::random().map_err(|source| BackendError::Host {
                call: "getrandom",
                source,
            }),
        }
    }

    /// Keys drawn from the host's random numbers.
    ///
    /// # Errors
    /// When the host has none to give.
    fn random() -> io::Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed)?;
        Ok(Self::from_seed(seed))
    }

    /// Keys that follow from `seed`, so that a test can be repeated.
    pub(crate) fn from_seed(seed: [u8; 32]) -> Self {
        let mut secret = [0; SECRET_LEN];
        blake3::Hasher::new_derive_key("ksm-core 2025-11-30 xxh3 secret of a trust domain")
            .update(&seed)
            .finalize_xof()
            .fill(&mut secret);
        let digest_key =
            blake3::derive_key("ksm-core 2025-11-30 digest key of a trust domain", &seed);
        let mut keys = Self {
            secret,
            digest_key,
            zero: Fingerprint(0),
        };
        keys.zero = keys.fingerprint(&PageBuf::zeroed());
        keys
    }

    /// The fingerprint of a page.
    pub(crate) fn fingerprint(&self, page: &PageBuf) -> Fingerprint {
        Fingerprint(xxh3_64_with_secret(page.bytes(), &self.secret))
    }

    /// The fingerprint of a page of zeros. Another page may have it too.
    pub(crate) const fn zero_fingerprint(&self) -> Fingerprint {
        self.zero
    }

    /// The digest of a page.
    pub(crate) fn digest(&self, page: &PageBuf) -> Digest {
        let mut digest = [0; 16];
        blake3::Hasher::new_keyed(&self.digest_key)
            .update(page.bytes())
            .finalize_xof()
            .fill(&mut digest);
        Digest(digest)
    }
}

/// Says nothing: the keys must not end up in a log.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::page::PAGE_SIZE;

    fn page(fill: u8) -> Box<PageBuf> {
        let mut page = PageBuf::zeroed();
        page.bytes_mut().fill(fill);
        page
    }

    #[test]
    fn every_byte_of_a_page_counts() {
        let keys = Keys::from_seed([1; 32]);
        let mut seen = HashSet::from([(keys.zero_fingerprint(), keys.digest(&page(0)))]);
        for at in 0..PAGE_SIZE {
            let mut page = page(0);
            page.bytes_mut()[at] = 1;
            let (fingerprint, digest) = (keys.fingerprint(&page), keys.digest(&page));
            assert!(
                seen.iter().all(|&(f, d)| f != fingerprint && d != digest),
                "byte {at}"
            );
            seen.insert((fingerprint, digest));
        }
    }

    #[test]
    fn a_seed_gives_the_same_keys_again_and_another_seed_gives_others() {
        let page = page(0xcc);
        let [a, again, b] = [[1; 32], [1; 32], [2; 32]].map(Keys::from_seed);
        assert_eq!(a.fingerprint(&page), again.fingerprint(&page));
        assert_eq!(a.digest(&page), again.digest(&page));
        assert_eq!(a.zero_fingerprint(), a.fingerprint(&PageBuf::zeroed()));
        assert_ne!(a.fingerprint(&page), b.fingerprint(&page));
        assert_ne!(a.digest(&page), b.digest(&page));
        assert_ne!(a.zero_fingerprint(), b.zero_fingerprint());
    }

    #[test]
    fn random_keys_differ_and_keep_their_secret() {
        let [a, b] = [(), ()].map(|()| Keys::random().unwrap());
        assert_ne!(a.fingerprint(&page(7)), b.fingerprint(&page(7)));
        assert_ne!(a.digest(&page(7)), b.digest(&page(7)));
        assert_eq!(format!("{a:?}"), "Keys { .. }");
    }
}
