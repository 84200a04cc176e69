//! The trees against sorted maps: one list of operations for the property tests,
//! for fuzzing and for replay.
//!
//! The first byte says which structure is meant ([`Structure`]), each
//! [`BYTES_PER_OP`] after it are a [`TreeOp`]. Another structure with keys gets a
//! variant there, and a function beside [`stable`], [`unstable`] and [`intervals`].

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;

use crate::fingerprint::{Digest, Fingerprint};
use crate::page::{FrameId, PageIndex, PageRange};
use crate::region::{AnonVmaId, IntervalTree, Place};
use crate::stable::{Found, StableTree};
use crate::unstable::UnstableTree;

/// Bytes that an operation is made from: always as many, so that leaving some
/// out leaves the other operations what they are.
pub const BYTES_PER_OP: usize = 3;

/// Fingerprints, and digests that each can come with: few, so that clashes
/// abound.
const FINGERPRINT_BITS: u32 = 6;
const DIGESTS: u8 = 3;

/// What is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// The stable tree: frames by fingerprint and digest.
    Stable,
    /// The unstable tree: pages by fingerprint, the first of each.
    Unstable,
    /// The interval tree of an anon_vma: regions by their pages.
    Intervals,
}

impl Structure {
    /// The structure that a byte chooses.
    #[must_use]
    pub const fn chosen_by(byte: u8) -> Self {
        match byte % 4 {
            0 | 2 => Self::Stable,
            1 => Self::Unstable,
            _ => Self::Intervals,
        }
    }
}

/// A key, by the numbers that it is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    fingerprint: u8,
    digest: u8,
}

impl Key {
    /// Spread over all shards, as real fingerprints are.
    fn fingerprint(self) -> Fingerprint {
        Fingerprint(u64::from(self.fingerprint).rotate_right(FINGERPRINT_BITS))
    }

    fn digest(self) -> Digest {
        Digest([self.digest; 16])
    }

    /// A range of pages: short ones and long ones that overlap.
    fn range(self) -> PageRange {
        let len = [1, 4, 30][usize::from(self.digest)];
        PageRange::new(PageIndex(self.fingerprint.into()), len)
    }
}

/// An operation on a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeOp {
    /// Puts something in, unless its key is taken.
    Put(Key),
    /// Looks a key up in every way that there is.
    Find(Key),
    /// Takes a key out.
    Take(Key),
    /// Makes shards for so many.
    Reshard(usize),
    /// A new pass: an unstable tree is emptied.
    Clear,
}

impl fmt::Display for TreeOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = |verb: &str, key: &Key| format!("{verb} {}.{}", key.fingerprint, key.digest);
        let line = match self {
            Self::Put(put) => key("put", put),
            Self::Find(find) => key("find", find),
            Self::Take(take) => key("take", take),
            Self::Reshard(expected) => format!("reshard {expected}"),
            Self::Clear => "clear".to_owned(),
        };
        f.write_str(&line)
    }
}

/// Makes operations of bytes.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<TreeOp> {
    let op = |chunk: &[u8]| {
        let byte = |at: usize| chunk.get(at).copied().unwrap_or(0);
        let key = Key {
            fingerprint: byte(1) % (1 << FINGERPRINT_BITS),
            digest: byte(2) % DIGESTS,
        };
        match byte(0) % 32 {
            0..=15 => TreeOp::Put(key),
            16..=21 => TreeOp::Find(key),
            22..=28 => TreeOp::Take(key),
            29..=30 => TreeOp::Reshard(usize::from(byte(1)) * 4),
            _ => TreeOp::Clear,
        }
    };
    bytes.chunks(BYTES_PER_OP).map(op).collect()
}

/// What `bytes` say, as text.
#[must_use]
pub fn script(bytes: &[u8]) -> String {
    let Some((&first, rest)) = bytes.split_first() else {
        return String::new();
    };
    let lines = decode(rest).into_iter().map(|op| format!("{op}\n"));
    let first = format!("{:?}\n", Structure::chosen_by(first));
    std::iter::once(first).chain(lines).collect()
}

/// Does what `bytes` say, with everything checked after every operation.
///
/// # Errors
/// What differs from the sorted map, and after which operation.
pub fn run(bytes: &[u8]) -> Result<(), String> {
    let Some((&first, rest)) = bytes.split_first() else {
        return Ok(());
    };
    let ops = decode(rest);
    match Structure::chosen_by(first) {
        Structure::Stable => stable(&ops),
        Structure::Unstable => unstable(&ops),
        Structure::Intervals => intervals(&ops),
    }
}

/// A demand that names the operation after which it is not met.
fn demand<T: PartialEq + fmt::Debug>(
    at: usize,
    what: &str,
    is: &T,
    must: &T,
) -> Result<(), String> {
    if is == must {
        return Ok(());
    }
    Err(format!(
        "operation {at}: {what} is {is:?}, and must be {must:?}"
    ))
}

type Frames = BTreeMap<(Fingerprint, Digest), FrameId>;

/// Runs `ops` on a stable tree.
///
/// # Errors
/// As [`run`].
pub fn stable(ops: &[TreeOp]) -> Result<(), String> {
    let tree = StableTree::new(1);
    let mut model = Frames::new();
    for (at, (op, number)) in ops.iter().zip(0..).enumerate() {
        match *op {
            TreeOp::Put(key) => {
                let (fingerprint, digest) = (key.fingerprint(), key.digest());
                let stands = tree.find_exact(fingerprint, &digest);
                let must = model.get(&(fingerprint, digest)).copied();
                demand(at, "the frame", &stands, &must)?;
                if stands.is_none() {
                    tree.insert(fingerprint, digest, FrameId(number));
                    model.insert((fingerprint, digest), FrameId(number));
                }
            }
            TreeOp::Find(key) => find(at, &tree, &model, key)?,
            TreeOp::Take(key) => {
                let (fingerprint, digest) = (key.fingerprint(), key.digest());
                let taken = tree.remove(fingerprint, &digest);
                let must = model.remove(&(fingerprint, digest));
                demand(at, "what was taken", &taken, &must)?;
                let left = tree.find_exact(fingerprint, &digest);
                demand(at, "what is left", &left, &None)?;
            }
            TreeOp::Reshard(expected) => tree.reshard(expected),
            TreeOp::Clear => {}
        }
        demand(at, "the check", &tree.check(), &Ok(()))?;
        demand(at, "the count", &tree.len(), &model.len())?;
    }
    let mut seen = Vec::new();
    tree.for_each(|fingerprint, digest, frame| seen.push(((fingerprint, *digest), frame)));
    let must: Vec<_> = model.into_iter().collect();
    demand(ops.len(), "the whole tree", &seen, &must)
}

fn find(at: usize, tree: &StableTree, model: &Frames, key: Key) -> Result<(), String> {
    let fingerprint = key.fingerprint();
    let all: Vec<_> = model
        .range((fingerprint, Digest([0; 16]))..=(fingerprint, Digest([u8::MAX; 16])))
        .collect();
    let must = match all[..] {
        [] => Found::None,
        [((_, digest), frame)] => Found::One(*frame, *digest),
        _ => Found::Many,
    };
    demand(at, "what is found", &tree.find(fingerprint), &must)?;
    for ((_, digest), frame) in all {
        let found = tree.digest_of(fingerprint, *frame);
        demand(at, "the digest", &found, &Some(*digest))?;
    }
    let stranger = tree.digest_of(fingerprint, FrameId(u32::MAX));
    demand(at, "a stranger's digest", &stranger, &None)
}

/// Runs `ops` on an unstable tree, which knows no digests.
///
/// # Errors
/// As [`run`].
pub fn unstable(ops: &[TreeOp]) -> Result<(), String> {
    let tree = UnstableTree::new(8);
    let mut model = BTreeMap::new();
    for (at, (op, page)) in ops.iter().zip(0..).enumerate() {
        let item = Place::new(AnonVmaId(1), PageIndex(page));
        match *op {
            TreeOp::Put(key) | TreeOp::Find(key) => {
                let fingerprint = key.fingerprint();
                let stands = tree.find_or_insert(fingerprint, item);
                let must = model.get(&fingerprint).copied();
                demand(at, "the page", &stands, &must)?;
                model.entry(fingerprint).or_insert(item);
            }
            TreeOp::Take(key) => {
                let fingerprint = key.fingerprint();
                let taken = tree.remove(fingerprint);
                demand(at, "what was taken", &taken, &model.remove(&fingerprint))?;
            }
            TreeOp::Reshard(expected) => tree.reshard(expected),
            TreeOp::Clear => {
                tree.clear();
                model.clear();
            }
        }
        demand(at, "the check", &tree.check(), &Ok(()))?;
        demand(at, "the count", &tree.len(), &model.len())?;
    }
    Ok(())
}

/// Runs `ops` on an interval tree, which may hold one range many times.
///
/// # Errors
/// As [`run`].
pub fn intervals(ops: &[TreeOp]) -> Result<(), String> {
    let mut tree = IntervalTree::default();
    // In the order of the tree: by where ranges begin, then by their numbers.
    let mut model: BTreeMap<(PageIndex, u32), PageRange> = BTreeMap::new();
    for (at, (op, number)) in ops.iter().zip(0..).enumerate() {
        match *op {
            TreeOp::Put(key) => {
                tree.insert(key.range(), number);
                model.insert((key.range().start, number), key.range());
            }
            TreeOp::Find(key) => overlapping(at, &tree, &model, key.range())?,
            TreeOp::Take(key) => {
                let mut entries = model.iter();
                let first = entries.find(|(_, range)| **range == key.range());
                let value = first.map_or(u32::MAX, |(&(_, value), _)| value);
                let removed = tree.remove(key.range(), value);
                let stood = model.remove(&(key.range().start, value)).is_some();
                demand(at, "whether it was there", &removed, &stood)?;
            }
            TreeOp::Reshard(_) => {}
            TreeOp::Clear => {
                for ((_, value), range) in std::mem::take(&mut model) {
                    demand(at, "a range", &tree.remove(range, value), &true)?;
                }
            }
        }
        demand(at, "the check", &tree.check(), &Ok(()))?;
        demand(at, "the count", &tree.len(), &model.len())?;
    }
    let all = PageRange::new(PageIndex(0), 1 << 20);
    overlapping(ops.len(), &tree, &model, all)
}

/// All that overlap `range`, found at once and found one after the other.
fn overlapping(
    at: usize,
    tree: &IntervalTree<u32>,
    model: &BTreeMap<(PageIndex, u32), PageRange>,
    range: PageRange,
) -> Result<(), String> {
    let overlaps = |(_, other): &(_, &PageRange)| !range.intersection(**other).is_empty();
    let must: Vec<_> = model.iter().filter(overlaps).collect();
    let must: Vec<_> = must
        .iter()
        .map(|((_, value), range)| (**range, *value))
        .collect();
    let mut found = Vec::new();
    let visits = tree.overlapping(range, None, |range, value| {
        found.push((range, value));
        ControlFlow::Continue(())
    });
    demand(at, "what overlaps", &found, &must)?;
    demand(at, "the visits", &visits.intervals, &(must.len() as u64))?;
    let (mut after, mut one_by_one) = (None, Vec::new());
    loop {
        let before = one_by_one.len();
        tree.overlapping(range, after, |range, value| {
            one_by_one.push((range, value));
            ControlFlow::Break(())
        });
        if one_by_one.len() == before {
            break;
        }
        after = one_by_one
            .last()
            .map(|(range, value)| (range.start, *value));
    }
    demand(at, "what follows one another", &one_by_one, &must)
}
