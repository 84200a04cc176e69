//! What the whole process has promised the kernel. One test: the flags are the
//! process's, so nothing else may run beside it.
#![cfg(feature = "linux")]

mod linux_common;

use ksm_core::RegisterError;
use ksm_core::backend::RegionOptions;
use linux_common::{Guest, lock_future_mappings, refusal, set_memory_merge};

/// Facts 9 and 10: PR_SET_MEMORY_MERGE and MCL_FUTURE are found even where the
/// memory itself was mapped before.
#[test]
fn facts_9_and_10_flags_of_the_process_are_refused() {
    let guest = Guest::new(16);
    let options = RegionOptions::default();
    set_memory_merge(true);
    let unmarked = Guest::new(16);
    let error = refusal(&unmarked, options);
    assert!(
        matches!(error, RegisterError::Mergeable { .. }),
        "{error:?}"
    );
    set_memory_merge(false);
    lock_future_mappings(true);
    let error = refusal(&guest, options);
    assert!(matches!(error, RegisterError::Locked { .. }), "{error:?}");
    lock_future_mappings(false);
    let guest = Guest::new(16);
    linux_common::Bench::with(
        linux_common::backend(ksm_core::backend::linux::StopMethod::Auto),
        guest,
        options,
    );
}
