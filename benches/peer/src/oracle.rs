//! The oracle: what pages hold and what they are, by their bytes and by the page
//! map, not by the counters of whoever merges them.

use anyhow::bail;
use kernel_ksm::{PageIs, PageMap};
use ksm_core::PAGE_SIZE;

use crate::content::fill;
use crate::memory::Memory;

/// Fails unless every page holds what its number says. Brings every page into
/// the page table.
pub(crate) fn check_contents(memory: &Memory, contents: &[usize]) -> anyhow::Result<()> {
    let (mut expected, mut found) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    for (page, &number) in contents.iter().enumerate() {
        fill(number, &mut expected);
        memory.read(page, &mut found)?;
        if found != expected {
            bail!("page {page} does not hold what was written to it");
        }
    }
    Ok(())
}

/// How many pages of `memory` map a page that others may map too: a frame, which
/// is a page of a file, or a page of ksmd's. Those that nobody has touched since
/// they were merged are not known to.
pub(crate) fn count_shared(memory: &Memory) -> anyhow::Result<u64> {
    count(memory, |page| matches!(page, PageIs::Ksm | PageIs::File))
}

/// How many pages of `memory` are anonymous and not ksmd's.
pub(crate) fn count_own(memory: &Memory) -> anyhow::Result<u64> {
    count(memory, |page| page == PageIs::Own)
}

/// Whether one page is.
pub(crate) fn is_own(memory: &Memory, page: usize) -> anyhow::Result<bool> {
    let found = PageMap::open()?.look(memory.first_page() + page, 1)?;
    Ok(found == [PageIs::Own])
}

fn count(memory: &Memory, is: impl Fn(PageIs) -> bool) -> anyhow::Result<u64> {
    let pages = PageMap::open()?.look(memory.first_page(), memory.pages())?;
    Ok(pages.into_iter().filter(|&page| is(page)).count() as u64)
}
