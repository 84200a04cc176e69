//! [`Timeline`]: memory over time, as it is sampled through a run.

use std::time::{Duration, Instant};

/// The most samples that are kept. When there are so many, every second one goes,
/// and as many are left out from then on.
const MAX_SAMPLES: usize = 1024;

/// Memory at one moment, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Since the start of the run.
    pub(crate) at: Duration,
    /// What all guests and this program take, by the host's count.
    pub(crate) resident: u64,
    /// What is saved of each guest's memory; empty before they begin to work.
    pub(crate) saved: Vec<u64>,
}

/// Samples of a run, and what they are compared with.
#[derive(Debug)]
pub(crate) struct Timeline {
    start: Instant,
    samples: Vec<Sample>,
    /// Of how many samples one is kept, and how many came since the last one.
    every: u32,
    left_out: u32,
    /// What each guest takes by itself, and since when they are merged.
    guests: Vec<u64>,
    merging_since: Option<Duration>,
}

impl Timeline {
    /// Begins now.
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            samples: Vec::new(),
            every: 1,
            left_out: 0,
            guests: Vec::new(),
            merging_since: None,
        }
    }

    /// From now on there are guests that take so much, and are merged perhaps.
    pub(crate) fn begin_work(&mut self, guests: Vec<u64>, merged: bool) {
        self.guests = guests;
        self.merging_since = merged.then(|| self.start.elapsed());
    }

    /// So it is now. `last`: this one is kept in any case.
    pub(crate) fn sample(&mut self, resident: u64, saved: Vec<u64>, last: bool) {
        let at = self.start.elapsed();
        self.push(
            Sample {
                at,
                resident,
                saved,
            },
            last,
        );
    }

    fn push(&mut self, sample: Sample, last: bool) {
        self.left_out += 1;
        if self.left_out < self.every && !last {
            return;
        }
        self.left_out = 0;
        self.samples.push(sample);
        if self.samples.len() == MAX_SAMPLES {
            let mut nth = 0;
            self.samples.retain(|_| {
                nth += 1;
                nth % 2 == 0
            });
            self.every *= 2;
        }
    }

    /// In the order of time.
    pub(crate) fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// What each guest takes by itself, in bytes.
    pub(crate) fn guests(&self) -> &[u64] {
        &self.guests
    }

    /// When guests began to be merged.
    pub(crate) const fn merging_since(&self) -> Option<Duration> {
        self.merging_since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_sampled_to_its_end() {
        let mut timeline = Timeline::new();
        for second in 0..100_000 {
            let sample = Sample {
                at: Duration::from_secs(second),
                resident: second,
                saved: Vec::new(),
            };
            timeline.push(sample, second == 99_999);
        }
        let samples = timeline.samples();
        assert!((MAX_SAMPLES / 2..MAX_SAMPLES).contains(&samples.len()));
        assert_eq!(samples[samples.len() - 1].resident, 99_999);
        let gaps: Vec<_> = samples
            .windows(2)
            .map(|pair| pair[1].at - pair[0].at)
            .collect();
        let widest = gaps.iter().max().unwrap();
        assert!(
            gaps[1..gaps.len() - 1].iter().all(|gap| gap == widest),
            "{gaps:?}"
        );
    }
}
