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

impl Claim {
    /// Gives the claim up for claims of both its parts, the first of `pages`.
    pub(super) fn split(self, pages: u64) -> (Self, Self) {
        let parts = {
            let mut spans = self.claims.0.lock();
            let (first, rest) = (
                self.span.part(0, pages),
                self.span.part(pages, self.span.pages() - pages),
            );
            spans.extend([first, rest]);
            [first, rest]
        };
        let [first, rest] = parts.map(|span| Self {
            claims: self.claims.clone(),
            span,
        });
        (first, rest)
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
