//! [`ScannerThread`]: ksmd for an engine.

mod pace;
mod watch;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use ksm_core::Ksm;
use ksm_core::backend::Backend;

use crate::trace;

pub use pace::Pacing;
use pace::{Pace, StopSignal};
use watch::ThreadWatch;
pub use watch::Watch;

/// The least a scanner rests when there was nothing to scan, or scanning
/// failed.
const IDLE_PAUSE: Duration = Duration::from_millis(20);
/// How long a scanner that ended is rested before another takes its place.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// What is called on every scanning thread first.
type Prepare = Arc<dyn Fn() + Send + Sync>;

/// How a [`ScannerThread`] works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScannerOptions {
    /// How fast it scans at first.
    pub pacing: Pacing,
    /// How often a scanner that panicked or died is replaced by another.
    pub restarts: u32,
}

/// What has become of a scanner thread.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// It scans, or sleeps between two scans.
    Running,
    /// It was told to stop, and has.
    Stopped,
    /// A pass panicked, or what was to be called before the first
    /// ([`ScannerThread::start_with`]). The engine has put everything back; nothing is
    /// stopped.
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// The thread went away without unwinding: it was killed. What it had under
    /// way was ended by [`Ksm::recover`].
    Died {
        /// How many leases it held.
        leases: u64,
    },
    /// Another thread could not be started in its place.
    NotRestarted {
        /// Why.
        reason: String,
    },
}

/// What a scanner has done so far, over all restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Pages looked at.
    pub pages_scanned: u64,
    /// Calls of [`Ksm::scan`] that failed. The scanner goes on after each.
    pub errors: u64,
    /// The last error.
    pub last_error: Option<String>,
    /// How often a thread was started in place of one that panicked or died.
    pub restarts: u32,
}

/// A thread that scans, and one that watches it.
///
/// Each scan is one call of [`Ksm::scan`], so it is told to stop between two of
/// them. The watching thread sleeps until the scanner has ended, in whatever
/// way. Dropping this stops both, as [`ScannerThread::stop`] does: what is merged
/// stays merged.
#[derive(Debug)]
pub struct ScannerThread {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    stop: StopSignal,
    pace: Pace,
    state: Mutex<State>,
    pages_scanned: AtomicU64,
}

#[derive(Debug)]
struct State {
    status: Status,
    watch: Watch,
    tally: Tally,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ScannerThread {
    /// Starts to scan.
    ///
    /// # Errors
    /// When the host gives no thread or file descriptor.
    pub fn start<B: Backend>(ksm: Arc<Ksm<B>>, options: ScannerOptions) -> io::Result<Self> {
        Self::start_with(ksm, options, || {})
    }

    /// Starts to scan, after having called `prepare` on the scanning thread: to
    /// set its CPU affinity or priority, say. It is called again on every
    /// thread that takes its place.
    ///
    /// # Errors
    /// As [`ScannerThread::start`].
    pub fn start_with<B: Backend>(
        ksm: Arc<Ksm<B>>,
        options: ScannerOptions,
        prepare: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let prepare: Prepare = Arc::new(prepare);
        let shared = Arc::new(Shared {
            stop: StopSignal::new()?,
            pace: Pace::new(options.pacing),
            state: Mutex::new(State {
                status: Status::Running,
                watch: Watch::Unavailable("not started yet".to_owned()),
                tally: Tally::default(),
            }),
            pages_scanned: AtomicU64::new(0),
        });
        trace::scanner_started(0);
        let mut first = Scanner::spawn(&ksm, &shared, &prepare)?;
        shared.state().watch = first.watch();
        let watched = Arc::clone(&shared);
        let watcher = Builder::new().name("ksm-watch".to_owned()).spawn(move || {
            let mut left = options.restarts;
            loop {
                let status = first.wait(&ksm);
                trace::scanner_ended(&status);
                let wanted = !matches!(status, Status::Stopped) && left > 0;
                watched.state().status = status;
                if !wanted || watched.stop.wait(RESTART_PAUSE) {
                    return;
                }
                left -= 1;
                trace::scanner_started(options.restarts - left);
                {
                    // Said before it runs: what it does is seen at once.
                    let mut state = watched.state();
                    state.status = Status::Running;
                    state.tally.restarts += 1;
                }
                match Scanner::spawn(&ksm, &watched, &prepare) {
                    Ok(next) => first = next,
                    Err(error) => {
                        let reason = error.to_string();
                        let status = Status::NotRestarted { reason };
                        trace::scanner_ended(&status);
                        let mut state = watched.state();
                        state.status = status;
                        state.tally.restarts -= 1;
                        return;
                    }
                }
                watched.state().watch = first.watch();
            }
        });
        match watcher {
            Ok(watcher) => Ok(Self {
                shared,
                watcher: Some(watcher),
            }),
            Err(error) => {
                shared.stop.give();
                Err(error)
            }
        }
    }

    /// What has become of the scanner.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.state().status.clone()
    }

    /// Whether its death without unwinding would be noticed.
    #[must_use]
    pub fn watch(&self) -> Watch {
        self.shared.state().watch.clone()
    }

    /// What it has done so far.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = self.shared.state().tally.clone();
        tally.pages_scanned = self.shared.pages_scanned.load(Ordering::Relaxed);
        tally
    }

    /// Changes how fast it scans, from the next scan on.
    pub fn set_pacing(&self, pacing: Pacing) {
        self.shared.pace.set(pacing);
    }

    /// How fast it scans.
    #[must_use]
    pub fn pacing(&self) -> Pacing {
        self.shared.pace.get()
    }

    /// Stops it once the scan under way is over, waits for that, and says how
    /// it ended. Where the death of a thread cannot be noticed ([`Watch`]) and
    /// the scanner was killed, this waits for ever.
    pub fn stop(mut self) -> Status {
        self.end();
        self.status()
    }

    fn end(&mut self) {
        self.shared.stop.give();
        if let Some(watcher) = self.watcher.take() {
            // It cannot have panicked but by running out of memory.
            let _ = watcher.join();
        }
    }
}

impl Drop for ScannerThread {
    fn drop(&mut self) {
        self.end();
    }
}

/// A thread that scans, seen from the thread that watches it.
struct Scanner {
    thread: JoinHandle<()>,
    watch: Result<ThreadWatch, String>,
    ended: Receiver<Status>,
}

impl Scanner {
    fn spawn<B: Backend>(
        ksm: &Arc<Ksm<B>>,
        shared: &Arc<Shared>,
        prepare: &Prepare,
    ) -> io::Result<Self> {
        let (started, start) = channel();
        let (end, ended) = channel();
        let (ksm, shared) = (Arc::clone(ksm), Arc::clone(shared));
        let prepare = Arc::clone(prepare);
        let thread = Builder::new().name("ksm-scan".to_owned()).spawn(move || {
            let watch = ThreadWatch::on_this_thread().map_err(|error| error.to_string());
            // Whoever started this thread waits for it.
            let _ = started.send(watch);
            // The engine puts everything back while it unwinds, so it can be used
            // after a panic.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                prepare();
                scan_until_told(&ksm, &shared)
            }));
            let ended = ended.unwrap_or_else(|panic| Status::Panicked {
                message: panic_message(panic.as_ref()),
            });
            report_end(&end, ended);
        })?;
        let watch = start
            .recv()
            .map_err(|_| io::Error::other("the scanner thread did not come up"))?;
        Ok(Self {
            thread,
            watch,
            ended,
        })
    }

    fn watch(&self) -> Watch {
        match &self.watch {
            Ok(_) => Watch::Watched,
            Err(reason) => Watch::Unavailable(reason.clone()),
        }
    }

    /// Waits for the thread's end, and cleans up behind it.
    fn wait<B: Backend>(&self, ksm: &Ksm<B>) -> Status {
        let ended = match &self.watch {
            Ok(watch) => {
                watch.wait();
                self.ended.try_recv().ok()
            }
            Err(_) => self.ended.recv().ok(),
        };
        ended.unwrap_or_else(|| Status::Died {
            leases: ksm.recover(self.thread.thread().id()),
        })
    }
}

fn report_end(end: &Sender<Status>, status: Status) {
    // The watcher waits for it; if it is gone, nobody wants to know.
    let _ = end.send(status);
}

/// The scanner's loop.
fn scan_until_told<B: Backend>(ksm: &Ksm<B>, shared: &Shared) -> Status {
    loop {
        let pacing = shared.pace.get();
        let mut pause = Duration::from_millis(u64::from(pacing.sleep_millisecs));
        match ksm.scan(u64::from(pacing.pages_to_scan)) {
            Ok(report) => {
                let pages = report.pages_scanned;
                shared.pages_scanned.fetch_add(pages, Ordering::Relaxed);
                if report.busy || pages == 0 {
                    pause = pause.max(IDLE_PAUSE);
                }
            }
            Err(error) => {
                let error = error.to_string();
                let again = {
                    let tally = &mut shared.state().tally;
                    tally.errors += 1;
                    tally.last_error.replace(error.clone()).as_ref() == Some(&error)
                };
                trace::scan_failed(&error, again);
                pause = pause.max(IDLE_PAUSE);
            }
        }
        if shared.stop.wait(pause) {
            return Status::Stopped;
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without words").to_owned()
}
