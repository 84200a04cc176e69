//! [`Ram`]: a guest's physical memory, and the mailbox in it.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use ksm_core::backend::linux::HostRegion;
use ksm_core::page::{bytes_in, pages_in};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use crate::args::MemoryKind;
use crate::content::PageSpec;
use crate::layout::{
    Command, DESCRIPTORS, MAILBOX, WORK_BASE, control_bytes, descriptor, descriptor_words,
    lockstep_list, mail,
};
use crate::plan::Plan;

/// Where the second region of the work memory starts is a multiple of this: a
/// huge page.
const SPLIT_PAGES: u64 = 512;

/// What a file's blocks are counted in.
const SECTOR: u64 = 512;

/// A guest's memory.
#[derive(Clone, Debug)]
pub(crate) struct Ram {
    /// Control area and work memory.
    pub(crate) all: GuestMemoryMmap,
    /// The work memory alone, in two regions: what is registered with the
    /// engine.
    pub(crate) work: GuestMemoryMmap,
    /// What all addresses are counted from: not 0 in memory that was added.
    base: u64,
    kind: MemoryKind,
    /// The memfd that work memory is in, which only this process maps, and once.
    file: Option<Arc<File>>,
}

impl Ram {
    /// Maps the memory of a guest with `pages` pages of work memory.
    pub(crate) fn new(pages: u64, kind: MemoryKind) -> anyhow::Result<Self> {
        let first = (pages / 2).next_multiple_of(SPLIT_PAGES).min(pages);
        let file = match kind {
            MemoryKind::Anonymous => None,
            MemoryKind::Memfd | MemoryKind::Mixed => Some(memfd(bytes_in(pages))?),
        };
        let in_file = |start| {
            let whole = kind == MemoryKind::Memfd || start > 0;
            let file = file.clone().filter(|_| whole)?;
            Some(FileOffset::from_arc(file, bytes_in(start)))
        };
        let mut ranges = vec![(
            GuestAddress(0),
            usize::try_from(control_bytes(pages))?,
            None,
        )];
        for (start, end) in [(0, first), (first, pages)] {
            if start < end {
                let address = GuestAddress(WORK_BASE + bytes_in(start));
                let bytes = usize::try_from(bytes_in(end - start))?;
                ranges.push((address, bytes, in_file(start)));
            }
        }
        let all =
            GuestMemoryMmap::from_ranges_with_files(&ranges).context("cannot map guest memory")?;
        let control = all
            .find_region(GuestAddress(0))
            .expect("mapped above")
            .len();
        let (work, _) = all.remove_region(GuestAddress(0), control)?;
        Ok(Self {
            all,
            work,
            base: 0,
            kind,
            file,
        })
    }

    /// As much memory of the same kind, for a clone, with the same in its control
    /// area but for what was counted. The guest must be paused.
    pub(crate) fn clone_control(&self) -> anyhow::Result<Self> {
        let clone = Self::new(self.pages(), self.kind)?;
        let mut page = [0; ksm_core::PAGE_SIZE];
        for at in (0..control_bytes(self.pages())).step_by(page.len()) {
            self.all.read_slice(&mut page, GuestAddress(at))?;
            // What holds nothing needs no memory.
            if page.iter().any(|&byte| byte != 0) {
                clone.all.write_slice(&page, GuestAddress(at))?;
            }
        }
        for count in [mail::PAGES_CHECKED, mail::STORES_CHECKED] {
            clone.set_mail(count, 0)?;
        }
        Ok(clone)
    }

    /// Memory that was added to a guest at `base`, and is worked at by a vCPU of its
    /// own: a control area, and work memory if there is any just now.
    pub(crate) fn window(
        base: u64,
        control: Arc<GuestRegionMmap>,
        work: Option<Arc<GuestRegionMmap>>,
    ) -> anyhow::Result<Self> {
        let mut all = GuestMemoryMmap::from_arc_regions(vec![control])?;
        let mut alone = GuestMemoryMmap::new();
        if let Some(work) = work {
            all = all.insert_region(Arc::clone(&work))?;
            alone = alone.insert_region(work)?;
        }
        Ok(Self {
            all,
            work: alone,
            base,
            kind: MemoryKind::Anonymous,
            file: None,
        })
    }

    /// How a region of work memory is registered.
    pub(crate) fn source(region: Arc<GuestRegionMmap>) -> HostRegion {
        let owned = region.file_offset().is_some();
        let source = HostRegion::new(region);
        if owned { source.memfd_owned() } else { source }
    }

    /// Memory that its memfd holds, in bytes.
    pub(crate) fn file_bytes(&self) -> anyhow::Result<u64> {
        let Some(file) = &self.file else {
            return Ok(0);
        };
        Ok(u64::try_from(fstat(file)?.st_blocks)? * SECTOR)
    }

    /// Pages of work memory.
    pub(crate) fn pages(&self) -> u64 {
        self.work.iter().map(|region| pages_in(region.len())).sum()
    }

    /// Writes what the guest needs to know of its plan.
    pub(crate) fn write_plan(&self, plan: &Plan) -> anyhow::Result<()> {
        for (page, spec) in (0..).zip(&plan.pages) {
            self.set_spec(page, *spec)?;
        }
        let list = self.base + lockstep_list(plan.len());
        for (at, page) in (0..).zip(&plan.lockstep) {
            self.all.write_obj(*page, GuestAddress(list + at * 8))?;
        }
        Ok(())
    }

    /// Writes what a page must hold. The guest must not be at it just then.
    pub(crate) fn set_spec(&self, page: u64, spec: PageSpec) -> anyhow::Result<()> {
        let at = GuestAddress(self.base + DESCRIPTORS + page * descriptor::BYTES);
        Ok(self.all.write_obj(descriptor_words(spec), at)?)
    }

    /// Whether the guest has counted a page as lost.
    pub(crate) fn is_marked_lost(&self, page: u64) -> anyhow::Result<bool> {
        let at = DESCRIPTORS + page * descriptor::BYTES + descriptor::LOST;
        Ok(self.all.read_obj::<u32>(GuestAddress(self.base + at))? != 0)
    }

    /// Puts a command into the mailbox.
    pub(crate) fn post(&self, command: Command) -> anyhow::Result<()> {
        let offsets = [mail::COMMAND, mail::FIRST, mail::END, mail::TIMES];
        for (offset, word) in offsets.into_iter().zip(command.words()) {
            self.set_mail(offset, word)?;
        }
        Ok(())
    }

    /// A word of the mailbox, while the guest may be running.
    pub(crate) fn mail(&self, offset: u64) -> anyhow::Result<u64> {
        let at = GuestAddress(self.base + MAILBOX + offset);
        Ok(self.all.load(at, Ordering::Relaxed)?)
    }

    /// Sets a word of the mailbox.
    pub(crate) fn set_mail(&self, offset: u64, word: u64) -> anyhow::Result<()> {
        let at = GuestAddress(self.base + MAILBOX + offset);
        Ok(self.all.store(word, at, Ordering::Relaxed)?)
    }

    /// Copies a page of the work memory.
    pub(crate) fn read_page(
        &self,
        page: u64,
        buf: &mut [u8; ksm_core::PAGE_SIZE],
    ) -> anyhow::Result<()> {
        let at = GuestAddress(self.base + page_address(page).0);
        Ok(self.work.read_slice(buf, at)?)
    }
}

/// A memfd of so many bytes.
fn memfd(bytes: u64) -> anyhow::Result<Arc<File>> {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).context("memfd_create")?;
    ftruncate(&fd, bytes).context("ftruncate of guest memory")?;
    Ok(Arc::new(File::from(fd)))
}

/// The guest-physical address of a page of a guest's own work memory.
pub(crate) const fn page_address(page: u64) -> GuestAddress {
    GuestAddress(WORK_BASE + bytes_in(page))
}
