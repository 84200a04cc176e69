//! Guests that are Linux: `--kernel`.
//!
//! [`boot`] puts a kernel and what it is to be told into a guest's [`layout`],
//! [`vcpu`] starts it by the 64-bit boot protocol, and [`ports`] are its devices:
//! a serial [`console`], and ways to reset the machine. Timer and interrupt
//! controllers are KVM's own. [`guest`] is one such guest with its threads, which a
//! [`gate`] holds and lets go; [`stage`] boots several and lets them run, all at once
//! or in turns; [`mod@run`] merges their memory meanwhile.

mod acpi;
mod boot;
mod console;
mod gate;
mod guest;
mod layout;
pub(crate) mod options;
mod ports;
mod report;
mod run;
mod stage;
mod vcpu;

pub(crate) use run::run;
