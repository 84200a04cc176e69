//! Fault-injection points: a name for every step of a merge, at which a test
//! can let the scanning thread panic or vanish.
//!
//! Without the feature `fault-injection` a point costs nothing and does
//! nothing.

/// A step of a pass, named by what has just happened. Where mappings are given
/// back, copies are stopped and replaced in the steps of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A window was read and fingerprinted.
    Hashed,
    /// Frames were filled for the window's new matches.
    Planned,
    /// The stop is written down, nothing is stopped.
    Stopping,
    /// The run is stopped or out.
    Stopped,
    /// The run's bytes were compared.
    Compared,
    /// The change is written down, nothing is mapped.
    Sharing,
    /// Frames or zero pages are mapped, the records do not say so yet.
    Mapped,
    /// The records say so, waiters are not woken yet.
    Recorded,
    /// The stop was lifted.
    Lifted,
    /// Merged pages whose mappings are given back have copies of their own.
    Unshared,
}

impl Step {
    /// All steps, those of a merge first, in its order.
    pub const ALL: [Self; 10] = [
        Self::Hashed,
        Self::Planned,
        Self::Stopping,
        Self::Stopped,
        Self::Compared,
        Self::Sharing,
        Self::Mapped,
        Self::Recorded,
        Self::Lifted,
        Self::Unshared,
    ];
}

/// What a test does at a step.
#[cfg(feature = "fault-injection")]
pub type Hook = Box<dyn FnMut(Step)>;

#[cfg(feature = "fault-injection")]
thread_local! {
    static HOOK: std::cell::RefCell<Option<Hook>> = const { std::cell::RefCell::new(None) };
}

/// Lets `hook` be called at every step that this thread takes from now on; it
/// may panic, or never return. `None` takes it away.
#[cfg(feature = "fault-injection")]
pub fn set_hook(hook: Option<Hook>) {
    HOOK.with(|cell| *cell.borrow_mut() = hook);
}

/// Called by the engine at every step.
#[inline]
pub(crate) fn point(step: Step) {
    #[cfg(feature = "fault-injection")]
    {
        // Taken out while it runs: it may panic, and steps taken while
        // unwinding must not run it again.
        let hook = HOOK.with(|cell| cell.borrow_mut().take());
        if let Some(mut hook) = hook {
            hook(step);
            HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
        }
    }
    #[cfg(not(feature = "fault-injection"))]
    let _ = step;
}
