//! Frames that are being emptied: pages map them still, nobody comes to map them.

use super::Domain;
use crate::backend::Backend;
use crate::page::FrameId;
use crate::sharing::Sharing;

impl<B: Backend> Domain<B> {
    /// Lets nobody come to map `frame` from here on: whoever looks for its content
    /// finds another frame of it, or none. It goes with the last page that maps it.
    /// One page at least is to be kept from leaving it meanwhile.
    pub(crate) fn seal(&self, frame: FrameId) {
        let mut sharing = self.sharing.lock();
        if sharing.rmap.node(frame).is_some_and(|node| node.live) {
            self.bury(&mut sharing, frame);
            if !sharing.sealed.contains(&frame) {
                sharing.sealed.push(frame);
            }
        }
    }

    /// How many pages still map a frame that was sealed.
    pub(crate) fn sealed_sharers(&self, frame: FrameId) -> u64 {
        self.sharing.lock().sealed_sharers(frame)
    }

    /// The frames that were sealed and that pages still map.
    pub(crate) fn sealed(&self) -> Vec<FrameId> {
        let mut sharing = self.sharing.lock();
        let mut sealed = std::mem::take(&mut sharing.sealed);
        sealed.retain(|&frame| sharing.sealed_sharers(frame) > 0);
        sharing.sealed.clone_from(&sealed);
        sealed
    }
}

impl Sharing {
    /// Only what is sealed is mapped without being live.
    fn sealed_sharers(&self, frame: FrameId) -> u64 {
        let node = self.rmap.node(frame).filter(|node| !node.live);
        node.map_or(0, |node| u64::from(node.sharers))
    }
}
