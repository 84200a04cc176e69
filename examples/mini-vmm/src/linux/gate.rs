//! [`Gate`]: lets a guest's vCPUs go, holds them, and knows when all are held.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;

/// How often vCPUs that are to come back are called: a call that reaches one just
/// before it enters the guest is lost.
const CALL: Duration = Duration::from_millis(5);
/// After how long without coming back a vCPU is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between a guest's vCPUs and the thread that directs it.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    order: Order,
    /// vCPUs that may be running.
    inside: usize,
    end: Option<End>,
}

/// What vCPUs are to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    /// Wait at the gate.
    #[default]
    Wait,
    /// Run.
    Go,
    /// End their threads.
    Leave,
}

/// How a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It has reset its machine.
    Reset,
    /// Something that no guest should do, or that KVM cannot.
    Failed(String),
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU's pass, which is not used yet.
    pub(super) const fn pass(&self) -> Pass<'_> {
        Pass {
            gate: self,
            inside: false,
        }
    }

    /// Tells vCPUs what to do. After its end a guest does not go on.
    pub(super) fn order(&self, order: Order) {
        let mut state = self.state();
        if state.order != Order::Leave {
            state.order = order;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The guest has come to its end: its vCPUs leave. Only the first end counts.
    pub(super) fn end(&self, end: End) {
        self.state().end.get_or_insert(end);
        self.order(Order::Leave);
    }

    /// How the guest has ended.
    pub(super) fn ended(&self) -> Option<End> {
        self.state().end.clone()
    }

    /// Waits until no vCPU runs, after an order to wait or to leave. `call` makes
    /// those that run come back from the guest.
    ///
    /// # Errors
    /// When one does not.
    pub(super) fn wait_until_empty(&self, call: impl Fn()) -> anyhow::Result<()> {
        let begin = Instant::now();
        let mut state = self.state();
        while state.inside > 0 {
            if begin.elapsed() > PATIENCE {
                bail!(
                    "{} vCPUs have not come back for {} s: they hang, most likely in a fault that nobody answers",
                    state.inside,
                    PATIENCE.as_secs()
                );
            }
            call();
            let woken = self.changed.wait_timeout(state, CALL);
            (state, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}

/// What a vCPU shows at the gate before each run.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    inside: bool,
}

impl Pass<'_> {
    /// Waits until the vCPU may run. Returns false when it must leave. Calls `held`
    /// before it waits for the guest to be let go again.
    pub(super) fn go(&mut self, held: impl Fn()) -> bool {
        let mut state = self.gate.state();
        while state.order == Order::Wait {
            if std::mem::take(&mut self.inside) {
                // A call into KVM, while the directing thread still waits for it.
                held();
                state.inside -= 1;
                self.gate.changed.notify_all();
            }
            let woken = self.gate.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if state.order == Order::Leave {
            return false;
        }
        if !std::mem::replace(&mut self.inside, true) {
            state.inside += 1;
        }
        true
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "the thread of a vCPU panicked".to_owned();
            self.gate.end(End::Failed(why));
        }
        if self.inside {
            self.gate.state().inside -= 1;
            self.gate.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// A vCPU without a guest: it comes back when it is called.
    fn cpu(gate: &Gate, turns: &AtomicU64, called: &AtomicBool) {
        let mut pass = gate.pass();
        while pass.go(|| {}) {
            turns.fetch_add(1, Ordering::Relaxed);
            while !called.swap(false, Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn cpus_are_held_and_let_go() {
        let (gate, turns, called) = (Gate::default(), AtomicU64::new(0), AtomicBool::new(false));
        let call = || called.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| cpu(&gate, &turns, &called));
            gate.wait_until_empty(|| panic!("nobody is inside"))
                .unwrap();
            for turn in 1..4 {
                gate.order(Order::Go);
                while turns.load(Ordering::Relaxed) < turn {
                    std::thread::yield_now();
                }
                gate.order(Order::Wait);
                gate.wait_until_empty(call).unwrap();
            }
            gate.order(Order::Leave);
        });
        assert_eq!(gate.ended(), None, "it was sent away");
    }

    #[test]
    fn after_its_end_a_guest_does_not_go_on() {
        let gate = Gate::default();
        gate.order(Order::Go);
        gate.end(End::Reset);
        gate.end(End::Failed(String::new()));
        gate.order(Order::Go);
        assert!(!gate.pass().go(|| {}));
        assert_eq!(gate.ended(), Some(End::Reset));
    }

    #[test]
    fn a_panic_is_an_end() {
        let gate = Gate::default();
        gate.order(Order::Go);
        let panicked = std::thread::scope(|scope| {
            let cpu = || {
                let mut pass = gate.pass();
                assert!(!pass.go(|| {}), "it may go, so this panics");
            };
            scope.spawn(cpu).join().is_err()
        });
        assert!(panicked);
        assert!(matches!(gate.ended(), Some(End::Failed(_))));
        gate.wait_until_empty(|| {}).unwrap();
    }
}
