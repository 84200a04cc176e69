//! What a guest, the embedder and the host do to guest memory.

use std::fmt;
use std::sync::Arc;

use super::Host;
use super::page::{Bytes, Hold, SimPageState, Write};
use super::region::Waiter;
use super::world::World;
use crate::backend::PageState;
use crate::page::{PageBuf, PageIndex, PageRange};

/// Whether a write was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It was.
    Done,
    /// Its page is stopped or out: it waits, and is done when the page is lifted.
    Waits,
}

/// A piece of guest memory on a simulated host: what is registered, and the
/// guest's and the embedder's own access to it. Clones are handles on the same
/// memory, for any thread.
#[derive(Clone)]
pub struct SimGuest {
    host: Arc<Host>,
    region: usize,
}

impl fmt::Debug for SimGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimGuest({})", self.region)
    }
}

impl SimGuest {
    pub(super) const fn new(host: Arc<Host>, region: usize) -> Self {
        Self { host, region }
    }

    pub(super) const fn region(&self) -> usize {
        self.region
    }

    /// Length, in pages.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.host.lock().regions[self.region].len()
    }

    /// Pauses the guest's vCPUs or lets them run: while they are paused a
    /// [`Storm`](super::Storm) leaves its pages alone, except that it swaps some.
    pub fn pause(&self, paused: bool) {
        self.host.lock().regions[self.region].paused = paused;
    }

    /// Writes a whole page.
    pub fn write(&self, page: PageIndex, bytes: &PageBuf) -> Access {
        self.act(page, Write::Whole(Arc::new(bytes.clone())))
    }

    /// Writes one byte of a page.
    pub fn write_byte(&self, page: PageIndex, offset: usize, value: u8) -> Access {
        self.act(page, Write::Byte(offset, value))
    }

    /// Drops a page without telling the engine, as `MADV_DONTNEED` does. The
    /// guest reads zeros then, **or the frame's bytes** where the page stands
    /// over a frame: there only [`Ksm::discard`](crate::Ksm::discard) is right.
    pub fn discard_raw(&self, page: PageIndex) -> Access {
        self.act(page, Write::Drop)
    }

    fn act(&self, page: PageIndex, write: Write) -> Access {
        let mut world = self.host.lock();
        let region = &mut world.regions[self.region];
        if region.write_waits(page) {
            let vcpu = None;
            region.waiters.push(Waiter { page, write, vcpu });
            return Access::Waits;
        }
        world.apply(self.region, page, &write);
        Access::Done
    }

    /// Reads a page, if that does not have to wait.
    #[must_use]
    pub fn try_read(&self, page: PageIndex) -> Option<PageBuf> {
        self.read_now(&mut self.host.lock(), page)
    }

    /// Reads a page. If it is out, this waits until another thread lifts it.
    #[must_use]
    pub fn read(&self, page: PageIndex) -> PageBuf {
        let mut world = self.host.lock();
        loop {
            if let Some(bytes) = self.read_now(&mut world, page) {
                return bytes;
            }
            world = self.host.wait(world);
        }
    }

    /// Waits until no write to `page` waits any more: for a thread that plays a
    /// vCPU, after [`Access::Waits`].
    pub fn wait_for_writes(&self, page: PageIndex) {
        let mut world = self.host.lock();
        while world.regions[self.region].write_waits(page) {
            world = self.host.wait(world);
        }
    }

    fn read_now(&self, world: &mut World, page: PageIndex) -> Option<PageBuf> {
        if world.regions[self.region].read_waits(page) {
            return None;
        }
        world.touch(self.region, page);
        Some(PageBuf::clone(&world.bytes(self.region, page)))
    }

    /// A page's bytes as the guest would read them, without the read: nothing is
    /// brought into the page table. `None` if a read would wait.
    #[must_use]
    pub fn peek(&self, page: PageIndex) -> Option<PageBuf> {
        let world = self.host.lock();
        let waits = world.regions[self.region].read_waits(page);
        (!waits).then(|| PageBuf::clone(&world.bytes(self.region, page)))
    }

    /// A page's state.
    #[must_use]
    pub fn state(&self, page: PageIndex) -> SimPageState {
        self.host.lock().regions[self.region].page(page).state()
    }

    /// What the page map says of a page, as in
    /// [`Memory::populated`](crate::backend::Memory::populated).
    #[must_use]
    pub fn mapped(&self, page: PageIndex) -> Option<PageState> {
        let world = self.host.lock();
        world.regions[self.region]
            .page(page)
            .mapped(world.config.stop)
    }

    /// Pages in `state`.
    #[must_use]
    pub fn count(&self, state: SimPageState) -> u64 {
        let world = self.host.lock();
        let pages = world.regions[self.region].pages.iter();
        pages.filter(|page| page.state() == state).count() as u64
    }

    /// Pins a page for DMA, which writes to it as the guest would: it gets
    /// bytes of its own. Returns whether it is pinned: not while it is held.
    ///
    /// Where the host cannot notice it (in memory that is declared
    /// `dma_guarded`, and without [`Stop::Move`](super::Stop::Move)), the
    /// engine must know of it by a guard: it breaks a rule if it stops the page.
    pub fn pin(&self, page: PageIndex) -> bool {
        let mut world = self.host.lock();
        if world.regions[self.region].page(page).hold != Hold::Free {
            return false;
        }
        world.apply(self.region, page, &Write::Same);
        world.regions[self.region].page_mut(page).pinned = true;
        true
    }

    /// Ends a pin.
    pub fn unpin(&self, page: PageIndex) {
        self.host.lock().regions[self.region].page_mut(page).pinned = false;
    }

    /// Whether a page, or the huge page that it is part of, is pinned.
    #[must_use]
    pub fn is_pinned(&self, page: PageIndex) -> bool {
        self.host.lock().is_pinned(self.region, page)
    }

    /// Swaps a page out. Returns whether it is swapped then: only a page with
    /// bytes of its own can be.
    pub fn swap_out(&self, page: PageIndex) -> bool {
        self.host.lock().swap_out(self.region, page)
    }

    /// Whether a page is in swap.
    #[must_use]
    pub fn is_swapped(&self, page: PageIndex) -> bool {
        let world = self.host.lock();
        matches!(world.regions[self.region].page(page).bytes, Bytes::Swap(_))
    }

    /// Lets a child share the pages of `range` that have bytes of their own, as
    /// after a `fork()`: until they are written, they are not exclusive.
    pub fn fork(&self, range: PageRange) {
        let mut world = self.host.lock();
        for page in range.iter() {
            let page = world.regions[self.region].page_mut(page);
            page.forked = page.own().is_some() && !page.pinned;
        }
    }

    /// Whether a child shares a page.
    #[must_use]
    pub fn is_forked(&self, page: PageIndex) -> bool {
        self.host.lock().regions[self.region].page(page).forked
    }

    /// Makes the aligned pages around `page` one huge page, as khugepaged does:
    /// absent and zero ones among them become private. Returns whether it is one
    /// then: not where anything is held, pinned, swapped, forked or over a frame.
    pub fn collapse(&self, page: PageIndex) -> bool {
        let mut world = self.host.lock();
        let range = world.huge_range(page);
        let region = &world.regions[self.region];
        let fit = range.end.0 <= region.len()
            && region.each(range).all(|(_, page)| {
                page.hold == Hold::Free
                    && page.below.is_none()
                    && !page.pinned
                    && !page.forked
                    && !matches!(page.bytes, Bytes::Swap(_))
            });
        if !fit {
            return false;
        }
        for page in range.iter() {
            let bytes = Bytes::Own(world.bytes(self.region, page));
            world.put(self.region, page, None, bytes);
            world.regions[self.region].page_mut(page).huge = true;
        }
        true
    }

    /// Whether a page is part of a huge page.
    #[must_use]
    pub fn is_huge(&self, page: PageIndex) -> bool {
        self.host.lock().regions[self.region].page(page).huge
    }

    /// What happened to this memory since the last call other than through
    /// this handle, in order: the bytes that the storm gave a page, or nothing
    /// where a page was dropped, by the storm or by the engine. Kept only while
    /// there is a storm.
    #[must_use]
    pub fn take_storm_log(&self) -> Vec<(PageIndex, Option<Arc<PageBuf>>)> {
        std::mem::take(&mut self.host.lock().regions[self.region].log)
    }
}
