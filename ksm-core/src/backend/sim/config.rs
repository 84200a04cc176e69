//! What kind of host is simulated, and how rough its weather is.

/// How a host stops writes to a guest's own pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stop {
    /// It moves them out (`UFFDIO_MOVE`): readers wait too, and pages that are
    /// pinned or shared since a fork are refused.
    #[default]
    Move,
    /// It write-protects them: readers go on, pins go unnoticed, huge pages
    /// stay whole and are refused.
    Protect,
    /// It write-protects them, and all guest memory is a file of its own (a
    /// memfd): the page map shows it as such, swapped pages are not in it, a read
    /// of a hole fills it, and huge pages are split.
    Memfd,
}

/// A simulated host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// What all chance follows from.
    pub seed: u64,
    /// How writes to a guest's own pages are stopped. Copied pages are always
    /// write-protected.
    pub stop: Stop,
    /// The longest stop, in pages.
    pub max_stop: u64,
    /// The most VMAs (`vm.max_map_count`).
    pub max_vmas: u64,
    /// The most frames that all stores hold memory for.
    pub max_frames: u64,
    /// Pages in a huge page: a power of two. The real number is 512; a small
    /// one lets small guests have several.
    pub pages_per_huge: u64,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            stop: Stop::Move,
            max_stop: 256,
            max_vmas: 65_530,
            max_frames: u64::MAX,
            pages_per_huge: 16,
        }
    }
}

/// What happens between the steps of the engine. Chances are per step, of a
/// thousand; each call has a step before and a step after it. The default is
/// calm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Storm {
    /// vCPUs that write. Each waits for its own write, as a real one does.
    pub vcpus: u32,
    /// How often a vCPU writes.
    pub write: u32,
    /// How often a guest reads a page.
    pub read: u32,
    /// How often the host swaps a page out.
    pub swap: u32,
    /// How often a page of the guest's own is dropped behind the engine's back.
    pub discard: u32,
    /// How often a stop refuses a page that raced, or a move falls short.
    pub short: u32,
    /// How many contents the writers choose from. Few make many duplicates.
    pub contents: u64,
}

impl Storm {
    /// A rough one: most steps see a write, often to a page of the call at hand.
    #[must_use]
    pub const fn rough() -> Self {
        Self {
            vcpus: 3,
            write: 600,
            read: 100,
            swap: 50,
            discard: 50,
            short: 100,
            contents: 3,
        }
    }
}
