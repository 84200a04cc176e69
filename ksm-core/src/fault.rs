//! Fault-injection points: a name for every step of a merge, of making a clone
//! and of a change of a region's shape, at which a test can let the thread panic or
//! vanish.
//!
//! Without the feature `fault-injection` a point costs nothing and does
//! nothing.

/// A step, named by what has just happened. Where mappings are given back, copies
/// are stopped and replaced in the steps of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A window was read and fingerprinted.
    Hashed,
    /// A frame has a number, and holds nothing.
    Allotted,
    /// It holds its content, which the stable tree does not say yet.
    Filled,
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
    /// A discard is written down, and has not begun.
    Discarding,
    /// What was there is dropped, and the records do not say so yet.
    Discarded,
    /// Memory is attached for a region that nobody knows of yet: a clone, or what
    /// is taken over.
    Nursed,
    /// Frames are counted as mapped by pages of it, and are not mapped yet.
    Reserved,
    /// It is written down that they are being mapped, and they are not.
    Adopting,
    /// They are mapped, and the records do not say so yet.
    Adopted,
    /// Some of its pages are complete.
    Reared,
    /// It is registered.
    Known,
    /// Nobody else may take the region away or replace it.
    Claimed,
    /// Its memory is cut in two, and it is in charge still.
    Parted,
    /// Others are registered in its place.
    Replaced,
    /// Its pages are not its own any more, and its memory is still attached.
    Gone,
}

impl Step {
    /// The steps of a pass, those of a merge first, in its order.
    pub const PASS: [Self; 12] = [
        Self::Hashed,
        Self::Allotted,
        Self::Filled,
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

    /// The further steps of a discard, in order.
    pub const DISCARD: [Self; 2] = [Self::Discarding, Self::Discarded];

    /// The further steps of making a clone and of taking memory over, in order.
    pub const CLONE: [Self; 6] = [
        Self::Nursed,
        Self::Reserved,
        Self::Adopting,
        Self::Adopted,
        Self::Reared,
        Self::Known,
    ];

    /// The further steps of moving, splitting and unregistering a region, in order.
    pub const RESHAPE: [Self; 4] = [Self::Claimed, Self::Parted, Self::Replaced, Self::Gone];

    /// All steps.
    pub fn all() -> impl Iterator<Item = Self> {
        let steps = Self::PASS.into_iter().chain(Self::DISCARD);
        steps.chain(Self::CLONE).chain(Self::RESHAPE)
    }
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
