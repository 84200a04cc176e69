//! Names of the three levels at which memory is registered.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub(crate) u64);

        impl $name {
            /// The number behind the name: unique for the life of the engine.
            #[must_use]
            pub const fn number(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id! {
    /// A trust domain: nothing is ever shared across two of them.
    DomainId, "d"
}
id! {
    /// An address space: one guest.
    SpaceId, "s"
}
id! {
    /// A region: one stretch of a guest's memory.
    RegionId, "r"
}
