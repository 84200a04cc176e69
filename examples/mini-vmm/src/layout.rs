//! Where things stand in a guest's physical memory, and how the guest and its
//! VMM talk.
//!
//! A guest has a **control area** from address 0 on, which is never registered
//! with the engine: page tables, code, a mailbox, and what every page of the
//! **work memory** must hold. So no merge can damage what pages are checked
//! against. The work memory starts at [`WORK_BASE`] and is what gets merged.

use ksm_core::page::{PAGE_SIZE_U64, bytes_in};

use crate::content::{Kind, PageSpec};

/// The mailbox: [`mail`] says what is at which offset.
pub(crate) const MAILBOX: u64 = 0x1000;
/// The payload's code.
pub(crate) const CODE: u64 = 0x2000;
/// Room for the payload's code, in bytes.
pub(crate) const CODE_BYTES: u64 = 0x2000;
/// The top page table (PML4), followed by one PDPT and the page directories.
pub(crate) const PAGE_TABLES: u64 = 0x10_000;
/// One descriptor for each page of the work memory: see [`descriptor`].
pub(crate) const DESCRIPTORS: u64 = 0x100_000;
/// The work memory of a guest's first vCPU.
pub(crate) const WORK_BASE: u64 = 1 << 30;
/// The most work memory a guest can have: the page directories end before
/// [`DESCRIPTORS`], and the descriptors before [`WORK_BASE`].
pub(crate) const MAX_WORK_BYTES: u64 = 64 << 30;
/// The port at which a guest reports that a command is done.
pub(crate) const REPORT_PORT: u16 = 0x3f8;

/// Offsets of the mailbox's words, 8 bytes each. The VMM writes the command and
/// its three arguments while the vCPU is stopped; the guest counts.
pub(crate) mod mail {
    /// What to do: a [`Command`](super::Command)'s number.
    pub(crate) const COMMAND: u64 = 0x00;
    /// The first page, or the first place in the lockstep list.
    pub(crate) const FIRST: u64 = 0x08;
    /// One past the last.
    pub(crate) const END: u64 = 0x10;
    /// How many times over.
    pub(crate) const TIMES: u64 = 0x18;
    /// Pages whose content the guest has checked word by word.
    pub(crate) const PAGES_CHECKED: u64 = 0x20;
    /// Stores whose effect the guest has checked.
    pub(crate) const STORES_CHECKED: u64 = 0x28;
    /// Pages that did not hold what they must.
    pub(crate) const LOST_PAGES: u64 = 0x30;
    /// The last of them.
    pub(crate) const LAST_LOST: u64 = 0x38;
}

/// Offsets inside a descriptor. It begins with the page's
/// `Kind`, 4 bytes.
pub(crate) mod descriptor {
    /// Bytes of one descriptor; the payload shifts by its log2.
    pub(crate) const BYTES: u64 = 32;
    /// log2 of [`BYTES`].
    pub(crate) const SHIFT: u32 = 5;
    /// 1 once the guest has counted the page as lost, 4 bytes.
    pub(crate) const LOST: u64 = 4;
    /// The content's key, or its hash.
    pub(crate) const KEY: u64 = 8;
    /// XORed into the last word, or the hash after the next rewrite.
    pub(crate) const TAIL: u64 = 16;
    /// What every counter of a rewritten page holds, or is XORed into its words.
    pub(crate) const COUNTER: u64 = 24;
}

/// What the VMM asks of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Write pages `first..end` as their descriptors say.
    Fill {
        /// The first page.
        first: u64,
        /// One past the last.
        end: u64,
    },
    /// Compare pages `first..end` with their descriptors, word by word.
    Check {
        /// The first page.
        first: u64,
        /// One past the last.
        end: u64,
    },
    /// Check and increment the counters of the pages at `first..end` of the
    /// lockstep list, `times` times over. Pages of an image are checked, then
    /// rewritten or restored, whichever it is the turn of.
    Rewrite {
        /// The first place in the list.
        first: u64,
        /// One past the last.
        end: u64,
        /// How many times.
        times: u64,
    },
}

impl Command {
    /// The mailbox's first four words.
    pub(crate) const fn words(self) -> [u64; 4] {
        match self {
            Self::Fill { first, end } => [number::FILL, first, end, 1],
            Self::Check { first, end } => [number::CHECK, first, end, 1],
            Self::Rewrite { first, end, times } => [number::REWRITE, first, end, times],
        }
    }
}

/// The numbers of the commands.
pub(crate) mod number {
    /// [`Command::Fill`](super::Command::Fill).
    pub(crate) const FILL: u64 = 1;
    /// [`Command::Check`](super::Command::Check).
    pub(crate) const CHECK: u64 = 2;
    /// [`Command::Rewrite`](super::Command::Rewrite).
    pub(crate) const REWRITE: u64 = 3;
}

/// Where memory can be added, each piece with a vCPU of its own: the same layout as
/// that of the guest itself, from another base address on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// How many there are.
    pub(crate) count: u64,
    /// Work memory of each, in pages.
    pub(crate) pages: u64,
}

impl Windows {
    /// The base address of window number `n` of a guest with `pages` pages.
    pub(crate) const fn base(self, pages: u64, n: u64) -> u64 {
        let own = (WORK_BASE + bytes_in(pages)).next_multiple_of(GIB);
        own + n * (WORK_BASE + bytes_in(self.pages).next_multiple_of(GIB))
    }

    /// Where all memory of a guest with `pages` pages ends, once windows are full.
    pub(crate) const fn end(self, pages: u64) -> u64 {
        self.base(pages, self.count)
    }
}

const GIB: u64 = 1 << 30;

/// The most that page tables can map: they end before [`DESCRIPTORS`].
pub(crate) const MAX_ADDRESS: u64 = ((DESCRIPTORS - PAGE_TABLES) / PAGE_SIZE_U64 - 2) * GIB;

/// Address of the lockstep list of a guest with `pages` pages of work memory.
pub(crate) const fn lockstep_list(pages: u64) -> u64 {
    DESCRIPTORS + pages * descriptor::BYTES
}

/// Bytes of the control area of a guest with `pages` pages: whole huge pages.
pub(crate) const fn control_bytes(pages: u64) -> u64 {
    (lockstep_list(pages) + pages * 8).next_multiple_of(2 << 20)
}

/// A descriptor's four words.
pub(crate) const fn descriptor_words(spec: PageSpec) -> [u64; 4] {
    [spec.kind as u64, spec.key, spec.tail, spec.counter]
}

/// A page that the guest must leave alone for now, whatever its content.
pub(crate) const SKIPPED: PageSpec = PageSpec {
    kind: Kind::Skip,
    key: 0,
    tail: 0,
    counter: 0,
};
