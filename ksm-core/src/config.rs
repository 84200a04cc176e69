//! The engine's settings.

use crate::error::Error;

/// How a pass and changes of the layout (regions that come, go, split, move)
/// keep out of one another's way.
///
/// The other two are there to be compared with: they are what the kernel's KSM
/// does, and what was proposed for it and refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockPolicy {
    /// A lock for each region, and a snapshot of the regions to go through. A
    /// pass puts a busy region off and comes back to it in the same pass, at last
    /// waiting in turn. A change waits, in turn, for what is under way in the region it
    /// is about, and for no other region: that is a window
    /// ([`Config::window_pages`]) or a run ([`Config::pages_per_stop`]) of a pass, eight
    /// windows of a clone that is being made of it, 1,024 pages that are unmerged, or
    /// the whole of a discard or a move.
    #[default]
    PerRegion,
    /// One lock for the whole layout, held through each change of it, and waited
    /// for by the pass before each window and each run (the kernel's `mmap_lock`):
    /// changes stall the pass.
    Global,
    /// The same lock, but the pass only tries it, and leaves a region alone until
    /// its next pass if it is busy: changes starve the region.
    TrySkip,
}

/// Settings of an engine. All have sensible defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many passes a page's content must stay the same before it is a
    /// candidate for the unstable tree (the kernel's rule: 1). With 0 a page is
    /// a candidate at first sight.
    pub settle_passes: u8,
    /// Whether pages of zeros become zero pages and cost no frame
    /// (`/sys/kernel/mm/ksm/use_zero_pages`).
    pub use_zero_pages: bool,
    /// The most pages of one region that are looked at before its lease is
    /// given up, 1 to 65,536.
    pub window_pages: u32,
    /// The most pages whose writes are stopped at once, 1 to 65,536. A vCPU that
    /// writes to one of them waits for all.
    pub pages_per_stop: u32,
    /// From how many pages on a window is fingerprinted, and merged pages are given
    /// copies, with the help of the rayon pool that `scan` or `unmerge` is called in:
    /// of those of its threads that are free. No thread that is not is waited for, and
    /// no other job of the pool is done meanwhile, so that its jobs may call the engine
    /// as well. `u32::MAX` for never.
    pub parallel_pages: u32,
    /// The most virtual memory areas that merging may cost over all regions.
    /// `None` for three quarters of what the process may still have
    /// (`vm.max_map_count`) when the engine is made; the rest is the embedder's.
    /// Clones, regions that move and restored memory that is taken over are held to it
    /// as well: where it does not suffice, the first two copy pages that could be
    /// shared ([`Ksm::fork_region`](crate::Ksm::fork_region)), and the third is refused
    /// ([`Error::VmaBudget`]). What is merged at the same time by several calls (a pass,
    /// clones) may exceed it by what one batch of each costs. Mappings that
    /// [`Ksm::unregister`](crate::Ksm::unregister) leaves below copies, in regions that
    /// are not `dma_guarded`, are the embedder's from then on, and not counted.
    pub max_vmas: Option<u64>,
    /// From how many neighbouring pages of one content on they get a block of
    /// equal frames, so that 64 of them need one virtual memory area and not 64,
    /// at least 1. `u32::MAX` for never.
    pub stretch_pages: u32,
    /// The most rmap_items of one frame, at least 2, so that no walk over its
    /// sharers is unbounded; the next page of its content gets another frame
    /// (`/sys/kernel/mm/ksm/max_page_sharing`). Clones of a page do not count.
    pub max_page_sharing: u32,
    /// How a pass and changes of the layout keep out of one another's way.
    pub lock_policy: LockPolicy,
    /// What the secrets of trust domains are made from: random if `None`. With a
    /// seed a run can be repeated, and a guest that knows it can attack the trees:
    /// for tests.
    pub seed: Option<[u8; 32]>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            settle_passes: 1,
            use_zero_pages: true,
            window_pages: 1024,
            pages_per_stop: 256,
            parallel_pages: 256,
            max_vmas: None,
            stretch_pages: 8,
            max_page_sharing: 256,
            lock_policy: LockPolicy::PerRegion,
            seed: None,
        }
    }
}

impl Config {
    /// Checks that every value is in its range.
    ///
    /// # Errors
    /// [`Error::Config`] names the first that is not.
    pub fn validate(&self) -> Result<(), Error> {
        let pages = |name: &str, value: u32| match value {
            1..=65_536 => Ok(()),
            _ => Err(Error::Config(format!("{name} is {value}, not 1 to 65536"))),
        };
        pages("window_pages", self.window_pages)?;
        pages("pages_per_stop", self.pages_per_stop)?;
        match (self.stretch_pages, self.max_page_sharing) {
            (0, _) => Err(Error::Config("stretch_pages is 0".into())),
            (_, few @ 0..2) => Err(Error::Config(format!("max_page_sharing is {few}"))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_named() {
        Config::default().validate().unwrap();
        let zero_stop = Config {
            pages_per_stop: 0,
            ..Config::default()
        };
        let zero_stretch = Config {
            stretch_pages: 0,
            ..Config::default()
        };
        let no_sharing = Config {
            max_page_sharing: 1,
            ..Config::default()
        };
        for (config, words) in [
            (no_sharing, "max_page_sharing is 1"),
            (zero_stop, "pages_per_stop is 0"),
            (zero_stretch, "stretch_pages is 0"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
