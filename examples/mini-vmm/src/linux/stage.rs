//! [`Stage`]: several guests, of which all run, or one at a time.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

use super::gate::End;
use super::guest::LinuxGuest;

/// How often guests are looked at.
const GLANCE: Duration = Duration::from_millis(10);
/// How long one may take to boot. The slowest host that was tried, a processor in
/// full emulation, takes 15 seconds.
const BOOT_PATIENCE: Duration = Duration::from_secs(150);
/// How long a guest runs before it is another's turn, at most.
const TURN: Duration = Duration::from_secs(2);
/// How long one may take for a beat.
const BEAT_PATIENCE: Duration = Duration::from_secs(30);

/// The guests of a run. They are held whenever no method runs.
#[derive(Debug)]
pub(super) struct Stage {
    guests: Vec<LinuxGuest>,
    one_at_a_time: bool,
}

impl Stage {
    /// Guests that have not run yet.
    pub(super) const fn new(guests: Vec<LinuxGuest>, one_at_a_time: bool) -> Self {
        Self {
            guests,
            one_at_a_time,
        }
    }

    /// The guests.
    pub(super) fn guests(&self) -> &[LinuxGuest] {
        &self.guests
    }

    /// Guests that may run together: all, or each alone.
    fn groups(&self) -> impl Iterator<Item = &[LinuxGuest]> {
        let size = if self.one_at_a_time {
            1
        } else {
            self.guests.len()
        };
        self.guests.chunks(size)
    }

    /// Boots guests until each has shown that it is up. Returns how long each took.
    pub(super) fn boot(&self) -> anyhow::Result<Vec<Duration>> {
        let mut took = Vec::new();
        for group in self.groups() {
            let begin = Instant::now();
            let mut booted = vec![None; group.len()];
            run(group, || {
                for (guest, booted) in group.iter().zip(&mut booted) {
                    if booted.is_none() && guest.watch().has_booted() {
                        *booted = Some(begin.elapsed());
                    }
                }
                if booted.iter().all(Option::is_some) {
                    return Ok(true);
                }
                ensure!(
                    begin.elapsed() < BOOT_PATIENCE,
                    "after {} s a guest has not booted: --boot-marker is not on its console",
                    BOOT_PATIENCE.as_secs()
                );
                let gone = group.iter().find_map(LinuxGuest::ended);
                ensure!(
                    gone.is_none(),
                    "a guest ended before it had booted: {gone:?}"
                );
                Ok(false)
            })?;
            took.extend(booted.into_iter().flatten());
        }
        Ok(took)
    }

    /// Lets guests run for so long in all, or until all have ended. Calls `glance`
    /// all along.
    pub(super) fn perform(
        &self,
        time: Duration,
        mut glance: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let begin = Instant::now();
        let turn = match u32::try_from(self.groups().count()) {
            Ok(groups @ 2..) => TURN.min(time / groups),
            _ => time,
        };
        while begin.elapsed() < time && !all_ended(&self.guests) {
            for group in self.groups() {
                let since = Instant::now();
                run(group, || {
                    glance()?;
                    let over = since.elapsed() >= turn || begin.elapsed() >= time;
                    Ok(over || all_ended(group))
                })?;
            }
        }
        Ok(())
    }

    /// Lets each guest run for another few beats. Returns how many each has made.
    ///
    /// # Errors
    /// When one makes none for [`BEAT_PATIENCE`], or has ended.
    pub(super) fn beat(&self, times: u64) -> anyhow::Result<Vec<u64>> {
        let before: Vec<u64> = self.guests.iter().map(beats).collect();
        let mut made = Vec::new();
        for group in self.groups() {
            let begin = Instant::now();
            let done = made.len();
            run(group, || {
                let beats = group.iter().map(beats).zip(&before[done..]);
                let least = beats.map(|(now, before)| now - before).min();
                if least >= Some(times) {
                    return Ok(true);
                }
                let gone = group.iter().find_map(LinuxGuest::ended);
                if gone.is_some() || begin.elapsed() >= BEAT_PATIENCE {
                    bail!(
                        "a guest has not gone on: {} of {times} beats in {} s, end: {gone:?}",
                        least.unwrap_or(0),
                        begin.elapsed().as_secs()
                    );
                }
                Ok(false)
            })?;
            made.extend(group.iter().zip(&before[done..]).map(|(g, b)| beats(g) - b));
        }
        Ok(made)
    }
}

fn beats(guest: &LinuxGuest) -> u64 {
    guest.watch().beats()
}

fn all_ended(guests: &[LinuxGuest]) -> bool {
    guests.iter().all(|guest| guest.ended().is_some())
}

/// Lets guests run until `is_over` says so, then holds them, whatever came of it.
///
/// # Errors
/// Those of `is_over`, a guest that fails, or does not come back.
fn run(
    guests: &[LinuxGuest],
    mut is_over: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    guests.iter().for_each(LinuxGuest::resume);
    let over = loop {
        match is_over() {
            Ok(false) => sleep(GLANCE),
            Ok(true) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    for guest in guests {
        guest.pause()?;
    }
    for guest in guests {
        if let Some(End::Failed(why)) = guest.ended() {
            bail!("a guest failed: {why}");
        }
    }
    over
}
