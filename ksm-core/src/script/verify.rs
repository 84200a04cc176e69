//! What must hold between any two operations.

use super::host::Host;
use super::oracle::Cell;
use super::run::{Memory, Runner};
use crate::page::PageIndex;

impl<H: Host> Runner<H> {
    /// Checks every page, every counter and the engine's own records.
    pub(super) fn verify(&mut self) -> Result<(), String> {
        self.host.verdict()?;
        for (number, Memory { guest, oracle }) in self.memories.iter_mut().enumerate() {
            for (page, bytes) in self.host.events(guest) {
                oracle.set(page, bytes.map_or(Cell::Dropped, Cell::Written));
            }
            for page in oracle.range().iter() {
                let Some(bytes) = self.host.peek(guest, page) else {
                    continue;
                };
                if !oracle.reads(page, &bytes) {
                    let wrote = oracle.cell(page);
                    return Err(format!(
                        "page {} of memory {number} reads {bytes:?}, not {wrote:?}",
                        page.0
                    ));
                }
            }
        }
        self.verify_merged()?;
        self.verify_guards()?;
        self.host.hold_still(true);
        let checked = self.ksm.check();
        self.host.hold_still(false);
        checked
    }

    /// The engine knows of every page in which a frame shows; it may not yet
    /// know of those that were written since. Nothing shows one that is not
    /// registered.
    fn verify_merged(&self) -> Result<(), String> {
        let mut merged = 0;
        for (number, memory) in self.memories.iter().enumerate() {
            let pages = self.host.merged(&memory.guest).unwrap_or(0);
            let mut users = self.regions.iter().filter(|user| user.memory == number);
            if pages > 0 && users.all(|user| user.id.is_none()) {
                return Err(format!(
                    "{pages} pages of unregistered memory {number} are merged"
                ));
            }
            merged += pages;
        }
        let stats = self.ksm.stats();
        let known = stats.pages_shared + stats.pages_sharing;
        if merged > known {
            return Err(format!(
                "{merged} pages are merged, {known} by the counters"
            ));
        }
        Ok(())
    }
}

/// A page of a region, for messages.
pub(super) fn name_of(region: usize, page: PageIndex) -> String {
    format!("page {} of r{region}", page.0)
}
