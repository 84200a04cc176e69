//! Whose turn it is: how a pass and changes of the layout keep out of one
//! another's way, by the [`LockPolicy`].

use super::Ksm;
use crate::backend::Backend;
use crate::config::LockPolicy;
use crate::error::Error;
use crate::region::{LeaseGuard, NoLease, Region, RegionGuard};

/// How much a pass wants a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// It has others to look at first.
    Try,
    /// This is what is left to do.
    Wait,
}

/// What came of wanting a region.
pub(super) enum Turn<'a, B: Backend> {
    Now(RegionGuard<'a, B>),
    /// Busy: to be asked for again in this pass.
    Later,
    /// Busy: to be left alone until the next pass.
    NextPass,
    /// It has left.
    Gone,
}

impl<B: Backend> Ksm<B> {
    /// A pass's turn at a region.
    pub(super) fn turn<'a>(
        &'a self,
        region: &'a Region<B>,
        patience: Patience,
    ) -> Result<Turn<'a, B>, NoLease> {
        match self.turn_or_gone(region, patience) {
            Err(NoLease::Gone(_)) => Ok(Turn::Gone),
            turn => turn,
        }
    }

    fn turn_or_gone<'a>(
        &'a self,
        region: &'a Region<B>,
        patience: Patience,
    ) -> Result<Turn<'a, B>, NoLease> {
        Ok(match (self.config.lock_policy, patience) {
            (LockPolicy::PerRegion, Patience::Try) => match region.try_lock()? {
                Some(guard) => Turn::Now(guard),
                None => Turn::Later,
            },
            (LockPolicy::PerRegion, Patience::Wait) => Turn::Now(region.lock()?),
            (LockPolicy::Global, _) => {
                let layout = self.layout_lock.lock()?;
                Turn::Now(region.lock()?.under(layout))
            }
            (LockPolicy::TrySkip, _) => match self.layout_lock.try_lock()? {
                Some(layout) => match region.try_lock()? {
                    Some(guard) => Turn::Now(guard.under(layout)),
                    None => Turn::NextPass,
                },
                None => Turn::NextPass,
            },
        })
    }

    /// A turn at a region that is waited for, whatever the policy; `None` if the
    /// region is gone.
    pub(super) fn turn_in_the_end<'a>(
        &'a self,
        region: &'a Region<B>,
    ) -> Result<Option<RegionGuard<'a, B>>, NoLease> {
        loop {
            match self.turn(region, Patience::Wait)? {
                Turn::Now(guard) => return Ok(Some(guard)),
                Turn::Later | Turn::NextPass => std::thread::yield_now(),
                Turn::Gone => return Ok(None),
            }
        }
    }

    /// What a change of the layout holds from its beginning to its end: nothing,
    /// unless one lock is to guard the whole layout.
    pub(super) fn layout_turn(&self) -> Result<Option<LeaseGuard<'_, ()>>, Error> {
        match self.config.lock_policy {
            LockPolicy::PerRegion => Ok(None),
            LockPolicy::Global | LockPolicy::TrySkip => Ok(Some(self.layout_lock.lock()?)),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
