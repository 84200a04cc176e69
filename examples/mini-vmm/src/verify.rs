//! The VMM's own check of a guest's memory.

use crate::content::{Kind, PageSpec};
use crate::ram::Ram;

/// The pages of the work memory that do not hold what `expected` says of them,
/// in order.
pub(crate) fn wrong_pages(
    ram: &Ram,
    expected: impl Fn(u64) -> PageSpec,
) -> anyhow::Result<Vec<u64>> {
    let mut wrong = Vec::new();
    let mut found = [0; ksm_core::PAGE_SIZE];
    for page in 0..ram.pages() {
        let spec = expected(page);
        if spec.kind == Kind::Skip {
            continue;
        }
        ram.read_page(page, &mut found)?;
        if spec.difference(&found).is_some() {
            wrong.push(page);
        }
    }
    Ok(wrong)
}
