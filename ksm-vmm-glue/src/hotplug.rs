//! [`Hotplug`]: memory that comes to a running guest, and leaves it.
//!
//! Three know of a guest's memory: the engine (regions), KVM ([`Slots`]) and the
//! map that devices read (`GuestMemoryAtomic`). They change together or not at
//! all, always in this order:
//!
//! | | memory comes | memory leaves | why here |
//! |---|---|---|---|
//! | 1 | the next map is made | the next map is made | refuses what overlaps, or is not there |
//! | 2 | registered with the engine | discarded, if nobody wants its content; unregistered | the step that is refused most often (memory that cannot be merged, pages that a device uses), and no vCPU has noticed yet |
//! | 3 | memory slot set | memory slot removed | |
//! | 4 | the next map is published | the next map is published | cannot fail |
//!
//! When a step fails those before it are undone. Who has a map from before keeps
//! the memory mapped, which is unmapped when the last one lets go: by then the
//! engine has made copies of what was shared, or dropped it, and looks at it no
//! more.
//!
//! A guest is told of memory once it is there, and has given it up before it
//! leaves; how it is told (ACPI, virtio-mem) is the VMM's matter.
//!
//! # vCPUs
//!
//! A vCPU can be added at any time, without a word to the engine, which knows of
//! none: writes are stopped in the page tables of the VMM's process, which KVM's
//! follow (MMU notifiers), for whoever writes; and a vCPU that came in the middle
//! of a stop faults and waits like any other.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, PoisonError};

use ksm_core::backend::Backend;
use thiserror::Error;
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryRegion, GuestRegionCollection,
    GuestRegionCollectionError,
};

use crate::guest::{GuestError, GuestKsm, Mapped};

/// KVM's side of a guest's memory: `KVM_SET_USER_MEMORY_REGION`.
///
/// To give memory to KVM is unsafe, so it is for the VMM to do: `set` is to keep the
/// region alive for as long as its slot lasts.
pub trait Slots<R> {
    /// Why a slot could not be set or removed.
    type Error: Error + Send + Sync + 'static;

    /// Gives a region a memory slot, of whatever number is free.
    ///
    /// # Errors
    /// There is no new slot.
    fn set(&self, region: &Arc<R>) -> Result<(), Self::Error>;

    /// Takes a region's slot away: no vCPU uses its memory when this returns.
    ///
    /// # Errors
    /// The slot is as it was.
    fn remove(&self, region: &Arc<R>) -> Result<(), Self::Error>;
}

/// What becomes of the content of memory that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nobody wants it: nothing is copied, which is quick. It may be gone even if the
    /// memory then stays.
    Drop,
    /// It stays in the memory: pages that were shared get copies.
    Keep,
}

/// A step, of which those before it are undone when it fails.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HotplugError<E: Error + 'static> {
    /// The memory overlaps other memory, or there is none with that address and
    /// length.
    #[error(transparent)]
    Map(#[from] GuestRegionCollectionError),
    /// The engine refused.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// KVM refused.
    #[error("KVM refused the memory slot")]
    Slot(#[source] E),
    /// KVM refused, and so did the engine when it was to go back to what was before:
    /// map and slots are as they were, but memory that was to come is registered, or
    /// memory that was to leave is not (it is plain memory then).
    /// [`GuestKsm::sync`] with the map sets that right.
    #[error("KVM refused the memory slot ({refused}), and the engine what was before")]
    NotUndone {
        /// What KVM said.
        refused: E,
        /// What the engine said.
        #[source]
        undo: GuestError,
    },
}

/// What a guest's memory is known to: the map, the memory slots, and how a region
/// is handed to the engine.
pub struct Hotplug<'a, R, S, F>
where
    R: GuestMemoryRegion,
{
    map: &'a GuestMemoryAtomic<GuestRegionCollection<R>>,
    slots: &'a S,
    source: F,
}

impl<R: GuestMemoryRegion, S: fmt::Debug, F> fmt::Debug for Hotplug<'_, R, S, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots;
        f.debug_struct("Hotplug").field("slots", slots).finish()
    }
}

impl<'a, R, S, F> Hotplug<'a, R, S, F>
where
    R: GuestMemoryRegion,
    S: Slots<R>,
{
    /// `source` says what to hand to the engine for a region: on Linux
    /// [`HostRegion::new`](ksm_core::backend::linux::HostRegion::new), in most cases.
    pub const fn new(
        map: &'a GuestMemoryAtomic<GuestRegionCollection<R>>,
        slots: &'a S,
        source: F,
    ) -> Self {
        Self { map, slots, source }
    }

    /// Adds memory to a guest, which is told of it afterwards. Changes of one map are
    /// made one after another; who reads it never waits.
    ///
    /// # Errors
    /// [`HotplugError`]: map, slots and engine are as they were, but for
    /// [`HotplugError::NotUndone`].
    pub fn add<B>(
        &self,
        guest: &mut GuestKsm<B>,
        region: Arc<R>,
    ) -> Result<Mapped, HotplugError<S::Error>>
    where
        B: Backend,
        F: Fn(Arc<R>) -> B::Source,
    {
        let turn = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let grown = self.map.memory().insert_region(Arc::clone(&region))?;
        let (start, bytes) = (region.start_addr(), region.len());
        let source = || (self.source)(Arc::clone(&region));
        let mapped = guest.add(region.as_ref(), source)?;
        if let Err(refused) = self.slots.set(&region) {
            return Err(after_undo(refused, guest.remove(start, bytes)));
        }
        turn.replace(grown);
        Ok(mapped)
    }

    /// Takes memory away from a guest that has given it up, and returns it. With
    /// [`Content::Keep`] it holds what it held; in a guest that is not
    /// [`dma_guarded`](ksm_core::RegionOptions::dma_guarded) mappings of frames stay
    /// below the copies then, and it cannot be registered again.
    ///
    /// # Errors
    /// As [`Hotplug::add`]. Among them, before anything is done,
    /// [`Error::Pinned`](ksm_core::Error::Pinned) while a device uses pages of it.
    pub fn withdraw<B>(
        &self,
        guest: &mut GuestKsm<B>,
        start: GuestAddress,
        bytes: u64,
        content: Content,
    ) -> Result<Arc<R>, HotplugError<S::Error>>
    where
        B: Backend,
        F: Fn(Arc<R>) -> B::Source,
    {
        let turn = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let (rest, region) = self.map.memory().remove_region(start, bytes)?;
        if content == Content::Drop {
            guest.discard(start, bytes)?;
        }
        guest.remove(start, bytes)?;
        if let Err(refused) = self.slots.remove(&region) {
            let again = guest.add(region.as_ref(), || (self.source)(Arc::clone(&region)));
            return Err(after_undo(refused, again.map(drop)));
        }
        turn.replace(rest);
        Ok(region)
    }
}

fn after_undo<E: Error>(refused: E, undone: Result<(), GuestError>) -> HotplugError<E> {
    match undone {
        Ok(()) => HotplugError::Slot(refused),
        Err(undo) => HotplugError::NotUndone { refused, undo },
    }
}
