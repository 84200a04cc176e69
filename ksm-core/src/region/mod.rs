//! Regions: stretches of guest memory, each with a lease of its own.

mod ids;
#[allow(dead_code)]
pub(crate) mod lease;

pub use ids::{DomainId, RegionId, SpaceId};
