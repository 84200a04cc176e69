//! [`Snapshot`]: a value that is replaced as a whole, so that whoever goes
//! through it holds no lock and still sees one state of it.
//!
//! Each edition has a sequence number. A traversal that began with one edition
//! asks at its end whether that is still the last: if so, it has seen everything
//! that there was (the rule of `mmap_lock_speculate_retry`).

use std::ops::Deref;
use std::sync::Arc;

use crate::sync::Mutex;

/// One state of the value.
#[derive(Debug, Default)]
pub(crate) struct Edition<T> {
    /// How many editions there were before.
    pub(crate) sequence: u64,
    value: T,
}

impl<T> Deref for Edition<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// The last edition.
#[derive(Debug, Default)]
pub(crate) struct Snapshot<T> {
    /// Held to take a reference or to exchange it, never while an edition is made.
    last: Mutex<Arc<Edition<T>>>,
    /// One edition is made at a time.
    editing: Mutex<()>,
}

impl<T> Snapshot<T> {
    /// The last edition. Waits for no editor.
    pub(crate) fn read(&self) -> Arc<Edition<T>> {
        Arc::clone(&self.last.lock())
    }

    /// Whether the edition of that number is still the last one.
    pub(crate) fn is_last(&self, sequence: u64) -> bool {
        self.last.lock().sequence == sequence
    }

    /// Publishes what `edit` makes of the last edition, and returns what it says
    /// of it. Nothing is published when it makes nothing.
    pub(crate) fn edit<R>(&self, edit: impl FnOnce(&T) -> (Option<T>, R)) -> R {
        let _editing = self.editing.lock();
        let last = self.read();
        let (value, said) = edit(&last);
        if let Some(value) = value {
            let sequence = last.sequence + 1;
            *self.last.lock() = Arc::new(Edition { sequence, value });
        }
        said
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::thread;

    use super::Snapshot;

    fn add(snapshot: &Snapshot<Vec<u32>>, entry: u32) {
        snapshot.edit(|entries| {
            let mut entries = entries.clone();
            entries.push(entry);
            (Some(entries), ())
        });
    }

    /// Two editors at once lose nothing, and a reader sees no half of an edit.
    #[test]
    fn loom_editions_follow_one_another() {
        loom::model(|| {
            let snapshot = Arc::new(Snapshot::<Vec<u32>>::default());
            let editor = thread::spawn({
                let snapshot = Arc::clone(&snapshot);
                move || add(&snapshot, 1)
            });
            add(&snapshot, 2);
            let seen = snapshot.read();
            assert_eq!(seen.sequence, seen.len() as u64);
            assert!(seen.contains(&2));
            editor.join().unwrap();
            let last = snapshot.read();
            assert_eq!((last.sequence, last.len()), (2, 2));
        });
    }

    /// What a traversal relies on: where the edition it went through is still
    /// the last, it has missed nothing that had come before it asked.
    #[test]
    fn loom_a_traversal_knows_whether_it_was_complete() {
        loom::model(|| {
            let snapshot = Arc::new(Snapshot::<Vec<u32>>::default());
            let has_come = Arc::new(AtomicBool::new(false));
            let editor = thread::spawn({
                let (snapshot, has_come) = (Arc::clone(&snapshot), Arc::clone(&has_come));
                move || {
                    add(&snapshot, 1);
                    has_come.store(true, Ordering::Release);
                }
            });
            let edition = snapshot.read();
            let traversed = edition.to_vec();
            let has_come = has_come.load(Ordering::Acquire);
            if snapshot.is_last(edition.sequence) && has_come {
                assert_eq!(traversed, [1]);
            }
            editor.join().unwrap();
            assert_eq!(snapshot.is_last(edition.sequence), edition.sequence == 1);
        });
    }
}
