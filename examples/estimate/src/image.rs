//! [`Image`]: a file that holds a guest's memory, read page by page.

use std::fs::{File, metadata};
use std::io::{BufReader, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use ksm_core::page::{PAGE_SIZE, PAGE_SIZE_U64, PageBuf, is_page_aligned, pages_in};

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// A raw image.
#[derive(Debug)]
pub(crate) struct Image {
    path: PathBuf,
    bytes: u64,
}

/// Looks at all files, so that one that cannot be read is found before work begins.
pub(crate) fn look(paths: &[PathBuf]) -> anyhow::Result<Vec<Image>> {
    paths.iter().map(|path| Image::look(path)).collect()
}

impl Image {
    fn look(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let found = metadata(path).with_context(|| format!("cannot read {name}"))?;
        if !found.is_file() {
            bail!("cannot read {name}: it is not a file");
        }
        File::open(path).with_context(|| format!("cannot read {name}"))?;
        let image = Self {
            path: path.to_owned(),
            bytes: found.len(),
        };
        if image.pages() == 0 {
            bail!("{name} holds no whole page: it has {} bytes", image.bytes);
        }
        Ok(image)
    }

    /// Its name, as given.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Whole pages.
    pub(crate) const fn pages(&self) -> u64 {
        pages_in(self.bytes)
    }

    /// Bytes behind the last whole page.
    pub(crate) const fn tail_bytes(&self) -> u64 {
        self.bytes % PAGE_SIZE_U64
    }

    /// What the user should know.
    pub(crate) fn warning(&self) -> Option<String> {
        (!is_page_aligned(self.bytes)).then(|| {
            format!(
                "{} is not made of whole pages of {PAGE_SIZE} bytes: its last {} bytes are left out",
                self.name(),
                self.tail_bytes()
            )
        })
    }

    /// Calls `each` with all whole pages, in order, at most `batch` at a time.
    pub(crate) fn read(
        &self,
        batch: usize,
        mut each: impl FnMut(&[PageBuf]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let failed = || format!("cannot read {}", self.name());
        let file = File::open(&self.path).with_context(failed)?;
        let mut file = BufReader::with_capacity(READ_BYTES, file);
        let mut pages = vec![*PageBuf::zeroed(); batch];
        let mut left = self.pages();
        while left > 0 {
            let len = usize::try_from(left).map_or(batch, |left| left.min(batch));
            for page in &mut pages[..len] {
                file.read_exact(page.bytes_mut()).with_context(failed)?;
            }
            each(&pages[..len])?;
            left -= len as u64;
        }
        Ok(())
    }
}
