//! Regions: stretches of guest memory, each with a lease of its own.

mod ids;

pub use ids::{DomainId, RegionId, SpaceId};
