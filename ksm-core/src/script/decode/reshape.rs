//! Operations that change regions as a whole: they split, move, are cloned and
//! taken over.

use super::{Decoder, Known};
use crate::script::content::Content;
use crate::script::op::Op;

impl Decoder<'_> {
    /// The operations that regions are changed by as a whole.
    pub(super) fn reshape_op(&mut self, code: u8) {
        let alive = self.regions.iter().filter(|known| known.registered);
        let room = alive.count() < self.limits.regions;
        match code {
            240..=243 if room => self.split(),
            244..=247 if room => self.clone_region(),
            248..=249 => self.move_region(),
            250..=251 if room => self.take_over(),
            252 => self.remove(true),
            _ => {
                let Some(region) = self.region() else { return };
                let page = self.range(region).start;
                self.ops.push(Op::Unshare { region, page });
            }
        }
    }

    fn split(&mut self) {
        let Some(region) = self.region() else { return };
        let page = self.range(region).start;
        self.ops.push(Op::Split { region, page });
        if page.0 > 0 {
            let old = self.regions[region];
            self.regions[region].registered = false;
            let pages = [page.0, old.pages - page.0];
            let parts = pages.map(|pages| Known { pages, ..old });
            self.regions.extend(parts);
        }
    }

    fn clone_region(&mut self) {
        let Some(region) = self.region() else { return };
        let space = self.below(self.spaces.len());
        let old = self.regions[region];
        let registered = self.spaces[space].is_some();
        self.ops.push(Op::Clone { space, region });
        self.regions.push(Known {
            space,
            registered,
            ..old
        });
    }

    fn move_region(&mut self) {
        let Some(region) = self.region() else { return };
        let old = self.regions[region];
        self.regions[region].registered = false;
        self.regions.push(old);
        self.ops.push(Op::Move { region });
    }

    fn take_over(&mut self) {
        let space = self.below(self.spaces.len());
        let pages = 1 + u64::from(self.byte()) % self.limits.pages;
        let content = Content {
            number: u32::from(self.byte() & 7),
            last: 0,
        };
        let guarded = self.flip();
        self.ops.push(Op::TakeOver {
            space,
            pages,
            content,
            guarded,
        });
        self.regions.push(Known {
            pages,
            space,
            registered: self.spaces[space].is_some(),
        });
    }
}
