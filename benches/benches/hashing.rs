//! What it costs to know a page by: fingerprint and digest, beside a comparison
//! with an equal page, of pages in cache and of pages that come from memory.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ksm_benches::pages;
use ksm_core::PAGE_SIZE;
use ksm_core::internals::Hashing;
use ksm_core::page::PageBuf;

fn hashing(c: &mut Criterion) {
    let keys = Hashing::new([7; 32]);
    // 16 pages stay in the first cache levels, 64 MiB in none.
    for (place, count) in [("cached", 16), ("cold", 16_384)] {
        let pages = pages(count);
        let copies = pages.clone();
        let zeros: Vec<_> = (0..count).map(|_| PageBuf::zeroed()).collect();
        let mut group = c.benchmark_group(format!("hashing/{place}"));
        group.throughput(Throughput::Bytes(PAGE_SIZE as u64));

        let mut next = (0..count).cycle();
        group.bench_function("fingerprint", |b| {
            b.iter(|| keys.fingerprint(&pages[next.next().unwrap_or(0)]));
        });
        group.bench_function("digest", |b| {
            b.iter(|| keys.digest(&pages[next.next().unwrap_or(0)]));
        });
        group.bench_function("compare", |b| {
            b.iter(|| {
                let at = next.next().unwrap_or(0);
                black_box(&pages[at]) == black_box(&copies[at])
            });
        });
        group.bench_function("zero", |b| {
            b.iter(|| zeros[next.next().unwrap_or(0)].is_zero());
        });
        group.finish();
    }
}

criterion_group!(benches, hashing);
criterion_main!(benches);
