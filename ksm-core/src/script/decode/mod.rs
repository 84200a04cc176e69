//! Operations from bytes: every string of bytes is a script that makes sense,
//! mostly. For fuzzing and property tests.
//!
//! Two mixes of one language: [`decode`] has few, larger regions and everything
//! that guests and hosts do to pages; [`decode_layout`] many small regions that
//! come and go.

mod reshape;

use std::slice;

use crate::backend::sim::{Call, Failure};
use crate::page::{PageIndex, PageRange};
use crate::script::content::Content;
use crate::script::op::{Op, Reach};

/// What there is of everything, at most.
#[derive(Clone, Copy)]
struct Limits {
    /// The longest region, in pages.
    pages: u64,
    /// Domains that are alive at once.
    domains: usize,
    /// Spaces that are alive at once.
    spaces: usize,
    /// Regions that are registered at once.
    regions: usize,
}

const FEW_AND_LARGE: Limits = Limits {
    pages: 48,
    domains: 3,
    spaces: 4,
    regions: 5,
};

const MANY_AND_SMALL: Limits = Limits {
    pages: 4,
    domains: 4,
    spaces: 8,
    regions: 24,
};

/// Bytes that an operation is made from. Always as many, so that leaving some
/// out, as shrinking and fuzzing do, leaves the other operations what they are.
pub const BYTES_PER_OP: usize = 6;

/// Makes a script of `bytes`: one domain with a guest first, then whatever the
/// bytes say. Names are mostly of things that are there.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<Op> {
    decode_with(bytes, FEW_AND_LARGE, Decoder::op)
}

/// As [`decode`], about what is registered: domains, spaces and many small
/// regions come and go, with guards on some of them, over pages that are merged.
#[must_use]
pub fn decode_layout(bytes: &[u8]) -> Vec<Op> {
    decode_with(bytes, MANY_AND_SMALL, Decoder::layout_op)
}

fn decode_with<'a>(bytes: &'a [u8], limits: Limits, op: fn(&mut Decoder<'a>, u8)) -> Vec<Op> {
    let mut chunks = bytes.chunks(BYTES_PER_OP);
    let mut decoder = Decoder {
        limits,
        bytes: chunks.next().unwrap_or_default().iter(),
        domains: vec![true],
        spaces: vec![Some(0)],
        regions: Vec::new(),
        ops: vec![Op::Domain, Op::Space { domain: 0 }],
    };
    decoder.register(0);
    for chunk in chunks {
        decoder.bytes = chunk.iter();
        let code = decoder.byte();
        match code {
            240.. => decoder.reshape_op(code),
            code => op(&mut decoder, code % 64),
        }
    }
    decoder.ops
}

/// A region, as far as the decoder follows it.
#[derive(Clone, Copy)]
struct Known {
    pages: u64,
    space: usize,
    registered: bool,
}

struct Decoder<'a> {
    /// What is left of the bytes of one operation.
    bytes: slice::Iter<'a, u8>,
    limits: Limits,
    /// Whether they are alive.
    domains: Vec<bool>,
    /// The domain of those that are alive.
    spaces: Vec<Option<usize>>,
    regions: Vec<Known>,
    ops: Vec<Op>,
}

impl Decoder<'_> {
    fn byte(&mut self) -> u8 {
        self.bytes.next().copied().unwrap_or(0)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }

    fn flip(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    fn op(&mut self, code: u8) {
        match code {
            0..=18 => self.write(),
            19..=36 => self.engine_op(code),
            37..=51 => self.page_op(code),
            code => self.rare_op(code),
        }
    }

    fn layout_op(&mut self, code: u8) {
        match code {
            0..=9 => self.write(),
            10..=17 => self.scan(),
            18..=19 => self.ops.push(Op::Settle),
            20..=27 => self.grow(),
            28..=32 => self.unregister(),
            33..=38 => self.again(),
            39..=42 => self.space(),
            43..=45 => self.remove(false),
            46..=47 => self.forget(),
            48..=51 => self.on_pages(|region, range| Op::Discard { region, range }),
            52..=54 => self.on_pages(|region, range| Op::PinGuard { region, range }),
            55 => self.on_page(|region, page| Op::Pin { region, page }),
            56..=57 => self.on_pages(|region, range| Op::UnpinGuard { region, range }),
            58 => self.unmerge(),
            59 => self.ops.push(Op::Quiesce),
            60 => self.fail(),
            61 => self.ops.push(Op::Calm),
            62 => self.ops.push(Op::Storm),
            _ => self.panic(),
        }
    }

    fn write(&mut self) {
        let Some(region) = self.region() else { return };
        let range = self.range(region);
        // Few contents, so that pages are often equal.
        let what = self.byte();
        let content = Content {
            number: u32::from(what & 7),
            last: u8::from(what & 0x30 == 0x30),
        };
        let counting = what & 0x40 != 0;
        self.ops.push(Op::Write {
            region,
            range,
            content,
            counting,
        });
    }

    fn engine_op(&mut self, code: u8) {
        match code {
            19..=30 => self.scan(),
            31..=32 => self.ops.push(Op::Settle),
            33 => self.ops.push(Op::Quiesce),
            _ => self.unmerge(),
        }
    }

    fn scan(&mut self) {
        let budget = 1 + u64::from(self.byte());
        self.ops.push(Op::Scan { budget });
    }

    fn unmerge(&mut self) {
        let op = match self.byte() % 4 {
            0 => Op::Unmerge(Reach::All),
            1 => Op::Unmerge(Reach::Space(self.below(self.spaces.len()))),
            _ => {
                let Some(region) = self.region() else { return };
                Op::Unmerge(Reach::Pages(region, self.range(region)))
            }
        };
        self.ops.push(op);
    }

    fn page_op(&mut self, code: u8) {
        match code {
            37..=40 => self.on_pages(|region, range| Op::Read { region, range }),
            41..=43 => self.on_pages(|region, range| Op::Discard { region, range }),
            44 => self.on_pages(|region, range| Op::PinGuard { region, range }),
            45..=46 => self.on_page(|region, page| Op::Pin { region, page }),
            47 => self.on_page(|region, page| Op::Unpin { region, page }),
            48 => self.on_pages(|region, range| Op::UnpinGuard { region, range }),
            49 => self.on_pages(|region, range| Op::Swap { region, range }),
            50 => self.on_pages(|region, range| Op::Fork { region, range }),
            _ => self.on_page(|region, page| Op::Huge { region, page }),
        }
    }

    fn on_pages(&mut self, op: impl FnOnce(usize, PageRange) -> Op) {
        let Some(region) = self.region() else { return };
        let range = self.range(region);
        self.ops.push(op(region, range));
    }

    fn on_page(&mut self, op: impl FnOnce(usize, PageIndex) -> Op) {
        self.on_pages(|region, range| op(region, range.start));
    }

    fn rare_op(&mut self, code: u8) {
        match code {
            52 => self.ops.push(Op::Storm),
            53..=54 => self.ops.push(Op::Calm),
            55..=56 => self.fail(),
            57 => {
                let max = 2 + u64::from(self.byte() % 32);
                self.ops.push(Op::MaxVmas { max });
            }
            58 => self.grow(),
            59 => self.space(),
            60 => self.unregister(),
            61 => self.again(),
            62 => self.remove(false),
            _ => self.panic(),
        }
    }

    fn fail(&mut self) {
        let call = Call::ALL[self.below(Call::ALL.len())];
        let failure = Failure::ALL[self.below(Failure::ALL.len())];
        let nth = 1 + u64::from(self.byte() % 16);
        let times = 1 + u64::from(self.byte() % 4);
        self.ops.push(Op::Fail {
            call,
            failure,
            nth,
            times,
        });
    }

    #[cfg(feature = "fault-injection")]
    fn panic(&mut self) {
        let steps = crate::fault::Step::PASS;
        let step = steps[self.below(steps.len())];
        self.ops.push(Op::Panic { step });
    }

    #[cfg(not(feature = "fault-injection"))]
    fn panic(&mut self) {
        self.ops.push(Op::Scan { budget: 64 });
    }

    fn space(&mut self) {
        if self.spaces.iter().flatten().count() >= self.limits.spaces {
            return;
        }
        let domains = self.domains.iter().filter(|alive| **alive).count();
        if domains < self.limits.domains && self.flip() {
            self.domains.push(true);
            self.ops.push(Op::Domain);
        }
        let domain = self.below(self.domains.len());
        if !self.domains[domain] {
            return;
        }
        self.spaces.push(Some(domain));
        self.ops.push(Op::Space { domain });
        self.register(self.spaces.len() - 1);
    }

    fn grow(&mut self) {
        let alive = self.regions.iter().filter(|known| known.registered);
        if alive.count() < self.limits.regions {
            let space = self.below(self.spaces.len());
            if self.spaces[space].is_some() {
                self.register(space);
            }
        }
    }

    fn register(&mut self, space: usize) {
        let pages = 1 + u64::from(self.byte()) % self.limits.pages;
        let guarded = self.flip();
        self.regions.push(Known {
            pages,
            space,
            registered: true,
        });
        self.ops.push(Op::Register {
            space,
            pages,
            guarded,
        });
    }

    fn unregister(&mut self) {
        if let Some(region) = self.region() {
            self.regions[region].registered = false;
            self.ops.push(Op::Unregister { region });
        }
    }

    /// Registers memory once more, if it is free and the space is there.
    fn again(&mut self) {
        let region = self.below(self.regions.len());
        let space = self.below(self.spaces.len());
        let guarded = self.flip();
        let old = self.regions[region];
        if old.registered || self.spaces[space].is_none() {
            return;
        }
        self.regions.push(Known {
            space,
            registered: true,
            ..old
        });
        self.ops.push(Op::Again {
            space,
            region,
            guarded,
        });
    }

    fn remove(&mut self, drop: bool) {
        let space = self.below(self.spaces.len());
        if space == 0 {
            return;
        }
        self.spaces[space] = None;
        for known in &mut self.regions {
            known.registered &= known.space != space;
        }
        self.ops.push(match drop {
            true => Op::Drop { space },
            false => Op::Remove { space },
        });
    }

    /// Forgets a domain, which is refused if a space is in it.
    fn forget(&mut self) {
        let domain = self.below(self.domains.len());
        let used = self.spaces.contains(&Some(domain));
        self.domains[domain] &= used;
        self.ops.push(Op::Forget { domain });
    }

    /// A region: a registered one, if there is one at or after the place that
    /// the bytes name.
    fn region(&mut self) -> Option<usize> {
        let all = self.regions.len();
        let from = self.below(all);
        let mut places = (0..all).map(|n| (from + n) % all);
        places.find(|&place| self.regions[place].registered)
    }

    fn range(&mut self, region: usize) -> PageRange {
        let pages = self.regions[region].pages;
        let start = u64::from(self.byte()) % pages;
        let len = 1 + u64::from(self.byte() % 8);
        PageRange {
            start: PageIndex(start),
            end: PageIndex((start + len).min(pages)),
        }
    }
}
