//! How much was saved: whose it is, and when ([`Savings`]).

use std::time::Duration;

use ksm_core::page::bytes_in;
use ksm_core::{MemoryStats, Stats};

/// How much of the savings must be there for a run to count as settled, in
/// percent.
const SETTLED_PERCENT: u64 = 95;

/// A guest's part of what is saved of `all` memory: each page that maps a frame has
/// an equal part in it.
pub(crate) fn saved_bytes(mine: &MemoryStats, all: &Stats) -> u64 {
    let sharers = (all.pages_shared + all.pages_sharing).max(1);
    bytes_in(mine.ksm_zero_pages + mine.ksm_merging_pages * all.pages_sharing / sharers)
}

/// Savings over time.
#[derive(Debug, Default)]
pub(crate) struct Savings(Vec<(Duration, u64)>);

impl Savings {
    /// So many bytes are saved at this time.
    pub(crate) fn sample(&mut self, at: Duration, saved_bytes: u64) {
        self.0.push((at, saved_bytes));
    }

    /// When the savings first came to [`SETTLED_PERCENT`] of the most they ever
    /// came to; `None` if nothing was ever saved.
    pub(crate) fn seconds_to_settle(&self) -> Option<f64> {
        let most = self.0.iter().map(|(_, saved)| *saved).max()?;
        let enough = most / 100 * SETTLED_PERCENT;
        let first = self.0.iter().find(|(_, saved)| *saved >= enough);
        first.filter(|_| most > 0).map(|(at, _)| at.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settled_is_when_nearly_all_is_there() {
        let mut savings = Savings::default();
        assert_eq!(savings.seconds_to_settle(), None);
        savings.sample(Duration::from_secs(1), 0);
        assert_eq!(savings.seconds_to_settle(), None);
        for (second, saved) in [(2, 9_000), (3, 9_600), (4, 10_000), (5, 8_000)] {
            savings.sample(Duration::from_secs(second), saved);
        }
        assert_eq!(savings.seconds_to_settle(), Some(3.0));
    }
}
