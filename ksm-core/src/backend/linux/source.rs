//! [`HostRegion`]: guest memory as vm-memory knows it.

use std::fmt;
use std::sync::Arc;

use vm_memory::{GuestMemoryError, GuestMemoryRegion, MemoryRegionAddress};

use crate::page::{PAGE_SIZE, PageBuf, PageIndex};

/// A region of guest memory to be registered: anything that vm-memory calls a
/// [`GuestMemoryRegion`] and that is mapped in this process.
///
/// The region is kept alive, and with it the mapping, for as long as it is
/// registered. Its dirty bitmap is never touched: a merge changes no byte.
#[derive(Clone)]
pub struct HostRegion(Arc<dyn GuestPages>);

impl HostRegion {
    /// Guest memory in `region`.
    pub fn new<R>(region: Arc<R>) -> Self
    where
        R: GuestMemoryRegion + Send + Sync + 'static,
    {
        Self(region)
    }

    /// Address of the first byte in this process, if it has one.
    pub(super) fn host_address(&self) -> Option<usize> {
        let address = self.0.host_address().ok()?;
        Some(address.expose_provenance())
    }

    /// Length in bytes.
    pub(super) fn byte_len(&self) -> u64 {
        self.0.byte_len()
    }

    /// Copies a page as it is now, possibly torn.
    pub(super) fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), GuestMemoryError> {
        self.0.read(page.byte_offset(), buf)
    }
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegion")
            .field("host_address", &self.host_address())
            .field("byte_len", &self.byte_len())
            .finish()
    }
}

/// The part of [`GuestMemoryRegion`] that is needed here, object-safe.
trait GuestPages: Send + Sync {
    fn host_address(&self) -> Result<*mut u8, GuestMemoryError>;
    fn byte_len(&self) -> u64;
    fn read(&self, offset: u64, buf: &mut PageBuf) -> Result<(), GuestMemoryError>;
}

impl<R: GuestMemoryRegion + Send + Sync> GuestPages for R {
    fn host_address(&self) -> Result<*mut u8, GuestMemoryError> {
        self.get_host_address(MemoryRegionAddress(0))
    }

    fn byte_len(&self) -> u64 {
        self.len()
    }

    fn read(&self, offset: u64, buf: &mut PageBuf) -> Result<(), GuestMemoryError> {
        let slice = self.get_slice(MemoryRegionAddress(offset), PAGE_SIZE)?;
        slice.copy_to(&mut buf.bytes_mut()[..]);
        Ok(())
    }
}
