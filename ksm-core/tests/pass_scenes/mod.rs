//! The passes in which a scanning thread comes to grief, on either backend.
#![allow(clippy::unwrap_used)]

use ksm_core::Ksm;
use ksm_core::backend::Backend;

/// Pages of each of two guests.
pub(crate) const PAGES: u64 = 24;

/// The pass in which it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    Merging,
    GivingBack,
}

pub(crate) const SCENES: [Scene; 2] = [Scene::Merging, Scene::GivingBack];

/// After the accident the engine does what is left.
pub(crate) fn finish<B: Backend>(ksm: &Ksm<B>, scene: Scene, when: &str) {
    for _ in 0..6 {
        ksm.scan(1 << 20).unwrap();
    }
    ksm.check()
        .unwrap_or_else(|error| panic!("{when}: {error}"));
    let stats = ksm.stats();
    let sharing = (
        stats.pages_shared,
        stats.pages_sharing,
        stats.ksm_zero_pages,
    );
    let run = PAGES / 2 - 2;
    let expected = match scene {
        Scene::Merging => (PAGES - 5, PAGES - 5, 10),
        Scene::GivingBack => (run, run, 0),
    };
    assert_eq!(sharing, expected, "{when}");
}
