//! The locks and atomics of the crate: the standard library's, or loom's when
//! it is built with `--cfg loom` to be model-checked.
//!
//! What these locks guard is short and does not panic, so a poisoned lock says
//! only that some thread died elsewhere on its stack: what it guards is whole,
//! and `lock` hands it out.

#[cfg(loom)]
use loom::sync as imp;
#[cfg(not(loom))]
use std::sync as imp;

#[cfg(loom)]
pub(crate) use loom::thread::{ThreadId, current};
#[cfg(not(loom))]
pub(crate) use std::thread::{ThreadId, current};

pub(crate) use imp::atomic;
pub(crate) use imp::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

use std::sync::PoisonError;

/// Mutual exclusion for a few instructions at a time.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Many readers or one writer.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(imp::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waiting for what a [`Mutex`] guards to change.
#[derive(Debug, Default)]
pub(crate) struct Condvar(imp::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(imp::Condvar::new())
    }

    /// Gives the lock up, waits to be notified (or for no reason), takes it again.
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}
