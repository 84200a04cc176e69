//! What runs a guest: a vCPU under KVM, or a host thread in its place.

use crate::layout::Command;

/// Carries out commands on a guest's memory, as the payload does.
pub(crate) trait Cpu: Send {
    /// Runs the guest until it reports that `command` is done.
    ///
    /// # Errors
    /// When the guest ended in another way than by reporting.
    fn run(&mut self, command: Command) -> anyhow::Result<()>;
}
