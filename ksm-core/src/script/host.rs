//! What a host must offer for scripts to run on it.

use std::sync::Arc;

use crate::backend::Backend;
use crate::backend::sim::{Call, Failure};
use crate::config::Config;
use crate::page::{PageBuf, PageIndex, PageRange};

/// What a host, or the embedder, may do to guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meddling {
    /// Pins a page for DMA, which the host must notice by itself.
    Pin,
    /// Pins a page for DMA that a guard announces.
    AnnouncedPin,
    /// Ends a pin.
    Unpin,
    /// Swaps pages out.
    Swap,
    /// Shares pages with a child.
    Fork,
    /// Makes the pages around one a huge page.
    Huge,
}

/// What may come over a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// A later call fails: the n-th of its kind, 1 being the next.
    Fail {
        /// Which kind.
        call: Call,
        /// How.
        failure: Failure,
        /// Which of them.
        nth: u64,
    },
    /// VMAs are limited.
    MaxVmas(u64),
    /// Guests and the host race with calls.
    Storm,
    /// No storm, failures and limits any more.
    Calm,
}

/// What a page got behind the runner's back: bytes, or nothing if it was dropped.
pub type Event = (PageIndex, Option<Arc<PageBuf>>);

/// A host that scripts run on: a backend, and the guests' side of it.
pub trait Host {
    /// The backend.
    type Backend: Backend;
    /// A handle on guest memory. It outlives registration.
    type Guest;

    /// The backend, for the engine.
    fn backend(&self) -> Self::Backend;

    /// Settings for the engine. Must make runs repeatable.
    fn config(&self) -> Config {
        Config {
            parallel_pages: u32::MAX,
            seed: Some([1; 32]),
            ..Config::default()
        }
    }

    /// Makes guest memory of `pages` pages that read as zero.
    fn guest(&mut self, pages: u64) -> Self::Guest;

    /// What is registered of it.
    fn source(&self, guest: &Self::Guest) -> <Self::Backend as Backend>::Source;

    /// The guest writes a page.
    fn write(&mut self, guest: &Self::Guest, page: PageIndex, bytes: &PageBuf);

    /// The guest reads a page.
    fn read(&mut self, guest: &Self::Guest, page: PageIndex) -> PageBuf;

    /// Pauses the guest's vCPUs or lets them run, where the host has some.
    fn pause(&mut self, guest: &Self::Guest, paused: bool) {
        let _ = (guest, paused);
    }

    /// Whether a read of a page that holds nothing fills it, as in a file.
    fn reads_fill(&self) -> bool {
        false
    }

    /// Looks at a page's bytes with as little effect as possible, for a check;
    /// `None` to leave this page out.
    fn peek(&mut self, guest: &Self::Guest, page: PageIndex) -> Option<PageBuf> {
        Some(self.read(guest, page))
    }

    /// Meddles with pages; with one only where [`Meddling`] says so. Returns `None` if this host cannot, or it does not
    /// work here; otherwise the pages that surely have bytes of their own now,
    /// which can be none.
    fn meddle(
        &mut self,
        guest: &Self::Guest,
        range: PageRange,
        how: Meddling,
    ) -> Option<PageRange> {
        let _ = (guest, range, how);
        None
    }

    /// Changes the weather. Returns whether this host can.
    fn set_weather(&mut self, weather: Weather) -> bool {
        let _ = weather;
        false
    }

    /// Holds the host still, or lets it go on: no weather while the engine is
    /// only looked at.
    fn hold_still(&mut self, still: bool) {
        let _ = still;
    }

    /// What a storm did to `guest` since the last call, in order.
    fn events(&mut self, guest: &Self::Guest) -> Vec<Event> {
        let _ = guest;
        Vec::new()
    }

    /// Whether a page can be merged, as far as the host is concerned.
    fn mergeable(&self, guest: &Self::Guest, page: PageIndex) -> bool {
        let _ = (guest, page);
        true
    }

    /// Pages of `guest` in which a frame shows, if the host can say.
    fn merged(&self, guest: &Self::Guest) -> Option<u64> {
        let _ = guest;
        None
    }

    /// Whether all is well: nothing stopped or out, nobody waiting, no rule
    /// broken.
    ///
    /// # Errors
    /// What is not.
    fn verdict(&self) -> Result<(), String> {
        Ok(())
    }
}
