//! [`Smaps`]: the mappings of this process, and what each carries
//! (`/proc/self/smaps`).

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use rustix::io::{Errno, pread};

use crate::sync::Mutex;

/// What is read at once: the kernel gives no more than a page, and more only
/// where it had to say more of one mapping.
const READ_BYTES: usize = 4096;

/// One mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mapping {
    /// Its first address.
    pub(super) start: u64,
    /// The first address behind it.
    pub(super) end: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) executable: bool,
    /// `MAP_SHARED`.
    pub(super) shared: bool,
    /// Where in its file it starts.
    pub(super) offset: u64,
    /// Major and minor number of its file's device.
    pub(super) device: (u32, u32),
    /// Its file; 0 if it has none.
    pub(super) inode: u64,
    /// The two letters of each flag, with spaces between them
    /// (`Documentation/filesystems/proc.rst`).
    flags: String,
}

impl Mapping {
    /// Whether it has a flag, by its two letters.
    pub(super) fn has(&self, flag: &str) -> bool {
        self.flags.split_ascii_whitespace().any(|has| has == flag)
    }

    /// Of the line that a mapping begins with, as
    /// `7f00c000-7f00d000 rw-p 00002000 fe:00 247282 /usr/bin/head`; `None` of
    /// other lines.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let perms = words.next()?.as_bytes();
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        let number = |digits| u32::from_str_radix(digits, 16).ok();
        let &[r, w, x, s] = perms else { return None };
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            readable: r == b'r',
            writable: w == b'w',
            executable: x == b'x',
            shared: s == b's',
            offset: hex(offset)?,
            device: (number(major)?, number(minor)?),
            inode: words.next()?.parse().ok()?,
            flags: String::new(),
        })
    }
}

/// The open file.
#[derive(Debug)]
pub(super) struct Smaps {
    /// One reader at a time: the kernel makes the text as it is read, and begins
    /// anew for a reader who does not go on where the last one stopped. Then
    /// the text of mappings that have come meanwhile moves what follows, and
    /// lines are torn.
    fd: Mutex<OwnedFd>,
}

impl Smaps {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd: Mutex::new(fd) }
    }

    /// Calls `each` for every mapping, in the order of their addresses, until it
    /// breaks off. Mappings that come and go meanwhile are seen or not; the others
    /// are seen once.
    ///
    /// # Errors
    /// When the file cannot be read, or is not what it should be.
    pub(super) fn each(
        &self,
        mut each: impl FnMut(&Mapping) -> ControlFlow<()>,
    ) -> Result<(), Errno> {
        let fd = self.fd.lock();
        let mut text = Vec::with_capacity(2 * READ_BYTES);
        let mut mapping = None;
        let mut at = 0;
        loop {
            let rest = text.len();
            text.resize(rest + READ_BYTES, 0);
            let read = match pread(&*fd, &mut text[rest..], at) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(Errno::INTR) => 0,
                Err(errno) => return Err(errno),
            };
            text.truncate(rest + read);
            at += read as u64;
            let whole = text.iter().rposition(|&byte| byte == b'\n');
            let whole = whole.map_or(0, |newline| newline + 1);
            for line in text[..whole].split(|&byte| byte == b'\n') {
                let Some(complete) = feed(&mut mapping, line)? else {
                    continue;
                };
                if each(&complete).is_break() {
                    return Ok(());
                }
            }
            text.drain(..whole);
        }
    }
}

/// Takes a line in. Returns the mapping that it completes.
fn feed(mapping: &mut Option<Mapping>, line: &[u8]) -> Result<Option<Mapping>, Errno> {
    // Names of files may be anything.
    let line = String::from_utf8_lossy(line);
    if let Some(flags) = line.strip_prefix("VmFlags:") {
        let mut complete = mapping.take().ok_or(Errno::BADMSG)?;
        flags.clone_into(&mut complete.flags);
        return Ok(Some(complete));
    }
    // Names of counters begin with a capital.
    if line.starts_with(|first: char| first.is_ascii_hexdigit() && !first.is_ascii_uppercase()) {
        *mapping = Some(Mapping::parse(&line).ok_or(Errno::BADMSG)?);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use rustix::fs::{Mode, OFlags, open};

    use super::super::mapping::{Attributes, Scratch};
    use super::*;

    const TEXT: &str = "\
7f00c000-7f00d000 rw-s 00002000 fe:00 247282                     /a b (deleted)
Size:                  4 kB
THPeligible:           0
VmFlags: rd wr sh mr mw me ms dc \n";

    #[test]
    fn a_mapping_is_what_its_lines_say() {
        let mut mapping = None;
        let complete: Vec<Mapping> = TEXT
            .split('\n')
            .filter_map(|line| feed(&mut mapping, line.as_bytes()).unwrap())
            .collect();
        let [found] = &complete[..] else {
            panic!("{complete:?}");
        };
        let expected = Mapping {
            start: 0x7f00_c000,
            end: 0x7f00_d000,
            readable: true,
            writable: true,
            shared: true,
            offset: 0x2000,
            device: (0xfe, 0),
            inode: 247_282,
            flags: found.flags.clone(),
            ..Mapping::default()
        };
        assert_eq!(*found, expected);
        assert!(found.has("dc") && found.has("rd") && !found.has("ht"));
    }

    #[test]
    fn lines_out_of_place_are_refused() {
        let mut none = None;
        assert_eq!(feed(&mut none, b"VmFlags: rd"), Err(Errno::BADMSG));
        assert_eq!(feed(&mut none, b"7f00c000 rw-p"), Err(Errno::BADMSG));
    }

    /// Readers beside one another, and beside threads that map and unmap, find
    /// every mapping that stands.
    #[test]
    fn readers_and_changes_beside_one_another() {
        let fd = open("/proc/self/smaps", OFlags::RDONLY, Mode::empty()).unwrap();
        let smaps = Smaps::new(fd);
        let stands = Scratch::new(3, Attributes::default()).unwrap();
        let address = stands.span().address();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        drop(Scratch::new(2, Attributes::default()));
                    }
                });
            }
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..50 {
                            let mut found = 0;
                            let read = smaps.each(|mapping| {
                                found += u32::from((mapping.start..mapping.end).contains(&address));
                                ControlFlow::Continue(())
                            });
                            assert_eq!((read, found), (Ok(()), 1));
                        }
                    })
                })
                .collect();
            let failed = readers.into_iter().any(|reader| reader.join().is_err());
            stop.store(true, Ordering::Relaxed);
            assert!(!failed);
        });
    }
}
