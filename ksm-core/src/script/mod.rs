//! The operation language: what guests, embedders and hosts do to an engine,
//! one operation a line.
//!
//! The same list of [`Op`]s drives property tests, fuzzing, the golden scenarios
//! and the comparison of backends, and is what a failure is reported as: a
//! script to be run again. [`Runner`] applies it to an engine on a [`Host`] and
//! checks after every operation, against what guests wrote and nothing else,
//! that each guest page reads what it must and that the engine's counters and
//! records agree with it.
//!
//! # Text
//!
//! Domains, spaces and regions are named `d0`, `s0`, `r0` and so on in the order
//! in which they are made. Pages are `3` or `0..8`. A content is `zero`, `c7`
//! (a pattern, equal wherever it stands) or `c7.1` (the same but for the last
//! byte); `c7+` counts on from page to page. `#` begins a comment.
//!
//! ```
//! use ksm_core::script::{Runner, Script, SimHost};
//!
//! let script: Script = "
//!     domain
//!     space d0
//!     register s0 16 guarded
//!     write r0 0..4 c7
//!     write r0 4..8 c1+
//!     settle
//! "
//! .parse()?;
//! let mut runner = Runner::new(SimHost::new(1))?;
//! runner.run(&script)?;
//! let stats = runner.ksm().stats();
//! // Page 4 holds c1, page 5 c2 and so on: only 0 to 3 are equal.
//! assert_eq!((stats.pages_shared, stats.pages_sharing), (1, 3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod content;
mod decode;
mod host;
mod op;
mod oracle;
mod pages;
mod pins;
mod registry;
mod run;
mod settle;
mod shape;
mod sim_host;
mod text;
mod verify;

pub use content::Content;
pub use decode::{BYTES_PER_OP, decode, decode_layout};
pub use host::{Event, Host, Meddling, Weather};
pub use op::{Op, Reach};
pub use run::{Applied, Mismatch, Runner};
pub use sim_host::SimHost;
pub use text::{ParseError, Script};
