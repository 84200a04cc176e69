//! [`HostRegion`]: guest memory as vm-memory knows it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::bitmap::{Bitmap, NewBitmap};
use vm_memory::mmap::FromRangesError;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryError, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress, MmapRegion,
};

use crate::page::{PAGE_SIZE, PageBuf, PageIndex};

/// A region of guest memory to be registered: vm-memory's [`GuestRegionMmap`], or
/// another [`GuestMemoryRegion`] that is mapped in this process.
///
/// The region is kept alive, and with it the mapping, for as long as it is
/// registered. Its dirty bitmap is never touched: a merge changes no byte.
/// Pages that are merged get new mappings, which carry what `madvise` said of the old
/// ones, but neither a NUMA policy (`mbind`: frames lie where the store's do) nor a
/// name (`PR_SET_VMA_ANON_NAME`).
///
/// Private anonymous memory can be registered as it is. Shared memory is
/// refused, unless it is a memfd of this process alone and
/// [declared](HostRegion::memfd_owned) to be. Memory that other processes map
/// (a window for vhost-user, say) is not to be registered; the other regions of
/// such a guest can be, each as what it is.
#[derive(Clone)]
pub struct HostRegion {
    pages: Arc<dyn GuestPages>,
    kind: Kind,
    /// Mapped here, and not registered yet: see [`HostRegion::map`].
    fresh: Arc<AtomicBool>,
}

/// What a region is made of, as its owner says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Anonymous,
    Memfd,
}

impl HostRegion {
    /// Guest memory in `region`.
    pub fn new<B>(region: Arc<GuestRegionMmap<B>>) -> Self
    where
        B: Bitmap + Send + Sync + 'static,
    {
        // SAFETY: it owns a mapping of its length at that address, which stays until
        // it is dropped (whoever made it of a raw pointer has promised so), and gives
        // out no references to it but atomic ones.
        unsafe { Self::of(region) }
    }

    /// Guest memory in a region of another type, one that wraps a
    /// [`GuestRegionMmap`], say.
    ///
    /// # Safety
    /// [`GuestMemoryRegion::get_host_address`] is where [`GuestMemoryRegion::len`] bytes
    /// are mapped for as long as `region` lives, and always says the same. No Rust
    /// reference points there, but to atomics: pages are mapped over.
    pub unsafe fn of<R>(region: Arc<R>) -> Self
    where
        R: GuestMemoryRegion + Send + Sync + 'static,
    {
        Self {
            pages: region,
            kind: Kind::Anonymous,
            fresh: Arc::default(),
        }
    }

    /// Maps `bytes` of fresh private anonymous memory (`MAP_NORESERVE`), as
    /// vm-memory's [`MmapRegion::new`] does, for a guest's hotplug: what it carries
    /// is known, and need not be read from `/proc/self/smaps` at registration, which
    /// takes the longer the more memory the process has, and holds up changes of
    /// its layout.
    ///
    /// Until it is registered it must not be locked, nor be given advice, nor be
    /// mapped over.
    ///
    /// # Errors
    /// When the host refuses, or the region does not fit into guest addresses.
    pub fn map<B>(
        guest_base: GuestAddress,
        bytes: usize,
    ) -> Result<(Arc<GuestRegionMmap<B>>, Self), FromRangesError>
    where
        B: NewBitmap + Send + Sync + 'static,
    {
        let mapping = MmapRegion::new(bytes).map_err(FromRangesError::MmapRegion)?;
        let region = GuestRegionMmap::new(mapping, guest_base);
        let region = Arc::new(region.ok_or(FromRangesError::InvalidGuestRegion)?);
        let source = Self {
            fresh: Arc::new(AtomicBool::new(true)),
            ..Self::new(Arc::clone(&region))
        };
        Ok((region, source))
    }

    /// Whether it is as [`HostRegion::map`] has mapped it. Once: what has been
    /// registered may have frames below its pages.
    pub(super) fn take_fresh(&self) -> bool {
        self.fresh.swap(false, Ordering::Relaxed)
    }

    /// Declares that the region is a memfd, mapped `MAP_SHARED`, and this process
    /// its only user: nobody else has the descriptor or maps it, and here it is
    /// mapped once and neither read nor written through descriptors while it is
    /// registered. Of a file that is mapped in several places, as below and above
    /// the hole for devices, each region is a part of its own.
    ///
    /// Merged pages are punched out of the memfd, which is what frees them: a
    /// snapshot that is taken by reading the file needs the region unregistered.
    /// A memfd that is sealed against writing while it is registered is merged no
    /// more, and what was merged cannot be put back.
    ///
    /// The region must be `dma_guarded`
    /// ([`RegionOptions`](crate::RegionOptions::dma_guarded)).
    ///
    /// What can be checked is checked at registration
    /// ([`RegisterError::Memfd`](crate::RegisterError::Memfd)). That no other
    /// process maps the file cannot be: **it would see zeros where pages were
    /// merged, and its writes would be lost**.
    #[must_use]
    pub fn memfd_owned(self) -> Self {
        Self {
            kind: Kind::Memfd,
            ..self
        }
    }

    /// The file of a region declared to be a memfd of this process alone.
    pub(super) fn owned_memfd(&self) -> Option<Option<&FileOffset>> {
        (self.kind == Kind::Memfd).then(|| self.pages.file())
    }

    /// Address of the first byte in this process, if it has one.
    pub(super) fn host_address(&self) -> Option<usize> {
        let address = self.pages.host_address().ok()?;
        Some(address.expose_provenance())
    }

    /// Length in bytes.
    pub(super) fn byte_len(&self) -> u64 {
        self.pages.byte_len()
    }

    /// Copies a page as it is now, possibly torn.
    pub(super) fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), GuestMemoryError> {
        self.pages.read(page.byte_offset(), buf)
    }
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegion")
            .field("host_address", &self.host_address())
            .field("byte_len", &self.byte_len())
            .field("kind", &self.kind)
            .finish()
    }
}

/// The part of [`GuestMemoryRegion`] that is needed here, object-safe.
trait GuestPages: Send + Sync {
    fn host_address(&self) -> Result<*mut u8, GuestMemoryError>;
    fn byte_len(&self) -> u64;
    fn file(&self) -> Option<&FileOffset>;
    fn read(&self, offset: u64, buf: &mut PageBuf) -> Result<(), GuestMemoryError>;
}

impl<R: GuestMemoryRegion + Send + Sync> GuestPages for R {
    fn host_address(&self) -> Result<*mut u8, GuestMemoryError> {
        self.get_host_address(MemoryRegionAddress(0))
    }

    fn byte_len(&self) -> u64 {
        self.len()
    }

    fn file(&self) -> Option<&FileOffset> {
        self.file_offset()
    }

    fn read(&self, offset: u64, buf: &mut PageBuf) -> Result<(), GuestMemoryError> {
        let slice = self.get_slice(MemoryRegionAddress(offset), PAGE_SIZE)?;
        slice.copy_to(&mut buf.bytes_mut()[..]);
        Ok(())
    }
}
