//! Random scripts, printed as scripts where one fails.

use std::fmt;
use std::ops::Range;

use ksm_core::script::{BYTES_PER_OP, Script, decode};
use proptest::prelude::*;

/// A script that prints as one.
#[derive(Clone)]
pub(crate) struct Readable(pub(crate) Script);

impl fmt::Debug for Readable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "script\n{}", self.0)
    }
}

/// Scripts of so many operations.
pub(crate) fn scripts(ops: Range<usize>) -> impl Strategy<Value = Readable> {
    let op = any::<[u8; BYTES_PER_OP]>();
    let ops = prop::collection::vec(op, ops);
    ops.prop_map(|ops| Readable(Script(decode(&ops.concat()))))
}
