//! [`Claims`]: which host memory is attached, so that none is twice.

use std::sync::Arc;

use super::span::Span;
use crate::error::RegisterError;
use crate::sync::Mutex;

/// The spans that are attached to one host.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(Arc<Mutex<Vec<Span>>>);

/// One of them; given up when dropped.
#[derive(Debug)]
pub(super) struct Claim {
    claims: Claims,
    span: Span,
}

impl Claims {
    /// Claims `span`, no part of which may be claimed.
    pub(super) fn claim(&self, span: Span) -> Result<Claim, RegisterError> {
        let mut spans = self.0.lock();
        if let Some(other) = spans.iter().find(|other| overlap(**other, span)) {
            return Err(RegisterError::Overlaps {
                address: other.address().max(span.address()),
            });
        }
        spans.push(span);
        Ok(Claim {
            claims: self.clone(),
            span,
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.0.lock().retain(|span| *span != self.span);
    }
}

fn overlap(one: Span, other: Span) -> bool {
    let end = |span: Span| span.address() + span.bytes();
    one.address() < end(other) && other.address() < end(one)
}
