//! Whether a domain's parts agree with one another: for tests.

use std::collections::HashMap;

use super::Domain;
use crate::backend::{Backend, FrameStore};
use crate::frames::BLOCK;
use crate::page::{FrameId, PageBuf, PageIndex};
use crate::region::RegionId;

/// A page of a region.
pub(crate) type Page = (RegionId, PageIndex);

impl<B: Backend> Domain<B> {
    /// Checks that trees, rmap and store agree. `named` says for every frame how
    /// often the regions' records name it, and which pages map it as shared.
    pub(crate) fn check(&self, named: &HashMap<FrameId, (u32, Vec<Page>)>) -> Result<(), String> {
        self.stable.check()?;
        self.unstable.check()?;
        for anon_vma in self.anon_vmas.all() {
            anon_vma.check()?;
        }
        let sharing = self.sharing.lock();
        let mut buf = PageBuf::zeroed();
        let mut live = 0;
        for (frame, node) in sharing.rmap.nodes() {
            let (names, sharers) = named
                .get(&frame)
                .map_or((0, 0), |(names, sharers)| (*names, sharers.len()));
            let names = names + node.abandoned;
            let forsaken = sharing.forsaken.get(&frame).copied().unwrap_or(0);
            let sharers = sharers + forsaken as usize;
            if (names, sharers) != (node.named, node.sharers as usize) {
                return Err(format!(
                    "{frame}: named {} shared {}, the records say {names} {sharers}",
                    node.named, node.sharers
                ));
            }
            let items = || sharing.rmap.items_of(frame);
            let pages: u32 = items().map(|(item, _)| sharing.rmap.pages_of(item)).sum();
            if (pages, items().count()) != (node.sharers, node.items as usize) {
                return Err(format!(
                    "{frame}: its list is of {pages} pages, not {node:?}"
                ));
            }
            let stands = self.stable.digest_of(node.fingerprint, frame);
            if stands.is_some() && !node.live {
                return Err(format!("{frame}: not live, but in the stable tree"));
            }
            if node.live {
                live += usize::from(stands.is_some());
                self.store
                    .read(frame, &mut buf)
                    .map_err(|error| error.to_string())?;
                let digest = self.keys.digest(&buf);
                let whole = self.keys.fingerprint(&buf) == node.fingerprint
                    && stands.is_none_or(|stands| stands == digest);
                if !whole {
                    return Err(format!("{frame}: its content is not what was merged"));
                }
                if self.stable.find_exact(node.fingerprint, &digest).is_none() {
                    return Err(format!("{frame}: live, but nobody can find its content"));
                }
            }
            if sharing.frames.is_free(frame.0) {
                return Err(format!("{frame}: has a node, but its number is free"));
            }
        }
        let outside = sharing.rmap.nodes().filter(|(_, node)| !node.in_block);
        let numbers = outside.count() as u64 + sharing.blocks.len() as u64 * u64::from(BLOCK);
        if numbers != sharing.frames.taken() || live != self.stable.len() {
            return Err(format!(
                "{numbers} numbers in use, {} taken, {live} contents live, {} in the tree",
                sharing.frames.taken(),
                self.stable.len()
            ));
        }
        match named
            .keys()
            .find(|&&frame| sharing.rmap.node(frame).is_none())
        {
            Some(frame) => Err(format!("{frame}: named by a record, has no node")),
            None => Ok(()),
        }
    }
}
