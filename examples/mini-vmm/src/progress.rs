//! [`Progress`]: what is going on, as it goes on.

use std::io::{IsTerminal as _, stderr};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use ksm_core::Stats;

use crate::report::GuestReport;
use crate::usage::cpu_time;

/// How often lines on a terminal change.
const REDRAW: Duration = Duration::from_millis(500);
/// How often plain lines are printed.
const PLAIN: Duration = Duration::from_secs(5);

/// A line for each guest and one for the engine, on standard error: in place on
/// a terminal, otherwise anew every few seconds.
pub(crate) struct Progress {
    lines: Option<(MultiProgress, Vec<ProgressBar>)>,
    interval: Duration,
    last: Mark,
    start: Instant,
    seconds: u32,
}

/// What rates are counted from.
struct Mark {
    at: Instant,
    cpu: Duration,
    scanned: u64,
}

impl Progress {
    /// Nothing is shown yet.
    pub(crate) fn new(guests: usize, seconds: u32) -> Self {
        let terminal = stderr().is_terminal();
        let lines = terminal.then(|| {
            let all = MultiProgress::new();
            let style = ProgressStyle::with_template("{msg}").expect("a template without mistakes");
            let bars = (0..=guests)
                .map(|_| all.add(ProgressBar::new_spinner().with_style(style.clone())))
                .collect();
            (all, bars)
        });
        let now = Instant::now();
        Self {
            lines,
            interval: if terminal { REDRAW } else { PLAIN },
            last: Mark {
                at: now,
                cpu: cpu_time(),
                scanned: 0,
            },
            start: now,
            seconds,
        }
    }

    /// Whether it is time for [`Progress::show`].
    pub(crate) fn is_due(&self) -> bool {
        self.last.at.elapsed() >= self.interval
    }

    /// Shows how things stand.
    pub(crate) fn show(
        &mut self,
        guests: &[GuestReport],
        further: Option<String>,
        stats: Option<&Stats>,
    ) {
        let mut texts: Vec<String> = guests.iter().map(GuestReport::line).collect();
        texts.extend(further);
        texts.push(self.engine_line(stats));
        match &self.lines {
            Some((_, bars)) => {
                for (bar, text) in bars.iter().zip(texts) {
                    bar.set_message(text);
                    bar.tick();
                }
            }
            None => texts.iter().for_each(|text| eprintln!("{text}")),
        }
    }

    fn engine_line(&mut self, stats: Option<&Stats>) -> String {
        let now = Mark {
            at: Instant::now(),
            cpu: cpu_time(),
            scanned: stats.map_or(0, |stats| stats.pages_scanned),
        };
        let span = (now.at - self.last.at).as_secs_f64().max(0.001);
        let cpu = (now.cpu.saturating_sub(self.last.cpu)).as_secs_f64() / span;
        let passed = self.start.elapsed().as_secs();
        let mut text = format!(
            "{passed:>4} of {} s, CPU {:>3.0}%",
            self.seconds,
            cpu * 100.0
        );
        if let Some(stats) = stats {
            let pages = now.scanned.saturating_sub(self.last.scanned);
            #[allow(clippy::cast_precision_loss, reason = "shown with no decimals")]
            let rate = pages as f64 / span;
            text += &format!(
                ", {rate:.0} pages/s scanned, pass {}, {} pages in {} frames, {} zero, {} saved",
                stats.full_scans,
                stats.pages_shared + stats.pages_sharing,
                stats.pages_shared,
                stats.ksm_zero_pages,
                indicatif::BinaryBytes(stats.saved_bytes()),
            );
        }
        self.last = now;
        text
    }

    /// Leaves the last lines where they are.
    pub(crate) fn finish(self) {
        for bar in self.lines.iter().flat_map(|(_, bars)| bars) {
            bar.abandon();
        }
    }
}
