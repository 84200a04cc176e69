//! Counters, with the kernel's names and meanings
//! (`Documentation/admin-guide/mm/ksm.rst`, `/sys/kernel/mm/ksm`,
//! `/proc/PID/ksm_stat`).

use crate::outcome::OutcomeCounts;
use crate::page::PAGE_SIZE_U64;

/// Counters of the whole engine or of one trust domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Frames that pages map as shared, in frames.
    pub pages_shared: u64,
    /// Pages that map them beyond the first of each: what is saved, in pages.
    pub pages_sharing: u64,
    /// Pages that are stable but have no equal, in pages.
    pub pages_unshared: u64,
    /// Pages that change too fast to be merged, in pages.
    pub pages_volatile: u64,
    /// Frames beyond the first of their content, in frames: a content that fills
    /// stretches of memory gets a block of equal frames, so that a stretch needs
    /// few mappings. They count in `pages_shared`, and so lower `pages_sharing`.
    pub stable_node_dups: u64,
    /// Mappings that the engine's work costs the process, in virtual memory areas.
    pub vmas: u64,
    /// Zero pages that the engine made and that are still zero, in pages.
    pub ksm_zero_pages: u64,
    /// Pages looked at since the engine was made, in pages.
    pub pages_scanned: u64,
    /// Passes over all regions that were finished.
    pub full_scans: u64,
    /// Merged pages that a guest wrote to since the engine was made, in pages.
    pub cow_breaks: u64,
    /// Mappings given back since the engine was made, where what they were made
    /// for was mostly written to and others would save more, in virtual memory
    /// areas.
    pub vmas_given_back: u64,
    /// Pages that were taken off frames for that, in pages: copies, and pages that
    /// were merged still.
    pub pages_given_back: u64,
    /// Frames whose memory was given back but whose number some copied page
    /// still names, in frames.
    pub frames_lingering: u64,
    /// Walks over the reverse map, from a frame to the pages that map it.
    pub rmap_walks: u64,
    /// Regions that these walks found.
    pub rmap_intervals: u64,
    /// The most nodes of an interval tree that a walk looked at under one hold of
    /// its lock.
    pub rmap_longest_hold: u64,
    /// Bytes that the engine's own records take.
    pub metadata_bytes: u64,
    /// What became of the pages that were looked at.
    pub outcomes: OutcomeCounts,
}

impl Stats {
    /// Adds the counters of another domain of the same engine. Passes are of the
    /// engine, and counted already.
    pub(crate) fn add(&mut self, other: &Self) {
        self.pages_shared += other.pages_shared;
        self.pages_sharing += other.pages_sharing;
        self.pages_unshared += other.pages_unshared;
        self.pages_volatile += other.pages_volatile;
        self.stable_node_dups += other.stable_node_dups;
        self.vmas += other.vmas;
        self.ksm_zero_pages += other.ksm_zero_pages;
        self.pages_scanned += other.pages_scanned;
        self.cow_breaks += other.cow_breaks;
        self.vmas_given_back += other.vmas_given_back;
        self.pages_given_back += other.pages_given_back;
        self.frames_lingering += other.frames_lingering;
        self.rmap_walks += other.rmap_walks;
        self.rmap_intervals += other.rmap_intervals;
        self.rmap_longest_hold = self.rmap_longest_hold.max(other.rmap_longest_hold);
        self.metadata_bytes += other.metadata_bytes;
        self.outcomes.add(&other.outcomes);
    }

    /// Bytes saved less bytes spent on records: the kernel's `general_profit`.
    #[must_use]
    pub const fn general_profit(&self) -> i64 {
        self.saved_bytes().cast_signed() - self.metadata_bytes.cast_signed()
    }

    /// Bytes that the guests' memory would take more if nothing were merged.
    #[must_use]
    pub const fn saved_bytes(&self) -> u64 {
        (self.pages_sharing + self.ksm_zero_pages) * PAGE_SIZE_U64
    }
}

/// Counters of one region or of one address space (a guest).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Length, in pages.
    pub pages: u64,
    /// Pages that the engine keeps a record of: those it has seen populated.
    pub ksm_rmap_items: u64,
    /// Pages that map a frame as shared, in pages.
    pub ksm_merging_pages: u64,
    /// Zero pages that the engine made and that are still zero, in pages.
    pub ksm_zero_pages: u64,
    /// Pages that are stable but have no equal, in pages.
    pub pages_unshared: u64,
    /// Pages that change too fast to be merged, in pages.
    pub pages_volatile: u64,
    /// Merged pages that the guest wrote to and that still stand over a frame's
    /// mapping, in pages.
    pub pages_copied: u64,
    /// Merged pages that the guest wrote to since it was registered, in pages.
    pub cow_breaks: u64,
    /// Mappings that the engine's work on it costs, in virtual memory areas.
    pub vmas: u64,
    /// Mappings given back since it was registered: see [`Stats`].
    pub vmas_given_back: u64,
    /// Pages that were taken off frames for that, in pages.
    pub pages_given_back: u64,
    /// How often somebody waited for the lease of a region.
    pub lease_waits: u64,
    /// How often a pass found a region busy and put it off.
    pub lease_refusals: u64,
    /// What became of the pages that were looked at.
    pub outcomes: OutcomeCounts,
}

impl MemoryStats {
    /// Adds the counters of `other`, another region of the same guest.
    pub fn add(&mut self, other: &Self) {
        self.pages += other.pages;
        self.ksm_rmap_items += other.ksm_rmap_items;
        self.ksm_merging_pages += other.ksm_merging_pages;
        self.ksm_zero_pages += other.ksm_zero_pages;
        self.pages_unshared += other.pages_unshared;
        self.pages_volatile += other.pages_volatile;
        self.pages_copied += other.pages_copied;
        self.cow_breaks += other.cow_breaks;
        self.vmas += other.vmas;
        self.vmas_given_back += other.vmas_given_back;
        self.pages_given_back += other.pages_given_back;
        self.lease_waits += other.lease_waits;
        self.lease_refusals += other.lease_refusals;
        self.outcomes.add(&other.outcomes);
    }
}

/// What one call of [`Ksm::scan`](crate::Ksm::scan) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScanReport {
    /// Pages looked at.
    pub pages_scanned: u64,
    /// Passes finished.
    pub passes: u64,
    /// Times a region was busy and put off to the end of the pass.
    pub regions_deferred: u64,
    /// Times a region was busy and left alone until the next pass
    /// ([`LockPolicy::TrySkip`](crate::LockPolicy::TrySkip) alone does so).
    pub regions_skipped: u64,
    /// Times regions had come while a pass ran, and it looked at them as well.
    pub second_traversals: u64,
    /// What became of the pages that were looked at.
    pub outcomes: OutcomeCounts,
    /// Another thread was scanning, or the engine is quiesced: nothing was done.
    pub busy: bool,
}
