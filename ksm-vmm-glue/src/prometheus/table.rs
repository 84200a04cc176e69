//! The metrics: their names, help lines and values.

use ksm_core::{MemoryStats, Stats};
use prometheus_client::registry::Unit;

/// How a value is read from counters `T`.
pub(super) enum Read<T> {
    /// It goes up and down.
    Gauge(fn(&T) -> u64),
    /// It can be less than nothing.
    Signed(fn(&T) -> i64),
    /// It only grows; `_total` is put behind its name.
    Counter(fn(&T) -> u64),
}

/// A metric: its name without unit and `_total`, and its help line.
pub(super) struct Metric<T> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) unit: Option<Unit>,
    pub(super) read: Read<T>,
}

const fn gauge<T>(name: &'static str, help: &'static str, read: fn(&T) -> u64) -> Metric<T> {
    Metric {
        name,
        help,
        unit: None,
        read: Read::Gauge(read),
    }
}

const fn bytes<T>(name: &'static str, help: &'static str, read: fn(&T) -> u64) -> Metric<T> {
    Metric {
        name,
        help,
        unit: Some(Unit::Bytes),
        read: Read::Gauge(read),
    }
}

const fn counter<T>(name: &'static str, help: &'static str, read: fn(&T) -> u64) -> Metric<T> {
    Metric {
        name,
        help,
        unit: None,
        read: Read::Counter(read),
    }
}

/// What there is of every trust domain.
pub(super) const DOMAIN_METRICS: [Metric<Stats>; 18] = [
    gauge(
        "ksm_pages_shared",
        "Frames that pages map as shared.",
        |stats| stats.pages_shared,
    ),
    gauge(
        "ksm_pages_sharing",
        "Pages that map shared frames beyond the first of each.",
        |stats| stats.pages_sharing,
    ),
    gauge(
        "ksm_pages_unshared",
        "Pages that are stable but have no equal.",
        |stats| stats.pages_unshared,
    ),
    gauge(
        "ksm_pages_volatile",
        "Pages that change too fast to be merged.",
        |stats| stats.pages_volatile,
    ),
    gauge(
        "ksm_zero_pages",
        "Pages of zeros that were given back and are still zero.",
        |stats| stats.ksm_zero_pages,
    ),
    gauge(
        "ksm_stable_node_dups",
        "Shared frames beyond the first of their content.",
        |stats| stats.stable_node_dups,
    ),
    gauge(
        "ksm_frames_lingering",
        "Frames whose memory was given back but whose number is still in use.",
        |stats| stats.frames_lingering,
    ),
    gauge(
        "ksm_vmas",
        "Virtual memory areas that merging costs the process.",
        |stats| stats.vmas,
    ),
    bytes(
        "ksm_saved",
        "Memory that guests would take more if nothing were merged.",
        |stats| stats.saved_bytes(),
    ),
    bytes(
        "ksm_metadata",
        "Memory that the engine's own records take.",
        |stats| stats.metadata_bytes,
    ),
    Metric {
        name: "ksm_general_profit",
        help: "Memory saved less memory that records take.",
        unit: Some(Unit::Bytes),
        read: Read::Signed(Stats::general_profit),
    },
    gauge(
        "ksm_rmap_longest_hold",
        "The most nodes of an interval tree that a walk looked at under one lock.",
        |stats| stats.rmap_longest_hold,
    ),
    counter(
        "ksm_rmap_walks",
        "Walks from a frame to the pages that map it.",
        |stats| stats.rmap_walks,
    ),
    counter(
        "ksm_rmap_intervals",
        "Regions that such walks found.",
        |stats| stats.rmap_intervals,
    ),
    counter(
        "ksm_vmas_given_back",
        "Virtual memory areas given back for others that save more.",
        |stats| stats.vmas_given_back,
    ),
    counter(
        "ksm_pages_given_back",
        "Pages that were taken off frames for that.",
        |stats| stats.pages_given_back,
    ),
    counter("ksm_pages_scanned", "Pages looked at.", |stats| {
        stats.pages_scanned
    }),
    counter(
        "ksm_cow_breaks",
        "Merged pages that a guest wrote to.",
        |stats| stats.cow_breaks,
    ),
];

/// What there is of every guest.
pub(super) const GUEST_METRICS: [Metric<MemoryStats>; 13] = [
    gauge("ksm_guest_pages", "Pages that are registered.", |stats| {
        stats.pages
    }),
    gauge(
        "ksm_guest_rmap_items",
        "Pages of the guest that the engine keeps a record of.",
        |stats| stats.ksm_rmap_items,
    ),
    gauge(
        "ksm_guest_merging_pages",
        "Pages of the guest that map a shared frame.",
        |stats| stats.ksm_merging_pages,
    ),
    gauge(
        "ksm_guest_zero_pages",
        "Pages of zeros of the guest that were given back and are still zero.",
        |stats| stats.ksm_zero_pages,
    ),
    gauge(
        "ksm_guest_pages_unshared",
        "Pages of the guest that are stable but have no equal.",
        |stats| stats.pages_unshared,
    ),
    gauge(
        "ksm_guest_pages_volatile",
        "Pages of the guest that change too fast to be merged.",
        |stats| stats.pages_volatile,
    ),
    gauge(
        "ksm_guest_pages_copied",
        "Pages that the guest wrote to after they were merged and that were not merged again.",
        |stats| stats.pages_copied,
    ),
    gauge(
        "ksm_guest_vmas",
        "Virtual memory areas that merging the guest costs the process.",
        |stats| stats.vmas,
    ),
    counter(
        "ksm_guest_cow_breaks",
        "Merged pages that the guest wrote to.",
        |stats| stats.cow_breaks,
    ),
    counter(
        "ksm_guest_vmas_given_back",
        "Virtual memory areas of the guest given back for others that save more.",
        |stats| stats.vmas_given_back,
    ),
    counter(
        "ksm_guest_pages_given_back",
        "Pages of the guest that were taken off frames for that.",
        |stats| stats.pages_given_back,
    ),
    counter(
        "ksm_guest_lease_waits",
        "Calls that waited for a region of the guest to be free.",
        |stats| stats.lease_waits,
    ),
    counter(
        "ksm_guest_lease_refusals",
        "Times that a pass put a busy region of the guest off.",
        |stats| stats.lease_refusals,
    ),
];
