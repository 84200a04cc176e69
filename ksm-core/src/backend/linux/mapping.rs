//! Mapping, remapping and advising memory in this backend's care.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap, mremap_fixed,
    munmap,
};

use super::span::{Span, usize_from};
use crate::page::bytes_in;

/// What a mapping carries beside its pages, and a new one over it must be given
/// back (design fact 11).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attributes {
    /// Executable.
    pub(super) exec: bool,
    /// Takes no part in overcommit accounting.
    pub(super) no_reserve: bool,
    /// Was MADV_DONTFORK before it was attached. While attached it always is.
    pub(super) dont_fork: bool,
    /// MADV_DONTDUMP.
    pub(super) dont_dump: bool,
    /// MADV_HUGEPAGE.
    pub(super) huge: bool,
    /// MADV_NOHUGEPAGE.
    pub(super) no_huge: bool,
}

impl Attributes {
    /// What a mapping of the guest's own memory carries: all of it.
    pub(super) const fn of_own(self) -> Self {
        self
    }

    /// What a mapping of frames carries: advice on huge pages would be advice
    /// on the store's.
    pub(super) const fn of_frames(self) -> Self {
        Self {
            huge: false,
            no_huge: false,
            ..self
        }
    }

    fn protection(self) -> ProtFlags {
        let mut protection = ProtFlags::READ | ProtFlags::WRITE;
        protection.set(ProtFlags::EXEC, self.exec);
        protection
    }

    fn flags(self) -> MapFlags {
        let mut flags = MapFlags::PRIVATE;
        flags.set(MapFlags::NORESERVE, self.no_reserve);
        flags
    }

    /// Gives a fresh mapping what it must carry.
    ///
    /// # Errors
    /// Of the advice that failed; those after it were not given.
    pub(super) fn apply(self, span: Span) -> Result<(), Errno> {
        let advices = [
            (true, Advice::LinuxDontFork),
            (self.dont_dump, Advice::LinuxDontDump),
            (self.huge, Advice::LinuxHugepage),
            (self.no_huge, Advice::LinuxNoHugepage),
        ];
        advices
            .into_iter()
            .filter(|(carried, _)| *carried)
            .try_for_each(|(_, advice)| match advise(span, advice) {
                // A kernel without huge pages.
                Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => Ok(()),
                done => done,
            })
    }
}

/// Maps `pages` fresh pages of zeros somewhere.
pub(super) fn map_anonymous(pages: u64, attributes: Attributes) -> Result<Span, Errno> {
    // SAFETY: without MAP_FIXED no existing mapping is touched.
    let start = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            usize_from(bytes_in(pages)),
            attributes.protection(),
            attributes.flags(),
        )
    }?;
    // SAFETY: just mapped, known to nobody else; its owners (`Staging`,
    // `Scratch`) unmap it only when they go.
    Ok(unsafe { Span::new(start.expose_provenance(), pages) })
}

/// Maps pages of zeros in place of those of `span`, without what it carried.
pub(super) fn map_anonymous_over(span: Span, attributes: Attributes) -> Result<(), Errno> {
    // SAFETY: `span` is in our care: no Rust reference points into it, and its
    // owner has called for pages of zeros there.
    in_place_of(span, |place| unsafe {
        mmap_anonymous(
            span.pointer(),
            span.byte_len(),
            attributes.protection(),
            attributes.flags() | place,
        )
    })
}

/// Maps something over `span`. The kernel unmaps what is there first, and can still
/// be short of memory then: as long as nothing is mapped there, whoever touches it
/// gets a signal, and pages that are out have no place to go back to. So this does
/// not give up, unless somebody else has mapped something there meanwhile, which is
/// not mapped over.
fn in_place_of(
    span: Span,
    call: impl Fn(MapFlags) -> Result<*mut c_void, Errno>,
) -> Result<(), Errno> {
    let mut done = call(MapFlags::FIXED);
    while let Err(errno) = done {
        if errno == Errno::EXIST || is_mapped(span) {
            return Err(errno);
        }
        std::thread::sleep(super::RETRY_PAUSE);
        done = call(MapFlags::FIXED_NOREPLACE);
    }
    Ok(())
}

/// Maps a private view of `file` from `offset` on in place of the pages of
/// `span`, without what they carried.
pub(super) fn map_file_over(
    span: Span,
    attributes: Attributes,
    file: BorrowedFd<'_>,
    offset: u64,
) -> Result<(), Errno> {
    // SAFETY: `span` is in our care: no Rust reference points into it. The file
    // holds the same bytes there and never shrinks (F_SEAL_SHRINK).
    in_place_of(span, |place| unsafe {
        mmap(
            span.pointer(),
            span.byte_len(),
            attributes.protection(),
            MapFlags::PRIVATE | MapFlags::NORESERVE | place,
            file,
            offset,
        )
    })
}

/// Maps the pages of `file` from `offset` on in place of those of `span`, shared,
/// without what they carried.
pub(super) fn map_shared_over(
    span: Span,
    attributes: Attributes,
    file: BorrowedFd<'_>,
    offset: u64,
) -> Result<(), Errno> {
    let mut flags = MapFlags::SHARED;
    flags.set(MapFlags::NORESERVE, attributes.no_reserve);
    // SAFETY: `span` is in our care: no Rust reference points into it, and its
    // owner has put into the file what is to show there.
    in_place_of(span, |place| unsafe {
        mmap(
            span.pointer(),
            span.byte_len(),
            attributes.protection(),
            flags | place,
            file,
            offset,
        )
    })
}

/// Maps `pages` pages of `file` somewhere, shared, to be read.
pub(super) fn map_file(file: BorrowedFd<'_>, offset: u64, pages: u64) -> Result<Span, Errno> {
    // SAFETY: without MAP_FIXED no existing mapping is touched.
    let start = unsafe {
        mmap(
            std::ptr::null_mut(),
            usize_from(bytes_in(pages)),
            ProtFlags::READ,
            MapFlags::SHARED | MapFlags::NORESERVE,
            file,
            offset,
        )
    }?;
    // SAFETY: just mapped, known to nobody else; its owner (`Window`) unmaps it
    // only when it goes.
    Ok(unsafe { Span::new(start.expose_provenance(), pages) })
}

/// Moves the mapping `from` in place of `to`, whose pages are freed.
pub(super) fn move_over(from: Span, to: Span) -> Result<(), Errno> {
    // SAFETY: both are in our care, do not overlap (`from` was mapped beside
    // `to`), and hold the same bytes.
    unsafe { remap(from, to, MremapFlags::MAYMOVE) }
}

/// Moves the pages of `from` in place of those of `to`. `from` stays mapped,
/// without them.
pub(super) fn move_pages_over(from: Span, to: Span) -> Result<(), Errno> {
    // SAFETY: both are in our care and do not overlap. What `to` holds is what
    // its owner has moved to `from`: nothing.
    unsafe { remap(from, to, MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP) }
}

/// # Safety
/// No Rust reference points into `from` or `to`, they do not overlap, and who
/// owns `to` wants the pages of `from` there.
unsafe fn remap(from: Span, to: Span, flags: MremapFlags) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    unsafe {
        mremap_fixed(
            from.pointer(),
            from.byte_len(),
            to.byte_len(),
            flags,
            to.pointer(),
        )
    }
    .map(drop)
}

/// Moves the pages of `span`, which stays mapped without them, to where nothing
/// was. What is there then is like `span` in all that the kernel knows of it, but
/// for its address.
pub(super) fn move_pages_away(span: Span) -> Result<Span, Errno> {
    let anywhere = std::ptr::null_mut::<c_void>();
    // With this flag the kernel takes a new address, which rustix does not pass.
    // SAFETY: `span` is in our care: no Rust reference points into it. Its owner
    // keeps everybody from it until the pages are back, or knows that it has none.
    let start = unsafe {
        libc::mremap(
            span.pointer(),
            span.byte_len(),
            span.byte_len(),
            libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP,
            anywhere,
        )
    };
    if start == libc::MAP_FAILED {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    }
    // SAFETY: just mapped, known to nobody else; its owner (`Anchor`) unmaps it.
    Ok(unsafe { Span::new(start.expose_provenance(), span.pages()) })
}

/// Lets a mapping that only its caller knows grow to `pages` pages, elsewhere if
/// need be. The old span is no more.
pub(super) fn grow(span: Span, pages: u64) -> Result<Span, Errno> {
    let bytes = usize_from(bytes_in(pages));
    // SAFETY: nobody else knows of `span`, which its caller forgets.
    let start = unsafe { mremap(span.pointer(), span.byte_len(), bytes, MremapFlags::MAYMOVE) }?;
    // SAFETY: as in `move_pages_away`.
    Ok(unsafe { Span::new(start.expose_provenance(), pages) })
}

/// Unmaps memory that this backend mapped itself.
pub(super) fn unmap(span: Span) {
    // SAFETY: its owner is being dropped, so nobody uses it any more.
    let unmapped = unsafe { munmap(span.pointer(), span.byte_len()) };
    if unmapped == Err(Errno::NOMEM) {
        // It has become one with its neighbour, and there is no mapping left to cut it
        // off: so it takes address space, and nothing else.
        let _ = drop_pages(span);
        return;
    }
    debug_assert!(unmapped.is_ok(), "{unmapped:?}");
}

/// Drops the pages of `span`: what lies below shows again.
pub(super) fn drop_pages(span: Span) -> Result<(), Errno> {
    match advise(span, Advice::LinuxDontNeed) {
        // Locked memory needs to be told so (design fact 10).
        Err(Errno::INVAL) => advise(span, Advice::LinuxDontneedLocked),
        done => done,
    }
}

/// Gives the kernel an advice that keeps what readers see, or that drops pages
/// which the caller may drop.
pub(super) fn advise(span: Span, advice: Advice) -> Result<(), Errno> {
    // SAFETY: `span` is in our care and no Rust reference points into it, so
    // even an advice that drops its pages breaks no promise of the language.
    unsafe { madvise(span.pointer(), span.byte_len(), advice) }
}

/// Whether all of `span` is mapped.
pub(super) fn is_mapped(span: Span) -> bool {
    residency(span).is_some()
}

/// For each page of `span`, whether it is in memory, in the page table or not
/// (the lowest bit); `None` if a part is not mapped.
pub(super) fn residency(span: Span) -> Option<Vec<u8>> {
    let mut residency = vec![0; usize_from(span.pages())];
    // SAFETY: mincore writes one byte for each page of the span to a vector of
    // that length, and reads nothing else.
    let done =
        unsafe { libc::mincore(span.pointer(), span.byte_len(), residency.as_mut_ptr()) == 0 };
    done.then_some(residency)
}

/// A mapping that is unmapped when it goes out of scope, unless it moved away.
#[derive(Debug)]
pub(super) struct Scratch(Option<Span>);

impl Scratch {
    /// Maps `pages` pages of zeros.
    pub(super) fn new(pages: u64, attributes: Attributes) -> Result<Self, Errno> {
        map_anonymous(pages, attributes).map(Self::of)
    }

    /// Owns a mapping that nobody else knows of.
    pub(super) const fn of(span: Span) -> Self {
        Self(Some(span))
    }

    /// The pages.
    pub(super) fn span(&self) -> Span {
        self.0
            .expect("taken only by `move_over`, which consumes it")
    }

    /// Moves the mapping in place of `to`.
    ///
    /// mremap unmaps the target first and can still fail then (design fact 11):
    /// as long as the target is gone, its only copy is here, so this does not
    /// give up.
    pub(super) fn move_over(mut self, to: Span) -> Result<(), Errno> {
        loop {
            match move_over(self.span(), to) {
                Ok(()) => {
                    self.0 = None;
                    return Ok(());
                }
                Err(errno) if is_mapped(to) => return Err(errno),
                Err(_) => std::thread::sleep(super::RETRY_PAUSE),
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(span) = self.0 {
            unmap(span);
        }
    }
}
