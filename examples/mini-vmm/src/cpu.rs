//! What runs a guest: a vCPU under KVM, or a host thread in its place.

use std::sync::Arc;

use crate::kvm_slots::SlottedVm;
use crate::layout::Command;
use crate::ram::Ram;

/// Carries out commands on a guest's memory, as the payload does.
pub(crate) trait Cpu: Send {
    /// Runs the guest until it reports that `command` is done.
    ///
    /// # Errors
    /// When the guest ended in another way than by reporting.
    fn run(&mut self, command: Command) -> anyhow::Result<()>;

    /// A CPU that goes on where this one stands, on the memory of a clone.
    ///
    /// # Errors
    /// When there is no other machine to be had.
    fn fork(&mut self, ram: Ram) -> anyhow::Result<Box<dyn Cpu>>;

    /// The machine that it belongs to, if there is one.
    fn machine(&self) -> Option<Arc<SlottedVm>> {
        None
    }
}
