//! What is asked of the regions of guest memory.

use std::sync::Arc;

use ksm_core::page::{is_page_aligned, pages_in};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionCollection, MemoryRegionAddress,
};

use crate::guest::GuestError;

/// The regions of `memory`, by address.
pub(crate) fn arcs<R: GuestMemoryRegion>(
    memory: &GuestRegionCollection<R>,
) -> Result<Vec<Arc<R>>, GuestError> {
    let of = |region: &R| {
        let (start, bytes) = (region.start_addr(), region.len());
        // The only way to a region's `Arc`: a copy of the list without it.
        let found = memory.remove_region(start, bytes);
        found
            .map(|(_, region)| region)
            .map_err(|_| GuestError::Unmapped(start.0))
    };
    memory.iter().map(of).collect()
}

/// A region's start, its length in pages, and where it is in this process.
pub(crate) type Extent = (GuestAddress, u64, Option<usize>);

pub(crate) fn extent<R: GuestMemoryRegion>(region: &R) -> Extent {
    let host = region.get_host_address(MemoryRegionAddress(0)).ok();
    let host = host.map(|pointer| pointer.addr());
    (region.start_addr(), pages_in(region.len()), host)
}

pub(crate) fn whole_pages(start: GuestAddress, bytes: u64) -> Result<(), GuestError> {
    if is_page_aligned(start.0) && is_page_aligned(bytes) {
        return Ok(());
    }
    Err(GuestError::NotWholePages {
        address: start.0,
        bytes,
    })
}
