//! What became of a page in a pass: normal results, counted, none of them an
//! error.

use std::fmt;
use std::ops::{Index, IndexMut};

/// What became of one page that a pass looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// It was not looked at yet.
    Unseen,
    /// It now maps a frame.
    Merged,
    /// It is now a zero page.
    Zeroed,
    /// It was merged or zero already.
    Unchanged,
    /// Its content was seen for the first time, or differs from the last pass.
    Volatile,
    /// No other page of the domain has its content.
    Unique,
    /// It was equal when it was looked at, but not once its writes were stopped.
    Raced,
    /// A device may be using it: the host says so, or a
    /// [`PinGuard`](crate::PinGuard) does.
    Pinned,
    /// Another process shares it since a fork.
    NotExclusive,
    /// It is part of a huge page, which this host cannot split.
    Huge,
    /// It is swapped out.
    Swapped,
    /// It was merged once, the guest wrote to it, and the region is not declared
    /// free of unannounced DMA, so it cannot be merged again safely.
    CopiedUnguarded,
    /// The process has no virtual memory area left for it.
    NoVmas,
    /// It would cost more virtual memory areas than the budget allows for what it
    /// saves ([`Config::max_vmas`](crate::Config::max_vmas)).
    VmaBudget,
    /// The host had no memory, or no frame was to be had.
    NoMemory,
    /// The host refused for another reason.
    Refused,
}

impl Outcome {
    /// Every outcome, in the order of its counter.
    pub const ALL: [Self; 16] = [
        Self::Unseen,
        Self::Merged,
        Self::Zeroed,
        Self::Unchanged,
        Self::Volatile,
        Self::Unique,
        Self::Raced,
        Self::Pinned,
        Self::NotExclusive,
        Self::Huge,
        Self::Swapped,
        Self::CopiedUnguarded,
        Self::NoVmas,
        Self::VmaBudget,
        Self::NoMemory,
        Self::Refused,
    ];

    /// The name of the outcome's counter.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unseen => "unseen",
            Self::Merged => "merged",
            Self::Zeroed => "zeroed",
            Self::Unchanged => "unchanged",
            Self::Volatile => "volatile",
            Self::Unique => "unique",
            Self::Raced => "raced",
            Self::Pinned => "pinned",
            Self::NotExclusive => "not_exclusive",
            Self::Huge => "huge",
            Self::Swapped => "swapped",
            Self::CopiedUnguarded => "copied_unguarded",
            Self::NoVmas => "no_vmas",
            Self::VmaBudget => "vma_budget",
            Self::NoMemory => "no_memory",
            Self::Refused => "refused",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A counter for each [`Outcome`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeCounts([u64; Outcome::ALL.len()]);

impl OutcomeCounts {
    /// Adds `other` to this.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }

    /// Each outcome with its count.
    pub fn iter(&self) -> impl Iterator<Item = (Outcome, u64)> {
        Outcome::ALL.into_iter().zip(self.0)
    }
}

impl Index<Outcome> for OutcomeCounts {
    type Output = u64;

    fn index(&self, outcome: Outcome) -> &u64 {
        &self.0[outcome as usize]
    }
}

impl IndexMut<Outcome> for OutcomeCounts {
    fn index_mut(&mut self, outcome: Outcome) -> &mut u64 {
        &mut self.0[outcome as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_stand_in_the_order_of_the_enum() {
        for (place, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(place, outcome as usize);
        }
    }
}
