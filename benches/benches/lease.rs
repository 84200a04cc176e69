//! A region's lease beside a mutex, when nobody else wants it.

use std::hint::black_box;
use std::sync::Mutex;

use criterion::{Criterion, criterion_group, criterion_main};
use ksm_core::internals::Leased;

fn lease(c: &mut Criterion) {
    let mut group = c.benchmark_group("lease");
    let lease = Leased::default();
    group.bench_function("lease", |b| b.iter(|| lease.with(|| ())));
    let mutex = Mutex::new(());
    group.bench_function("mutex", |b| b.iter(|| black_box(&mutex).lock().is_ok()));
    group.finish();
}

criterion_group!(benches, lease);
criterion_main!(benches);
