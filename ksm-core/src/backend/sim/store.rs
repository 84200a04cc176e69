//! Frames of the model.

use std::fmt;
use std::sync::Arc;

use super::Host;
use super::call::Call;
use super::world::World;
use crate::backend::FrameStore;
use crate::error::BackendError;
use crate::page::{FrameId, FrameRange, PAGE_SIZE_U64, PageBuf};

/// The frames of one domain on a simulated host.
pub struct SimStore {
    host: Arc<Host>,
    number: usize,
}

impl SimStore {
    pub(super) const fn new(host: Arc<Host>, number: usize) -> Self {
        Self { host, number }
    }

    /// Whether this is a store of `host`, and which.
    pub(super) fn number_on(&self, host: &Arc<Host>) -> Option<usize> {
        Arc::ptr_eq(&self.host, host).then_some(self.number)
    }

    /// A call, with the world's steps around it.
    fn call<R>(
        &self,
        call: Call,
        body: impl FnOnce(&mut World) -> Result<R, BackendError>,
    ) -> Result<R, BackendError> {
        let mut world = self.host.lock();
        world.step(None);
        world.may_fail(call)?;
        while world.asleep.contains(&call) {
            world = self.host.wait(world);
        }
        let result = body(&mut world);
        world.step(None);
        result
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimStore({})", self.number)
    }
}

impl World {
    fn frames_held(&self) -> u64 {
        let frames = self.stores.iter().flat_map(|store| store.values());
        frames.filter(|frame| frame.bytes.is_some()).count() as u64
    }

    fn fill(&mut self, store: usize, id: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        let held = self.frames_held();
        let frame = self.frame(store, id);
        let (shown, copied) = (frame.shown, frame.copied);
        if frame.bytes.is_none() && held >= self.config.max_frames {
            return Err(BackendError::OutOfMemory);
        }
        self.demand(shown == 0, || {
            format!("frame {id} is filled while {shown} pages show it")
        });
        self.demand(copied == 0, || {
            format!("frame {id} is given out again while {copied} copied pages still name it")
        });
        self.frame(store, id).bytes = Some(Arc::new(content.clone()));
        Ok(())
    }

    fn punch(&mut self, store: usize, id: FrameId) {
        let shown = self.frame(store, id).shown;
        self.demand(shown == 0, || {
            format!("frame {id} is punched while {shown} pages show it")
        });
        self.frame(store, id).bytes = None;
    }
}

impl FrameStore for SimStore {
    fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        self.call(Call::Fill, |world| world.fill(self.number, frame, content))
    }

    fn read(&self, frame: FrameId, buf: &mut PageBuf) -> Result<(), BackendError> {
        self.call(Call::ReadFrame, |world| {
            buf.clone_from(world.frame_bytes(self.number, frame));
            Ok(())
        })
    }

    fn punch(&self, frames: FrameRange) -> Result<(), BackendError> {
        self.call(Call::Punch, |world| {
            for id in frames.iter() {
                world.punch(self.number, id);
            }
            Ok(())
        })
    }

    fn allocated_bytes(&self) -> Result<u64, BackendError> {
        let world = self.host.lock();
        let frames = world.stores[self.number].values();
        let held = frames.filter(|frame| frame.bytes.is_some()).count();
        Ok(held as u64 * PAGE_SIZE_U64)
    }
}
