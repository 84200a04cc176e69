//! A host for the engine whose guests are images, and whose pages hold nothing
//! but their content's number.
//!
//! Guests stand still here: nobody writes, reads or swaps anything between two
//! calls. Otherwise it keeps the whole contract of [`ksm_core::backend`].

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;
use ksm_core::RegionOptions;
use ksm_core::backend::{
    Backend, Backing, FrameStore, Held, Memory, PageRun, PageState, Refusal, Settled,
};
use ksm_core::error::{BackendError, RegisterError};
use ksm_core::page::{FrameId, FrameRange, PageBuf, PageIndex, PageRange, bytes_in};

use crate::count::Content;

/// The host.
#[derive(Debug)]
pub(crate) struct Model {
    /// Counts the pages that passes go over.
    pub(crate) bar: ProgressBar,
}

/// What a page holds: 0 for zeros, otherwise its content's number.
type Number = u32;

fn number_of(content: Content) -> Number {
    content.map_or(0, |content| content.get())
}

/// Makes a page that holds `number`. Two are equal if their numbers are.
fn write(number: Number, buf: &mut PageBuf) {
    buf.bytes_mut().fill(0);
    buf.bytes_mut()[..4].copy_from_slice(&number.to_le_bytes());
}

fn read(buf: &PageBuf) -> Number {
    let [a, b, c, d, ..] = *buf.bytes();
    Number::from_le_bytes([a, b, c, d])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend for Model {
    type Source = Arc<[Content]>;
    type Memory = ImageMemory;
    type Store = Frames;

    fn free_vmas(&self) -> Option<u64> {
        None
    }

    fn open_store(&self) -> Result<Frames, BackendError> {
        Ok(Frames::default())
    }

    fn attach(&self, image: Self::Source, _: RegionOptions) -> Result<ImageMemory, RegisterError> {
        Ok(ImageMemory {
            shown: Mutex::new(vec![Shown::Own; image.len()]),
            image,
            bar: self.bar.clone(),
        })
    }
}

/// Frames by the numbers they hold; `None` for one without memory.
#[derive(Debug, Default)]
pub(crate) struct Frames(Mutex<Vec<Option<Number>>>);

impl Frames {
    fn number(&self, frame: FrameId) -> Number {
        let frames = lock(&self.0);
        frames.get(frame.0 as usize).copied().flatten().unwrap_or(0)
    }
}

impl FrameStore for Frames {
    fn fill(&self, frame: FrameId, content: &PageBuf) -> Result<(), BackendError> {
        let mut frames = lock(&self.0);
        let place = frame.0 as usize;
        if frames.len() <= place {
            frames.resize(place + 1, None);
        }
        frames[place] = Some(read(content));
        Ok(())
    }

    fn read(&self, frame: FrameId, buf: &mut PageBuf) -> Result<(), BackendError> {
        write(self.number(frame), buf);
        Ok(())
    }

    fn punch(&self, range: FrameRange) -> Result<(), BackendError> {
        let mut frames = lock(&self.0);
        for frame in range.iter() {
            if let Some(frame) = frames.get_mut(frame.0 as usize) {
                *frame = None;
            }
        }
        Ok(())
    }

    fn allocated_bytes(&self) -> Result<u64, BackendError> {
        Ok(bytes_in(lock(&self.0).iter().flatten().count() as u64))
    }
}

/// What a guest would see at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// Its own bytes, those of the image.
    Own,
    /// A frame.
    Frame,
    /// Zeros, in no page at all.
    Hole,
}

/// One image.
#[derive(Debug)]
pub(crate) struct ImageMemory {
    image: Arc<[Content]>,
    shown: Mutex<Vec<Shown>>,
    bar: ProgressBar,
}

/// Where a page stands in its image.
fn place(page: PageIndex) -> usize {
    usize::try_from(page.0).expect("images are slices")
}

impl ImageMemory {
    fn show(&self, range: PageRange, what: impl Fn(Shown) -> Shown) {
        for shown in &mut lock(&self.shown)[place(range.start)..place(range.end)] {
            *shown = what(*shown);
        }
    }

    fn all_own(&self, range: PageRange) -> bool {
        let shown = lock(&self.shown);
        let mut range = shown[place(range.start)..place(range.end)].iter();
        range.all(|&shown| shown == Shown::Own)
    }
}

impl Memory for ImageMemory {
    type Store = Frames;

    fn detach(&self) {} // An image can be attached as often as one likes.

    fn len(&self) -> u64 {
        self.image.len() as u64
    }

    fn populated(
        &self,
        within: PageRange,
        max_pages: u64,
        runs: &mut Vec<PageRun>,
    ) -> Result<PageIndex, BackendError> {
        let shown = lock(&self.shown);
        let (mut next, mut found) = (within.start, 0);
        let first = runs.len();
        while next < within.end && found < max_pages {
            // A frame that nobody has touched is in no page table either.
            if shown[place(next)] == Shown::Own {
                found += 1;
                match runs[first..].last_mut() {
                    Some(run) if run.range.end == next => run.range.end = next.plus(1),
                    _ => runs.push(PageRun {
                        range: PageRange::one(next),
                        state: PageState::Private,
                        huge: false,
                    }),
                }
            }
            next = next.plus(1);
        }
        self.bar.inc(next.0 - within.start.0);
        Ok(next)
    }

    fn read(&self, page: PageIndex, buf: &mut PageBuf) -> Result<(), BackendError> {
        if lock(&self.shown)[place(page)] == Shown::Hole {
            return Err(BackendError::Host {
                call: "read",
                source: io::ErrorKind::NotFound.into(),
            });
        }
        write(number_of(self.image[place(page)]), buf);
        Ok(())
    }

    fn max_stop(&self) -> u64 {
        self.len()
    }

    fn stop(&self, range: PageRange, _: Backing) -> Result<Held, BackendError> {
        let shown = lock(&self.shown);
        let mut held = Held::default();
        for page in range.iter() {
            match held.held.last_mut() {
                _ if shown[place(page)] != Shown::Own => held.refused.push((page, Refusal::Raced)),
                Some(run) if run.end == page => run.end = page.plus(1),
                _ => held.held.push(PageRange::one(page)),
            }
        }
        Ok(held)
    }

    fn read_held(
        &self,
        page: PageIndex,
        _: Backing,
        buf: &mut PageBuf,
    ) -> Result<(), BackendError> {
        self.read(page, buf)
    }

    fn share(
        &self,
        range: PageRange,
        _: Backing,
        store: &Frames,
        first: FrameId,
    ) -> Result<(), BackendError> {
        for (page, frame) in range.iter().zip(first.0..) {
            let number = number_of(self.image[place(page)]);
            assert_eq!(
                number,
                store.number(FrameId(frame)),
                "merged with a frame that differs"
            );
        }
        self.show(range, |_| Shown::Frame);
        Ok(())
    }

    fn reuse(&self, range: PageRange) -> Result<(), BackendError> {
        self.show(range, |_| Shown::Frame);
        Ok(())
    }

    fn zero(&self, range: PageRange, _: Backing) -> Result<(), BackendError> {
        self.show(range, |_| Shown::Hole);
        Ok(())
    }

    fn restore(&self, _: PageRange) -> Result<(), BackendError> {
        Ok(()) // A copy shows the page's own bytes already.
    }

    fn lift(&self, _: PageRange, _: Backing) {} // Nobody writes, so a stop has no traces.

    fn settle(&self, range: PageRange, _: Backing) -> Settled {
        if self.all_own(range) {
            Settled::Kept
        } else {
            Settled::Replaced
        }
    }

    fn populate(&self, range: PageRange) -> Result<(), BackendError> {
        self.show(range, |shown| match shown {
            Shown::Frame => Shown::Own,
            other => other,
        });
        Ok(())
    }

    fn discard(&self, range: PageRange, _: Backing) -> Result<(), BackendError> {
        self.show(range, |_| Shown::Hole);
        Ok(())
    }

    // An image is neither cut nor cloned.

    fn split(&self, _: PageIndex) -> Result<(Self, Self), BackendError> {
        Err(unsupported("split"))
    }

    fn adopt(&self, _: PageRange, _: &Frames, _: FrameId) -> Result<(), BackendError> {
        Err(unsupported("adopt"))
    }

    fn vacate(&self, _: PageRange) -> Result<(), BackendError> {
        Err(unsupported("vacate"))
    }

    fn fill(&self, _: PageIndex, _: &PageBuf) -> Result<(), BackendError> {
        Err(unsupported("fill"))
    }
}

fn unsupported(call: &'static str) -> BackendError {
    BackendError::Host {
        call,
        source: io::ErrorKind::Unsupported.into(),
    }
}

#[cfg(test)]
mod tests {
    use ksm_core::census::Census;
    use ksm_core::{Config, Ksm, Target};

    use super::*;

    /// An image of pages of these contents; 0 is zeros.
    fn image(pages: &[Number]) -> Arc<[Content]> {
        let mut buf = PageBuf::zeroed();
        let mut page = |&number: &Number| {
            write(number, &mut buf);
            (*buf).clone()
        };
        let pages: Vec<_> = pages.iter().map(&mut page).collect();
        let mut census = Census::new(Some([1; 32])).unwrap();
        census.count(&pages).unwrap().into()
    }

    #[test]
    fn the_engine_finds_the_contract_kept() {
        let bar = ProgressBar::hidden();
        let ksm = Ksm::new(Model { bar: bar.clone() }, Config::default()).unwrap();
        let domain = ksm.create_domain().unwrap();
        let guest = ksm.create_space(domain).unwrap();
        let stretch: Vec<_> = [&[0, 1, 2, 3, 1, 2][..], &[5; 100]].concat();
        let options = RegionOptions { dma_guarded: true };
        let image = image(&stretch);
        let region = ksm.register(guest, Arc::clone(&image), options).unwrap();
        let passes = |passes| {
            for _ in 0..passes {
                ksm.scan(u64::MAX).unwrap();
            }
            assert_eq!(ksm.check(), Ok(()));
            let stats = ksm.stats();
            let gone = stats.pages_sharing + stats.stable_node_dups;
            (gone, stats.ksm_zero_pages, ksm.store_bytes().unwrap())
        };
        assert_eq!(passes(1), (0, 0, 0));
        let frames = |stats: ksm_core::Stats| bytes_in(stats.pages_shared);
        let merged = passes(2);
        assert_eq!(merged, (2 + 99, 1, frames(ksm.stats())));
        assert_eq!(bar.position(), 3 * image.len() as u64);

        ksm.unmerge(Target::All).unwrap();
        assert_eq!(passes(0).0, 0);
        assert_eq!(passes(2).0, merged.0, "copied pages are merged again");
        let tail = PageRange::new(PageIndex(6), 100);
        ksm.discard(region, tail).unwrap();
        assert_eq!(passes(1).0, 2);
        ksm.unregister(region).unwrap();
        assert_eq!(passes(1), (0, 0, 0));
    }
}
