use ksm_core::backend::linux::{HostRegion, LinuxBackend};
use ksm_core::*;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion};
fn main() {
    let ksm = Ksm::new(LinuxBackend::open().unwrap(), Config::default()).unwrap();
    let d = ksm.create_domain().unwrap();
    let mut keep = vec![];
    for f in std::env::args().skip(1) {
        let data = std::fs::read(&f).unwrap();
        let r = Arc::new(
            GuestRegionMmap::new(MmapRegion::<()>::new(data.len()).unwrap(), GuestAddress(0))
                .unwrap(),
        );
        for (i, c) in data.chunks(4096).enumerate() {
            if c.iter().any(|b| *b != 0) {
                r.write_slice(c, MemoryRegionAddress(i as u64 * 4096))
                    .unwrap();
            }
        }
        let s = ksm.create_space(d).unwrap();
        ksm.register(
            s,
            HostRegion::new(Arc::clone(&r)),
            RegionOptions { dma_guarded: true },
        )
        .unwrap();
        keep.push((r, data));
    }
    for p in 0..6 {
        let t = std::time::Instant::now();
        let n = ksm.stats().full_scans;
        while ksm.stats().full_scans == n {
            ksm.scan(100000).unwrap();
        }
        let st = ksm.stats();
        let maps = std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .count();
        println!(
            "pass {p} {:?} shared {} sharing {} dups {} zero {} vmas {} maps {maps} per100 {:.2} unshared {} meta {}",
            t.elapsed(),
            st.pages_shared,
            st.pages_sharing,
            st.stable_node_dups,
            st.ksm_zero_pages,
            st.vmas,
            100.0 * st.vmas as f64 / (st.pages_shared + st.pages_sharing).max(1) as f64,
            st.pages_unshared,
            st.metadata_bytes
        );
    }
    ksm.check().unwrap();
    let mut buf = vec![0u8; 4096];
    for (r, data) in &keep {
        for (i, c) in data.chunks(4096).enumerate() {
            r.read_slice(&mut buf, MemoryRegionAddress(i as u64 * 4096))
                .unwrap();
            assert_eq!(buf, c);
        }
    }
    println!("verified");
}
