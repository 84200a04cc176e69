//! Events for the embedder's `tracing` subscriber. Without the feature `tracing`
//! they cost nothing and do nothing.
#![cfg_attr(
    not(feature = "tracing"),
    allow(
        unused_variables,
        clippy::if_same_then_else,
        reason = "events without a feature to send them"
    )
)]

use std::fmt::Display;

use ksm_core::SpaceId;

use crate::scanner::Status;

/// The scanner thread.
#[cfg(feature = "tracing")]
const SCANNER: &str = "ksm_vmm_glue::scanner";
/// Guests that come and go.
#[cfg(feature = "tracing")]
const GUEST: &str = "ksm_vmm_glue::guest";

/// Sends an event, if there is somebody to send it to.
#[cfg(feature = "tracing")]
macro_rules! event {
    ($level:ident, $target:ident, $($what:tt)+) => {
        tracing::event!(target: $target, tracing::Level::$level, $($what)+)
    };
}

#[cfg(not(feature = "tracing"))]
macro_rules! event {
    ($($what:tt)+) => {
        ()
    };
}

pub(crate) fn scanner_started(restarts: u32) {
    event!(INFO, SCANNER, restarts, "scanner started");
}

pub(crate) fn scanner_ended(status: &Status) {
    match status {
        Status::Panicked { message } => event!(ERROR, SCANNER, message, "scanner panicked"),
        Status::Died { leases } => event!(ERROR, SCANNER, leases, "scanner was killed"),
        Status::NotRestarted { reason } => {
            event!(ERROR, SCANNER, reason, "scanner could not be replaced");
        }
        Status::Stopped | Status::Running => event!(INFO, SCANNER, "scanner stopped"),
    }
}

/// `again`: as the scan before it did.
pub(crate) fn scan_failed(error: &dyn Display, again: bool) {
    if again {
        event!(DEBUG, SCANNER, %error, "scan failed again");
    } else {
        event!(WARN, SCANNER, %error, "scan failed");
    }
}

pub(crate) fn guest_registered(space: SpaceId, regions: usize, pages: u64) {
    event!(INFO, GUEST, %space, regions, pages, "guest registered");
}

pub(crate) fn guest_unregistered(space: SpaceId) {
    event!(INFO, GUEST, %space, "guest unregistered");
}

pub(crate) fn guest_left_behind(space: SpaceId, error: &dyn Display) {
    event!(WARN, GUEST, %space, %error, "guest dropped, but it stays registered");
}
