//! Searching and filling the trees by the count of their shards: the figures
//! behind the rule by which `reshard` chooses it.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ksm_benches::Numbers;
use ksm_core::internals::{Stable, Unstable};

/// Nodes: those of 1 GiB of unique pages.
const NODES: u32 = 1 << 18;

/// From one deep tree to shards of 16 nodes.
const SHARDS: [usize; 5] = [1, 64, 1 << 10, 1 << 12, 1 << 14];

fn filled(shards: usize) -> Stable {
    let tree = Stable::new(shards);
    for (frame, fingerprint) in (0..NODES).zip(Numbers(1)) {
        tree.insert(fingerprint, frame);
    }
    tree
}

fn stable(c: &mut Criterion) {
    println!("a node of the stable tree: {} bytes", Stable::NODE_BYTES);
    let mut group = c.benchmark_group("stable");
    for shards in SHARDS {
        let tree = filled(shards);
        // In an order that has nothing to do with where the nodes lie.
        let mut order: Vec<u64> = Numbers(1).take(NODES as usize).collect();
        order.sort_unstable_by_key(|fingerprint| fingerprint.rotate_left(32));
        let mut present = order.iter().copied().cycle();
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("find", shards), |b| {
            b.iter(|| present.next().is_some_and(|f| tree.find(f)));
        });
        let mut absent = Numbers(u64::MAX / 2);
        group.bench_function(BenchmarkId::new("miss", shards), |b| {
            b.iter(|| absent.next().is_some_and(|f| tree.find(f)));
        });
    }
    group.sample_size(10);
    group.throughput(Throughput::Elements(u64::from(NODES)));
    for shards in SHARDS {
        group.bench_function(BenchmarkId::new("fill", shards), |b| {
            b.iter_with_large_drop(|| filled(shards));
        });
    }
    group.bench_function("reshard", |b| {
        let few = || filled(64);
        b.iter_batched_ref(few, |t| t.reshard(NODES as usize), BatchSize::PerIteration);
    });
    group.finish();
}

/// One pass of the engine: every page is looked for, half find their equal.
fn unstable(c: &mut Criterion) {
    println!(
        "a node of the unstable tree: {} bytes",
        Unstable::NODE_BYTES
    );
    let mut group = c.benchmark_group("unstable");
    group.sample_size(10);
    group.throughput(Throughput::Elements(2 * u64::from(NODES)));
    for shards in SHARDS {
        let tree = Unstable::new(shards);
        group.bench_function(BenchmarkId::new("pass", shards), |b| {
            b.iter(|| {
                let twice = Numbers(1)
                    .take(NODES as usize)
                    .chain(Numbers(1).take(NODES as usize));
                let pairs = (0..)
                    .zip(twice)
                    .filter(|&(page, f)| tree.find_or_insert(f, page))
                    .count();
                tree.clear();
                pairs
            });
        });
    }
    group.finish();
}

criterion_group!(benches, stable, unstable);
criterion_main!(benches);
