//! [`Burners`]: threads that only burn CPU time.
//!
//! They are a process of their own. In the process whose memory is merged they would
//! do more: whoever changes a mapping there interrupts every processor that runs one
//! of its threads.

use std::hint::black_box;
use std::io::{Read as _, Write as _, stdin, stdout};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::Instant;

use anyhow::Context as _;

use crate::cpu;

/// The first argument of such a process. How many threads follows, and the part of
/// its time that each burns.
const ARGUMENT: &str = "--burn-until-end-of-input";
/// Multiplications in a row: some tens of microseconds.
const BURST: u32 = 20_000;
/// Less than that cannot be kept to.
const LEAST_DUTY: f64 = 0.01;

/// Burns for as long as it lives.
#[derive(Debug)]
pub(super) struct Burners(Child);

impl Burners {
    /// Starts `threads` threads that burn so much of their time each.
    pub(super) fn start(threads: u32, duty: f64) -> anyhow::Result<Self> {
        let child = Command::new("/proc/self/exe")
            .args([ARGUMENT, &threads.to_string(), &duty.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the process that burns CPU time")?;
        let mut burners = Self(child);
        let pipe = burners.0.stdout.as_mut().expect("asked for a pipe");
        pipe.read_exact(&mut [0])
            .context("the process that burns CPU time has not come up")?;
        Ok(burners)
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It has nothing to say.
        let _ = self.0.wait();
    }
}

/// In a process that is to burn, does so. `None` in any other.
pub(crate) fn serve_if_asked() -> Option<ExitCode> {
    let mut args = std::env::args().skip(1);
    if args.next()? != ARGUMENT {
        return None;
    }
    let threads: u32 = args.next()?.parse().ok()?;
    let duty: f64 = args.next()?.parse().ok()?;
    let stop = AtomicBool::new(false);
    scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| burn(duty, &stop));
        }
        let ready = stdout().write_all(b"\n").and_then(|()| stdout().flush());
        // Until whoever started it has gone, however that went.
        let ended = stdin().read_to_end(&mut Vec::new());
        stop.store(true, Ordering::Relaxed);
        Some(match ready.and(ended) {
            Ok(_) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        })
    })
}

fn burn(duty: f64, stop: &AtomicBool) {
    let (began, cpu) = (Instant::now(), cpu::of_thread());
    let mut x = 1_u64;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..BURST {
            x = black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        if duty < 1.0 {
            let due = (cpu::of_thread() - cpu).div_f64(duty.max(LEAST_DUTY));
            sleep(due.saturating_sub(began.elapsed()));
        }
    }
}
