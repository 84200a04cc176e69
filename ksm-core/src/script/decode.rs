//! Operations from bytes: every string of bytes is a script that makes sense,
//! mostly. For fuzzing and property tests.

use std::slice;

use super::content::Content;
use super::op::{Op, Reach};
use crate::backend::sim::{Call, Failure};
use crate::page::{PageIndex, PageRange};

/// The longest region, in pages.
const MAX_PAGES: u64 = 48;
/// The most domains, spaces and regions that are alive at once.
const MAX_DOMAINS: usize = 3;
const MAX_SPACES: usize = 4;
const MAX_REGIONS: usize = 5;

/// Bytes that an operation is made from. Always as many, so that leaving some
/// out, as shrinking and fuzzing do, leaves the other operations what they are.
pub const BYTES_PER_OP: usize = 6;

/// Makes a script of `bytes`: one domain with a guest first, then whatever the
/// bytes say. Names are mostly of things that are there.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<Op> {
    let mut chunks = bytes.chunks(BYTES_PER_OP);
    let mut decoder = Decoder {
        bytes: chunks.next().unwrap_or_default().iter(),
        domains: 1,
        spaces: vec![true],
        regions: Vec::new(),
        ops: vec![Op::Domain, Op::Space { domain: 0 }],
    };
    decoder.register(0);
    for chunk in chunks {
        decoder.bytes = chunk.iter();
        let code = decoder.byte();
        decoder.op(code);
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
    domains: usize,
    spaces: Vec<bool>,
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
        if code >= 240 {
            return self.layout_op(code);
        }
        match code % 64 {
            0..=18 => self.write(),
            19..=36 => self.engine_op(code % 64),
            37..=51 => self.page_op(code % 64),
            code => self.rare_op(code),
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
        let op = match code {
            19..=30 => Op::Scan {
                budget: 1 + u64::from(self.byte()),
            },
            31..=32 => Op::Settle,
            33 => Op::Quiesce,
            _ => match self.byte() % 4 {
                0 => Op::Unmerge(Reach::All),
                1 => Op::Unmerge(Reach::Space(self.below(self.spaces.len()))),
                _ => {
                    let Some(region) = self.region() else { return };
                    Op::Unmerge(Reach::Pages(region, self.range(region)))
                }
            },
        };
        self.ops.push(op);
    }

    fn page_op(&mut self, code: u8) {
        let Some(region) = self.region() else { return };
        let range = self.range(region);
        let page = range.start;
        let op = match code {
            37..=40 => Op::Read { region, range },
            41..=43 => Op::Discard { region, range },
            44 => Op::PinGuard { region, range },
            45..=46 => Op::Pin { region, page },
            47 => Op::Unpin { region, page },
            48 => Op::UnpinGuard { region, range },
            49 => Op::Swap { region, range },
            50 => Op::Fork { region, range },
            _ => Op::Huge { region, page },
        };
        self.ops.push(op);
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

    fn layout_op(&mut self, code: u8) {
        let alive = self.regions.iter().filter(|known| known.registered);
        let room = alive.count() < MAX_REGIONS;
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
        let registered = self.spaces[space];
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
        let pages = 1 + u64::from(self.byte()) % MAX_PAGES;
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
            registered: self.spaces[space],
        });
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
        let steps = crate::fault::Step::ALL;
        let step = steps[self.below(steps.len())];
        self.ops.push(Op::Panic { step });
    }

    #[cfg(not(feature = "fault-injection"))]
    fn panic(&mut self) {
        self.ops.push(Op::Scan { budget: 64 });
    }

    fn space(&mut self) {
        let alive = self.spaces.iter().filter(|alive| **alive).count();
        if alive >= MAX_SPACES {
            return;
        }
        if self.domains < MAX_DOMAINS && self.flip() {
            self.domains += 1;
            self.ops.push(Op::Domain);
        }
        let domain = self.below(self.domains);
        self.spaces.push(true);
        self.ops.push(Op::Space { domain });
        self.register(self.spaces.len() - 1);
    }

    fn grow(&mut self) {
        let alive = self.regions.iter().filter(|known| known.registered);
        if alive.count() < MAX_REGIONS {
            let space = self.below(self.spaces.len());
            if self.spaces[space] {
                self.register(space);
            }
        }
    }

    fn register(&mut self, space: usize) {
        let pages = 1 + u64::from(self.byte()) % MAX_PAGES;
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
        if old.registered || !self.spaces[space] {
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
        self.spaces[space] = false;
        for known in &mut self.regions {
            known.registered &= known.space != space;
        }
        self.ops.push(match drop {
            true => Op::Drop { space },
            false => Op::Remove { space },
        });
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
