//! The end of a pass that had too few mappings: giving back what saves least.

use std::sync::Arc;

use super::Ksm;
use crate::backend::Backend;
use crate::error::Error;
use crate::giveback;

/// The most pages that are taken off frames at the end of one pass.
const PAGES_PER_PASS: u64 = 4096;

impl<B: Backend> Ksm<B> {
    /// Gives mappings back, if this pass had to hold back what would save more
    /// with them: as many as it missed, at most. Returns how many.
    pub(super) fn give_back(&self) -> Result<u64, Error> {
        let shortage = self.vmas.shortage();
        if shortage.best() == 0 {
            return Ok(0);
        }
        let mut stretches = Vec::new();
        for region in self.layout.regions().iter() {
            if region.gives_back() {
                let found = giveback::stretches(region).into_iter();
                stretches.extend(found.map(|stretch| (Arc::clone(region), stretch)));
            }
        }
        stretches.sort_by(|(_, one), (_, other)| one.by_price(other));
        let (mut given_back, mut pages) = (0, PAGES_PER_PASS);
        for (region, stretch) in stretches {
            // Those behind it cost more.
            if given_back >= shortage.demand(stretch.sharing, stretch.gained) {
                break;
            }
            let Some(left) = pages.checked_sub(stretch.range.len()) else {
                break;
            };
            pages = left;
            let cap = u64::from(self.config.pages_per_stop).min(region.max_stop());
            let is_registered = || self.layout.stands(&region);
            given_back += giveback::give_back(&region, &stretch, cap, is_registered)?;
        }
        Ok(given_back)
    }
}
