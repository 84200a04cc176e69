//! [`Windows`]: the store as the engine reads it, through a mapping.
//!
//! A frame is read while writers wait for the comparison, and a read through a
//! mapping costs a third of a `pread`. But a mapped read of a frame that has no
//! memory would allocate some, or raise SIGBUS past the end of the file: so it
//! is known here which frames have.

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::Advice;

use super::mapping;
use super::span::{Span, usize_from};
use super::staging::copy_page;
use crate::page::{FrameId, FrameRange, PageBuf, bytes_in};

/// log2 of the frames in the first window; the second has as many, each later
/// one twice those of the one before.
const FIRST_SHIFT: u32 = 16;
/// Windows that hold all frames there can be.
const WINDOWS: usize = 1 + (u32::BITS - FIRST_SHIFT) as usize;

/// The windows that are needed so far. None moves, so none needs a lock.
#[derive(Debug, Default)]
pub(super) struct Windows([OnceLock<Window>; WINDOWS]);

#[derive(Debug)]
struct Window {
    /// None when there was no address space or mapping for it.
    span: Option<Span>,
    /// Whether each frame has memory.
    reserved: Box<[AtomicU64]>,
}

/// Where a frame is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    window: usize,
    /// The window's first frame.
    start: u64,
    /// How many frames it holds.
    len: u64,
    /// The frame's place in it.
    index: u64,
}

impl Place {
    fn of(frame: FrameId) -> Self {
        let frame = u64::from(frame.0);
        let above = frame >> FIRST_SHIFT;
        // 0 for the first window, then one more with each bit.
        let window = u64::BITS - above.leading_zeros();
        let (start, len) = match window {
            0 => (0, 1 << FIRST_SHIFT),
            n => (1 << (FIRST_SHIFT + n - 1), 1 << (FIRST_SHIFT + n - 1)),
        };
        Self {
            window: window as usize,
            start,
            len,
            index: frame - start,
        }
    }
}

impl Windows {
    /// Those of an empty file. The first is there from now on: a merge would have to
    /// wait for the lock of the address space to map it.
    pub(super) fn new(fd: BorrowedFd<'_>) -> Self {
        let windows = Self::default();
        windows.at(fd, Place::of(FrameId(0)));
        windows
    }

    fn at(&self, fd: BorrowedFd<'_>, place: Place) -> &Window {
        self.0[place.window].get_or_init(|| Window::new(fd, place))
    }

    /// Notes that `frames` have memory from now on, or have none any more.
    pub(super) fn note(&self, fd: BorrowedFd<'_>, frames: FrameRange, reserved: bool) {
        for frame in frames.iter() {
            let place = Place::of(frame);
            let word = &self.at(fd, place).reserved[usize_from(place.index / 64)];
            let bit = 1 << (place.index % 64);
            if reserved {
                word.fetch_or(bit, Ordering::AcqRel);
            } else {
                word.fetch_and(!bit, Ordering::AcqRel);
            }
        }
    }

    /// Copies a frame; a frame without memory is zero. Returns whether it could:
    /// otherwise the caller reads the file.
    pub(super) fn read(&self, frame: FrameId, buf: &mut PageBuf) -> bool {
        let place = Place::of(frame);
        let reserved = self.0[place.window].get().filter(|window| {
            let word = window.reserved[usize_from(place.index / 64)].load(Ordering::Acquire);
            word >> (place.index % 64) & 1 != 0
        });
        match reserved {
            None => buf.bytes_mut().fill(0),
            Some(window) => match window.span {
                None => return false,
                Some(span) => copy_page(span.part(place.index, 1), buf),
            },
        }
        true
    }
}

impl Window {
    fn new(fd: BorrowedFd<'_>, place: Place) -> Self {
        let span = mapping::map_file(fd, bytes_in(place.start), place.len).ok();
        if let Some(span) = span {
            for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
                let _ = mapping::advise(span, advice);
            }
        }
        Self {
            span,
            reserved: (0..place.len / 64).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(span) = self.span {
            mapping::unmap(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_hold_every_frame_once() {
        let mut expected = 0;
        for window in 0..WINDOWS {
            let place = Place::of(FrameId(u32::try_from(expected).unwrap()));
            assert_eq!(
                (place.window, place.start, place.index),
                (window, expected, 0)
            );
            let last = FrameId(u32::try_from(expected + place.len - 1).unwrap());
            assert_eq!(Place::of(last).index, place.len - 1);
            assert_eq!(Place::of(last).window, window);
            expected += place.len;
        }
        assert_eq!(expected, 1 << 32);
    }
}
