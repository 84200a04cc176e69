//! Clones, memory that is taken over, and changes of a region's shape, in the middle
//! of which a thread comes to grief, on either backend.
#![allow(dead_code)] // Not all scenes are played on real memory.

use ksm_core::backend::Backend;
use ksm_core::fault::Step;
use ksm_core::{Error, Ksm, PageIndex, PageRange, RegionId, RegionOptions, SpaceId};

/// Pages of each guest.
pub(crate) const PAGES: u64 = 20;
pub(crate) const GUARDED: RegionOptions = RegionOptions { dma_guarded: true };

/// In the middle of what it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    FirstClone,
    SecondClone,
    /// There are no mappings: its pages are copied.
    CopiedClone,
    TakeOver,
    SecondTakeOver,
    Move,
    Split,
    UnregisterPart,
}

impl Scene {
    pub(crate) const fn takes_over(self) -> bool {
        matches!(self, Self::TakeOver | Self::SecondTakeOver)
    }

    /// The parent is replaced by what it becomes.
    pub(crate) const fn reshapes(self) -> bool {
        matches!(self, Self::Move | Self::Split | Self::UnregisterPart)
    }

    /// Steps without which it would not be what it is called.
    fn steps(self) -> Vec<Step> {
        let clone = Step::CLONE.to_vec();
        match self {
            Self::FirstClone => [&[Step::Filled, Step::Mapped][..], &clone].concat(),
            Self::SecondClone | Self::SecondTakeOver => clone,
            Self::CopiedClone => vec![Step::Nursed, Step::Reserved, Step::Reared, Step::Known],
            Self::TakeOver => [&[Step::Allotted, Step::Filled][..], &clone].concat(),
            Self::Move => vec![
                Step::Nursed,
                Step::Claimed,
                Step::Reserved,
                Step::Adopted,
                Step::Reared,
                Step::Replaced,
                Step::Gone,
            ],
            Self::Split => vec![Step::Claimed, Step::Parted, Step::Replaced, Step::Gone],
            Self::UnregisterPart => [&Step::RESHAPE[..], &[Step::Stopped, Step::Lifted]].concat(),
        }
    }

    /// Demands that it took `step`, if that is one of its own.
    pub(crate) fn demand(self, step: Step, times: usize, when: &str) {
        assert!(times > 0 || !self.steps().contains(&step), "{when}");
    }

    /// What happens: to `parent`, or in `space` with `place`, where the clone comes to
    /// be or what is taken over. An error says that it is done already, or half done.
    pub(crate) fn act<B: Backend>(
        self,
        ksm: &Ksm<B>,
        parent: RegionId,
        space: SpaceId,
        place: B::Source,
    ) -> Result<(), Error> {
        match self {
            Self::FirstClone | Self::SecondClone | Self::CopiedClone => {
                ksm.fork_region(parent, space, place, GUARDED).map(drop)
            }
            Self::TakeOver | Self::SecondTakeOver => ksm.take_over(space, place, GUARDED).map(drop),
            Self::Move => ksm.move_region(parent, place).map(drop),
            Self::Split => ksm.split(parent, PageIndex(7)).map(drop),
            Self::UnregisterPart => {
                let part = PageRange::new(PageIndex(5), 7);
                ksm.unregister_part(parent, part).map(drop)
            }
        }
    }
}

/// What a page of the parent, and of memory that is taken over, holds.
pub(crate) const fn content(page: u64) -> u64 {
    match page {
        // Zeros.
        9 | 10 | 15 => 0,
        // Equal pages.
        11 | 12 => 5,
        page => 100 + page,
    }
}
