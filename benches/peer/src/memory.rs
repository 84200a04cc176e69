//! [`Memory`]: a piece of guest memory, and advice on it. The only unsafe code of
//! this program.
#![allow(unsafe_code)]

use std::fs::File;
use std::sync::Arc;

use anyhow::Context as _;
use ksm_core::PAGE_SIZE;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes as _, FileOffset, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion,
};

/// Private anonymous memory (`MAP_NORESERVE`), unmapped when the last clone of it
/// goes.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    region: Arc<GuestRegionMmap>,
    pages: usize,
}

impl Memory {
    /// Maps so many pages.
    pub(crate) fn map(pages: usize) -> anyhow::Result<Self> {
        let mapping = MmapRegion::new(pages * PAGE_SIZE).context("mmap")?;
        Self::of(mapping, pages)
    }

    /// Maps the first pages of a file privately.
    pub(crate) fn map_private(file: &File, pages: usize) -> anyhow::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let mapping = MmapRegionBuilder::new(pages * PAGE_SIZE)
            .with_file_offset(FileOffset::new(file.try_clone()?, 0))
            .with_mmap_prot(protection.bits().cast_signed())
            .with_mmap_flags(flags.bits().cast_signed())
            .build()
            .context("mmap of a file")?;
        Self::of(mapping, pages)
    }

    fn of(mapping: MmapRegion, pages: usize) -> anyhow::Result<Self> {
        let region = GuestRegionMmap::new(mapping, GuestAddress(0));
        let region = region.context("the memory does not fit into a guest")?;
        Ok(Self {
            region: Arc::new(region),
            pages,
        })
    }

    /// As the engine registers it.
    pub(crate) fn region(&self) -> Arc<GuestRegionMmap> {
        Arc::clone(&self.region)
    }

    /// Length, in pages.
    pub(crate) const fn pages(&self) -> usize {
        self.pages
    }

    /// The number of its first page in this process.
    pub(crate) fn first_page(&self) -> usize {
        self.region.as_ptr().addr() / PAGE_SIZE
    }

    /// Writes a whole page.
    pub(crate) fn write(&self, page: usize, bytes: &[u8; PAGE_SIZE]) -> anyhow::Result<()> {
        Ok(self.region.write_slice(bytes, place_of(page))?)
    }

    /// Writes one word of a page: what a guest does that touches it.
    pub(crate) fn touch(&self, page: usize, word: u64) -> anyhow::Result<()> {
        Ok(self.region.write_obj(word, place_of(page))?)
    }

    /// Reads a whole page.
    pub(crate) fn read(&self, page: usize, bytes: &mut [u8; PAGE_SIZE]) -> anyhow::Result<()> {
        Ok(self.region.read_slice(bytes, place_of(page))?)
    }

    /// Keeps huge pages out of it.
    pub(crate) fn no_huge_pages(&self) -> anyhow::Result<()> {
        self.advise(Advice::LinuxNoHugepage, 0, self.pages)
    }

    /// Lets the kernel's KSM merge some of it.
    pub(crate) fn mergeable(&self, first: usize, pages: usize) -> anyhow::Result<()> {
        self.advise(Advice::LinuxMergeable, first, pages)
    }

    /// Gives every page that the kernel's KSM has merged a copy of its own.
    pub(crate) fn unmergeable(&self) -> anyhow::Result<()> {
        self.advise(Advice::LinuxUnmergeable, 0, self.pages)
    }

    /// Only for advice that changes no contents.
    fn advise(&self, advice: Advice, first: usize, pages: usize) -> anyhow::Result<()> {
        assert!(first + pages <= self.pages, "outside of the memory");
        let start = self.region.as_ptr().wrapping_add(first * PAGE_SIZE);
        // SAFETY: the range is part of the mapping that belongs to `region`, which
        // is alive. Advice on huge pages and on merging changes neither contents
        // nor where they are mapped, only which physical pages lie below.
        unsafe { madvise(start.cast(), pages * PAGE_SIZE, advice) }
            .with_context(|| format!("madvise({advice:?})"))
    }
}

fn place_of(page: usize) -> MemoryRegionAddress {
    MemoryRegionAddress((page * PAGE_SIZE) as u64)
}
