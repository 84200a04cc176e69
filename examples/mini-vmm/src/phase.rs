//! Lets all guests do something at once, each on a thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};

use crate::guest::{Guest, GuestSide};

/// How often the main thread looks at the guests.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);
/// After how long without a sign of life a guest is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `each` for every guest, and `glance` every [`GLANCE`] meanwhile, which
/// is told how many guests have ended. Returns when all have.
///
/// A guest that hangs cannot be brought back, so the process ends then, with
/// status 1.
pub(crate) fn run_guests(
    guests: &mut [Guest],
    sides: &[Arc<GuestSide>],
    each: impl Fn(&mut Guest) -> anyhow::Result<()> + Sync,
    mut glance: impl FnMut(usize) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    thread::scope(|scope| {
        let each = &each;
        let mut threads = Vec::new();
        for (index, guest) in guests.iter_mut().enumerate() {
            let thread = thread::Builder::new()
                .name(format!("guest-{index}"))
                .spawn_scoped(scope, move || each(guest))
                .context("cannot start a guest's thread")?;
            threads.push(thread);
        }
        let mut signs = SignsOfLife::new(sides);
        let mut glanced = Ok(());
        loop {
            let ended = threads.iter().filter(|thread| thread.is_finished()).count();
            // A failed glance must not keep guests from being waited for.
            let now = glance(ended);
            glanced = glanced.and(now);
            if ended == threads.len() {
                break;
            }
            let alive = |index: usize| !threads[index].is_finished();
            signs.check(sides, alive);
            thread::sleep(GLANCE);
        }
        for (index, thread) in threads.into_iter().enumerate() {
            thread
                .join()
                .map_err(|_| anyhow!("the thread of guest {index} panicked"))??;
        }
        glanced
    })
}

/// When each guest last carried out a command.
#[derive(Default)]
pub(crate) struct SignsOfLife(Vec<(u64, Instant)>);

impl SignsOfLife {
    fn new(sides: &[Arc<GuestSide>]) -> Self {
        let now = Instant::now();
        Self(sides.iter().map(|_| (u64::MAX, now)).collect())
    }

    /// Watches one more guest.
    pub(crate) fn watch(&mut self) {
        self.0.push((u64::MAX, Instant::now()));
    }

    pub(crate) fn check(&mut self, sides: &[Arc<GuestSide>], is_alive: impl Fn(usize) -> bool) {
        for (index, (side, (seen, at))) in sides.iter().zip(&mut self.0).enumerate() {
            let commands = side.commands.load(Ordering::Relaxed);
            if commands != *seen {
                (*seen, *at) = (commands, Instant::now());
            } else if is_alive(index) && at.elapsed() > PATIENCE {
                eprintln!(
                    "guest {index} has not come back for {} s: it hangs, most likely in a fault that nobody answers",
                    PATIENCE.as_secs()
                );
                std::process::exit(1);
            }
        }
    }
}
