//! Scripts as text.

use std::fmt;
use std::str::{FromStr, SplitWhitespace};

use thiserror::Error;

use super::op::{Op, Reach};
use crate::page::{PageIndex, PageRange};

/// A list of operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script(pub Vec<Op>);

/// A line that is no operation.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct ParseError {
    /// Its number, from 1 on.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|op| writeln!(f, "{op}"))
    }
}

impl FromStr for Script {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut ops = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let code = line.split('#').next().unwrap_or_default().trim();
            if !code.is_empty() {
                let op = code.parse();
                ops.push(op.map_err(|reason| ParseError {
                    line: number,
                    reason,
                })?);
            }
        }
        Ok(Self(ops))
    }
}

/// Pages as text: `3` or `0..8`.
struct Pages(PageRange);

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(range) = self;
        match range.len() {
            1 => write!(f, "{}", range.start.0),
            _ => write!(f, "{}..{}", range.start.0, range.end.0),
        }
    }
}

impl FromStr for Pages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is no range of pages: 3 or 0..8");
        let page = |text: &str| text.parse().map(PageIndex).map_err(|_| bad());
        let range = match text.split_once("..") {
            Some((start, end)) => PageRange {
                start: page(start)?,
                end: page(end)?,
            },
            None => PageRange::one(page(text)?),
        };
        if range.is_empty() {
            return Err(bad());
        }
        Ok(Self(range))
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tail = |guarded: bool| if guarded { " guarded" } else { "" };
        match *self {
            Self::Domain => write!(f, "domain"),
            Self::Space { domain } => write!(f, "space d{domain}"),
            Self::Register {
                space,
                pages,
                guarded,
            } => write!(f, "register s{space} {pages}{}", tail(guarded)),
            Self::Again {
                space,
                region,
                guarded,
            } => write!(f, "again s{space} r{region}{}", tail(guarded)),
            Self::Unregister { region } => write!(f, "unregister r{region}"),
            Self::Remove { space } => write!(f, "remove s{space}"),
            Self::Forget { domain } => write!(f, "forget d{domain}"),
            Self::Split { region, page } => write!(f, "split r{region} {}", page.0),
            Self::Clone { space, region } => write!(f, "clone s{space} r{region}"),
            Self::Move { region } => write!(f, "move r{region}"),
            Self::TakeOver {
                space,
                pages,
                content,
                guarded,
            } => write!(f, "take_over s{space} {pages} {content}{}", tail(guarded)),
            Self::Drop { space } => write!(f, "drop s{space}"),
            Self::Unshare { region, page } => write!(f, "unshare r{region} {}", page.0),
            Self::Write {
                region,
                range,
                content,
                counting,
            } => {
                let tail = if counting { "+" } else { "" };
                write!(f, "write r{region} {} {content}{tail}", Pages(range))
            }
            Self::Read { region, range } => write!(f, "read r{region} {}", Pages(range)),
            Self::Discard { region, range } => write!(f, "discard r{region} {}", Pages(range)),
            Self::Scan { budget } => write!(f, "scan {budget}"),
            Self::Settle => write!(f, "settle"),
            Self::Unmerge(Reach::All) => write!(f, "unmerge all"),
            Self::Unmerge(Reach::Space(space)) => write!(f, "unmerge s{space}"),
            Self::Unmerge(Reach::Pages(region, range)) => {
                write!(f, "unmerge r{region} {}", Pages(range))
            }
            Self::Quiesce => write!(f, "quiesce"),
            Self::PinGuard { region, range } => {
                write!(f, "pin_guard r{region} {}", Pages(range))
            }
            Self::UnpinGuard { region, range } => {
                write!(f, "unpin_guard r{region} {}", Pages(range))
            }
            Self::Pin { region, page } => write!(f, "pin r{region} {}", page.0),
            Self::Unpin { region, page } => write!(f, "unpin r{region} {}", page.0),
            Self::Swap { region, range } => write!(f, "swap r{region} {}", Pages(range)),
            Self::Fork { region, range } => write!(f, "fork r{region} {}", Pages(range)),
            Self::Huge { region, page } => write!(f, "huge r{region} {}", page.0),
            Self::Fail {
                call,
                failure,
                nth,
                times: 1,
            } => write!(f, "fail {call} {failure} {nth}"),
            Self::Fail {
                call,
                failure,
                nth,
                times,
            } => write!(f, "fail {call} {failure} {nth} times {times}"),
            Self::MaxVmas { max } => write!(f, "max_vmas {max}"),
            Self::Storm => write!(f, "storm"),
            Self::Calm => write!(f, "calm"),
            #[cfg(feature = "fault-injection")]
            Self::Panic { step } => write!(f, "panic {step:?}"),
        }
    }
}

/// The words of a line.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self, what: &str) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| format!("{what} is missing"))
    }

    fn parsed<T>(&mut self, what: &str) -> Result<T, String>
    where
        T: FromStr<Err: fmt::Display>,
    {
        let word = self.word(what)?;
        word.parse().map_err(|error| format!("{what}: {error}"))
    }

    /// A name such as `r3`.
    fn name(&mut self, prefix: char) -> Result<usize, String> {
        let what = format!("a name like {prefix}0");
        let word = self.word(&what)?;
        let number = word.strip_prefix(prefix).map(str::parse);
        match number {
            Some(Ok(number)) => Ok(number),
            _ => Err(format!("{word:?} is not {what}")),
        }
    }

    fn pages(&mut self) -> Result<PageRange, String> {
        let Pages(range) = self.parsed("pages")?;
        Ok(range)
    }

    fn page(&mut self) -> Result<PageIndex, String> {
        self.parsed("a page").map(PageIndex)
    }

    fn guarded(&mut self) -> Result<bool, String> {
        match self.0.next() {
            None => Ok(false),
            Some("guarded") => Ok(true),
            Some(word) => Err(format!("{word:?} is not \"guarded\"")),
        }
    }

    fn times(&mut self) -> Result<u64, String> {
        match self.0.next() {
            None => Ok(1),
            Some("times") => self.parsed("a count"),
            Some(word) => Err(format!("{word:?} is not \"times\"")),
        }
    }

    fn end<T>(mut self, op: T) -> Result<T, String> {
        match self.0.next() {
            None => Ok(op),
            Some(word) => Err(format!("{word:?} is too much")),
        }
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = Words(text.split_whitespace());
        let op = match words.word("an operation")? {
            "domain" => Self::Domain,
            "space" => Self::Space {
                domain: words.name('d')?,
            },
            "register" => Self::Register {
                space: words.name('s')?,
                pages: words.parsed("a length")?,
                guarded: words.guarded()?,
            },
            "again" => Self::Again {
                space: words.name('s')?,
                region: words.name('r')?,
                guarded: words.guarded()?,
            },
            "unregister" => Self::Unregister {
                region: words.name('r')?,
            },
            "remove" => Self::Remove {
                space: words.name('s')?,
            },
            "forget" => Self::Forget {
                domain: words.name('d')?,
            },
            "clone" => Self::Clone {
                space: words.name('s')?,
                region: words.name('r')?,
            },
            "move" => Self::Move {
                region: words.name('r')?,
            },
            "take_over" => Self::TakeOver {
                space: words.name('s')?,
                pages: words.parsed("a length")?,
                content: words.parsed("a content")?,
                guarded: words.guarded()?,
            },
            "drop" => Self::Drop {
                space: words.name('s')?,
            },
            "write" => write_op(&mut words)?,
            "unmerge" => Self::Unmerge(reach(&mut words)?),
            "scan" => Self::Scan {
                budget: words.parsed("a budget")?,
            },
            "settle" => Self::Settle,
            "quiesce" => Self::Quiesce,
            "fail" => Self::Fail {
                call: words.parsed("a call")?,
                failure: words.parsed("a failure")?,
                nth: words.parsed("a count")?,
                times: words.times()?,
            },
            "max_vmas" => Self::MaxVmas {
                max: words.parsed("a limit")?,
            },
            "storm" => Self::Storm,
            "calm" => Self::Calm,
            #[cfg(feature = "fault-injection")]
            "panic" => Self::Panic {
                step: step(words.word("a step")?)?,
            },
            verb => page_op(verb, &mut words)?,
        };
        words.end(op)
    }
}

fn write_op(words: &mut Words<'_>) -> Result<Op, String> {
    let region = words.name('r')?;
    let range = words.pages()?;
    let word = words.word("a content")?;
    let same = word.strip_suffix('+');
    Ok(Op::Write {
        region,
        range,
        content: same.unwrap_or(word).parse()?,
        counting: same.is_some(),
    })
}

fn reach(words: &mut Words<'_>) -> Result<Reach, String> {
    let mut ahead = Words(words.0.clone());
    match ahead.word("what to unmerge")? {
        "all" => {
            *words = ahead;
            Ok(Reach::All)
        }
        space if space.starts_with('s') => Ok(Reach::Space(words.name('s')?)),
        _ => Ok(Reach::Pages(words.name('r')?, words.pages()?)),
    }
}

/// The operations on pages of a region.
fn page_op(verb: &str, words: &mut Words<'_>) -> Result<Op, String> {
    let ranged = [
        "read",
        "discard",
        "swap",
        "fork",
        "pin_guard",
        "unpin_guard",
    ];
    let single = ["pin", "unpin", "huge", "split", "unshare"];
    if !ranged.contains(&verb) && !single.contains(&verb) {
        return Err(format!("{verb:?} is no operation"));
    }
    let region = words.name('r')?;
    Ok(match verb {
        "read" => Op::Read {
            region,
            range: words.pages()?,
        },
        "discard" => Op::Discard {
            region,
            range: words.pages()?,
        },
        "swap" => Op::Swap {
            region,
            range: words.pages()?,
        },
        "fork" => Op::Fork {
            region,
            range: words.pages()?,
        },
        "pin_guard" => Op::PinGuard {
            region,
            range: words.pages()?,
        },
        "unpin_guard" => Op::UnpinGuard {
            region,
            range: words.pages()?,
        },
        "pin" => Op::Pin {
            region,
            page: words.page()?,
        },
        "split" => Op::Split {
            region,
            page: words.page()?,
        },
        "unshare" => Op::Unshare {
            region,
            page: words.page()?,
        },
        "unpin" => Op::Unpin {
            region,
            page: words.page()?,
        },
        _ => Op::Huge {
            region,
            page: words.page()?,
        },
    })
}

#[cfg(feature = "fault-injection")]
fn step(word: &str) -> Result<crate::fault::Step, String> {
    let mut steps = crate::fault::Step::all();
    let found = steps.find(|step| format!("{step:?}") == word);
    found.ok_or_else(|| format!("{word:?} is no step"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::{decode, decode_layout};

    #[test]
    fn what_is_printed_is_what_is_parsed() {
        for seed in 0..200_u8 {
            let bytes: Vec<u8> = (0..200_u8).map(|n| n.wrapping_mul(seed) ^ seed).collect();
            for ops in [decode(&bytes), decode_layout(&bytes)] {
                let script = Script(ops);
                assert_eq!(script.to_string().parse(), Ok(script));
            }
        }
    }

    #[test]
    fn a_bad_line_says_why() {
        let reason = |text: &str| text.parse::<Script>().unwrap_err().to_string();
        assert_eq!(
            reason("domain\n\nwrite r0 3..3 c7"),
            "line 3: pages: \"3..3\" is no range of pages: 3 or 0..8"
        );
        assert_eq!(reason("scan"), "line 1: a budget is missing");
        assert_eq!(reason("settle now"), "line 1: \"now\" is too much");
        assert_eq!(reason("pin s0 1"), "line 1: \"s0\" is not a name like r0");
        assert_eq!(reason("merge r0"), "line 1: \"merge\" is no operation");
    }
}
