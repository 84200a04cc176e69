//! [`PageMap`]: what pages of this process are, as `/proc/self/pagemap` and
//! `/proc/kpageflags` have it: by the word of nobody who merges them.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::Context as _;
use procfs::PhysicalPageFlags;
use procfs::process::{MemoryPageFlags, PageInfo, Process};

/// What one page of this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageIs {
    /// Not in the page table, or swapped out.
    Absent,
    /// Shared by ksmd.
    Ksm,
    /// A page of a file, not a copy of one.
    File,
    /// The page of zeros.
    Zero,
    /// Anonymous memory that nothing is known to share.
    Own,
}

/// The page map of this process.
#[derive(Debug)]
pub struct PageMap {
    myself: Process,
    flags: File,
}

impl PageMap {
    /// Opens it.
    ///
    /// # Errors
    /// When this is not root.
    pub fn open() -> anyhow::Result<Self> {
        Ok(Self {
            myself: Process::myself()?,
            flags: File::open("/proc/kpageflags").context("/proc/kpageflags")?,
        })
    }

    /// What `pages` pages are from page number `first` (an address divided by
    /// the size of a page) on.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub fn look(&self, first: usize, pages: usize) -> anyhow::Result<Vec<PageIs>> {
        let mut page_map = self.myself.pagemap().context("/proc/self/pagemap")?;
        let entries = page_map.get_range_info(first..first + pages)?;
        entries.iter().map(|entry| self.what_is(entry)).collect()
    }

    fn what_is(&self, entry: &PageInfo) -> anyhow::Result<PageIs> {
        let PageInfo::MemoryPage(page) = entry else {
            return Ok(PageIs::Absent);
        };
        if !page.contains(MemoryPageFlags::PRESENT) {
            return Ok(PageIs::Absent);
        }
        let flags = self.flags_of(page.get_page_frame_number().0)?;
        Ok(if flags.contains(PhysicalPageFlags::KSM) {
            PageIs::Ksm
        } else if flags.contains(PhysicalPageFlags::ZERO_PAGE) {
            PageIs::Zero
        } else if page.contains(MemoryPageFlags::FILE) {
            PageIs::File
        } else {
            PageIs::Own
        })
    }

    /// The flags of a physical page. (A buffered reader would read thousands.)
    fn flags_of(&self, frame: u64) -> anyhow::Result<PhysicalPageFlags> {
        let mut flags = [0; 8];
        self.flags
            .read_exact_at(&mut flags, frame * 8)
            .context("/proc/kpageflags")?;
        let flags = u64::from_ne_bytes(flags);
        Ok(PhysicalPageFlags::from_bits_truncate(flags))
    }
}
