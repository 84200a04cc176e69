//! The engine let loose on the [`model`](crate::model): what merging comes to.

use std::sync::Arc;

use ksm_core::page::bytes_in;
use ksm_core::{Config, Ksm, Outcome, RegionOptions};
use serde::Serialize;

use crate::count::Counted;
use crate::model::Model;
use crate::progress;

/// In how many passes that merge nothing a budget gets from its greatest demand
/// to its least, with one to spare (`ksm-core`, `budget`).
const QUIET_PASSES_OF_A_BUDGET: u32 = 6;

/// Who is in one trust domain: images by their places on the command line, from 1
/// on.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Policy {
    pub(crate) policy: &'static str,
    pub(crate) domains: Vec<Vec<usize>>,
}

/// What merging comes to: the engine's counters.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Merged {
    pub(crate) pages_shared: u64,
    pub(crate) pages_sharing: u64,
    pub(crate) stable_node_dups: u64,
    pub(crate) zero_pages: u64,
    pub(crate) vmas: u64,
    pub(crate) held_back_pages: u64,
    pub(crate) saved_bytes: u64,
}

/// One policy, with blocks of equal frames and without.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Placement {
    #[serde(flatten)]
    pub(crate) policy: Policy,
    #[serde(flatten)]
    pub(crate) merged: Merged,
    pub(crate) without_blocks: Merged,
}

/// Merges all images under `policy`, twice.
pub(crate) fn place(
    counted: &Counted,
    policy: Policy,
    max_vmas: Option<u64>,
) -> anyhow::Result<Placement> {
    let blocks = Config::default();
    let no_blocks = Config {
        stretch_pages: u32::MAX,
        // One frame for each content, however many have it.
        max_page_sharing: u32::MAX,
        ..Config::default()
    };
    let run = |config: Config| {
        let config = Config {
            // Guests stand still: what a page holds now, it holds in the next pass.
            settle_passes: 0,
            max_vmas,
            ..config
        };
        merge(counted, &policy, config)
    };
    Ok(Placement {
        merged: run(blocks)?,
        without_blocks: run(no_blocks)?,
        policy,
    })
}

fn merge(counted: &Counted, policy: &Policy, config: Config) -> anyhow::Result<Merged> {
    let pages = counted.images.iter().map(|image| image.len() as u64).sum();
    let bar = progress::bar(policy.policy, pages);
    let quiet_passes = config.max_vmas.map_or(1, |_| QUIET_PASSES_OF_A_BUDGET);
    let ksm = Ksm::new(Model { bar: bar.clone() }, config)?;
    for images in &policy.domains {
        let domain = ksm.create_domain()?;
        for &image in images {
            let guest = ksm.create_space(domain)?;
            let image = Arc::clone(&counted.images[image - 1]);
            ksm.register(guest, image, RegionOptions::default())?;
        }
    }
    let (mut quiet, mut held_back) = (0, 0);
    while quiet < quiet_passes {
        bar.set_position(0);
        let outcomes = ksm.scan(u64::MAX)?.outcomes;
        let changed = outcomes[Outcome::Merged] + outcomes[Outcome::Zeroed];
        quiet = if changed == 0 { quiet + 1 } else { 0 };
        held_back = outcomes[Outcome::VmaBudget];
    }
    bar.finish_and_clear();
    let stats = ksm.stats();
    Ok(Merged {
        pages_shared: stats.pages_shared,
        pages_sharing: stats.pages_sharing,
        stable_node_dups: stats.stable_node_dups,
        zero_pages: stats.ksm_zero_pages,
        vmas: stats.vmas,
        held_back_pages: held_back,
        saved_bytes: bytes_in(stats.pages_sharing + stats.ksm_zero_pages),
    })
}
