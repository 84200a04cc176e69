//! Calls to a host by name, and which of them are to fail.

use std::fmt;
use std::io;
use std::str::FromStr;

use super::rng::Rng;
use crate::error::BackendError;

/// A kind of call to the simulated host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Backend::open_store`](crate::backend::Backend::open_store).
    OpenStore,
    /// [`Backend::attach`](crate::backend::Backend::attach).
    Attach,
    /// [`FrameStore::fill`](crate::backend::FrameStore::fill).
    Fill,
    /// [`FrameStore::read`](crate::backend::FrameStore::read).
    ReadFrame,
    /// [`FrameStore::punch`](crate::backend::FrameStore::punch).
    Punch,
    /// [`Memory::populated`](crate::backend::Memory::populated).
    Populated,
    /// [`Memory::read`](crate::backend::Memory::read).
    Read,
    /// [`Memory::stop`](crate::backend::Memory::stop).
    Stop,
    /// [`Memory::read_held`](crate::backend::Memory::read_held).
    ReadHeld,
    /// [`Memory::share`](crate::backend::Memory::share).
    Share,
    /// [`Memory::reuse`](crate::backend::Memory::reuse).
    Reuse,
    /// [`Memory::zero`](crate::backend::Memory::zero).
    Zero,
    /// [`Memory::restore`](crate::backend::Memory::restore).
    Restore,
    /// [`Memory::populate`](crate::backend::Memory::populate).
    Populate,
    /// [`Memory::discard`](crate::backend::Memory::discard).
    Discard,
    /// [`Memory::split`](crate::backend::Memory::split).
    Split,
    /// [`Memory::adopt`](crate::backend::Memory::adopt).
    Adopt,
    /// [`Memory::vacate`](crate::backend::Memory::vacate).
    Vacate,
    /// [`Memory::fill`](crate::backend::Memory::fill).
    FillPage,
}

impl Call {
    /// Every kind.
    pub const ALL: [Self; 19] = [
        Self::OpenStore,
        Self::Attach,
        Self::Fill,
        Self::ReadFrame,
        Self::Punch,
        Self::Populated,
        Self::Read,
        Self::Stop,
        Self::ReadHeld,
        Self::Share,
        Self::Reuse,
        Self::Zero,
        Self::Restore,
        Self::Populate,
        Self::Discard,
        Self::Split,
        Self::Adopt,
        Self::Vacate,
        Self::FillPage,
    ];

    /// Its name in scripts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenStore => "open_store",
            Self::Attach => "attach",
            Self::Fill => "fill",
            Self::ReadFrame => "read_frame",
            Self::Punch => "punch",
            Self::Populated => "populated",
            Self::Read => "read",
            Self::Stop => "stop",
            Self::ReadHeld => "read_held",
            Self::Share => "share",
            Self::Reuse => "reuse",
            Self::Zero => "zero",
            Self::Restore => "restore",
            Self::Populate => "populate",
            Self::Discard => "discard",
            Self::Split => "split",
            Self::Adopt => "adopt",
            Self::Vacate => "vacate",
            Self::FillPage => "fill_page",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Call {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|call| call.name() == text);
        found.ok_or_else(|| format!("no call is named {text:?}"))
    }
}

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// [`BackendError::NoVmas`].
    NoVmas,
    /// [`BackendError::OutOfMemory`].
    OutOfMemory,
    /// [`BackendError::Again`].
    Again,
    /// [`BackendError::Host`] with `EIO`.
    Io,
}

impl Failure {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::NoVmas, Self::OutOfMemory, Self::Again, Self::Io];

    /// Its name in scripts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoVmas => "no_vmas",
            Self::OutOfMemory => "out_of_memory",
            Self::Again => "again",
            Self::Io => "io",
        }
    }

    pub(super) fn error(self, call: Call) -> BackendError {
        match self {
            Self::NoVmas => BackendError::NoVmas,
            Self::OutOfMemory => BackendError::OutOfMemory,
            Self::Again => BackendError::Again,
            Self::Io => BackendError::Host {
                call: call.name(),
                source: io::Error::other("made to fail"),
            },
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Failure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|failure| failure.name() == text);
        found.ok_or_else(|| format!("no failure is named {text:?}"))
    }
}

/// Which calls are to fail, and how many were made.
#[derive(Debug, Default)]
pub(super) struct FailurePlan {
    calls: [u64; Call::ALL.len()],
    /// The call of this kind that fails, counted from the host's beginning.
    nth: Vec<(Call, u64, Failure)>,
    often: Vec<(Call, u32, Failure)>,
}

impl FailurePlan {
    pub(super) fn fail_nth(&mut self, call: Call, failure: Failure, nth: u64) {
        self.nth.push((call, self.calls(call) + nth, failure));
    }

    pub(super) fn fail_often(&mut self, call: Call, failure: Failure, per_mille: u32) {
        self.often.push((call, per_mille, failure));
    }

    pub(super) fn clear(&mut self) {
        self.nth.clear();
        self.often.clear();
    }

    pub(super) const fn calls(&self, call: Call) -> u64 {
        self.calls[call as usize]
    }

    /// Counts a call, and says how it fails if it is to.
    pub(super) fn count(&mut self, call: Call, rng: &mut Rng) -> Option<Failure> {
        self.calls[call as usize] += 1;
        let now = self.calls(call);
        let due = |(kind, nth, _): &(Call, u64, Failure)| *kind == call && *nth == now;
        if let Some(place) = self.nth.iter().position(due) {
            return Some(self.nth.swap_remove(place).2);
        }
        let mut hits = self.often.iter().filter(|(kind, ..)| *kind == call);
        hits.find(|&&(_, per_mille, _)| rng.chance(per_mille))
            .map(|&(.., failure)| failure)
    }
}
