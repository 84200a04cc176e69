//! [`Console`]: where a guest's serial line ends.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Context as _;

/// Longer lines are cut in several.
const LINE_BYTES: usize = 1024;

/// What a console looks out for.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    /// The guest has booted when this is there.
    pub(super) boot: Option<String>,
    /// Each line with it is a beat.
    pub(super) beat: Option<String>,
}

/// What has been seen on a console.
#[derive(Debug, Default)]
pub(super) struct Watch {
    booted: AtomicBool,
    beats: AtomicU64,
}

impl Watch {
    /// Whether the text that says so has come.
    pub(super) fn has_booted(&self) -> bool {
        self.booted.load(Ordering::Acquire)
    }

    /// Beats so far.
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Acquire)
    }
}

/// A guest's console.
#[derive(Debug)]
pub(super) struct Console {
    out: Out,
    marks: Marks,
    watch: Arc<Watch>,
    line: Vec<u8>,
    /// Whether this line has had its beat.
    beaten: bool,
}

#[derive(Debug)]
enum Out {
    /// Whole lines on standard error, behind the guest's number.
    Terminal(usize),
    /// All bytes as they come.
    File(File),
}

impl Console {
    /// The console of guest number `guest`: a file in `folder`, or the terminal.
    pub(super) fn open(guest: usize, folder: Option<&Path>, marks: Marks) -> anyhow::Result<Self> {
        let out = match folder {
            None => Out::Terminal(guest),
            Some(folder) => {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("cannot make {}", folder.display()))?;
                let path = folder.join(format!("guest-{guest}.log"));
                let file = File::create(&path);
                Out::File(file.with_context(|| format!("cannot write {}", path.display()))?)
            }
        };
        Ok(Self {
            out,
            marks,
            watch: Arc::default(),
            line: Vec::new(),
            beaten: false,
        })
    }

    /// What is seen on it.
    pub(super) fn watch(&self) -> Arc<Watch> {
        Arc::clone(&self.watch)
    }

    /// Text counts as soon as it is there: a prompt has no end of line.
    fn push(&mut self, byte: u8) {
        let ends = |line: &[u8], mark: &Option<String>| {
            mark.as_ref()
                .is_some_and(|mark| line.ends_with(mark.as_bytes()))
        };
        match byte {
            b'\r' => {}
            b'\n' => self.end_line(),
            _ => {
                self.line.push(byte);
                if ends(&self.line, &self.marks.boot) {
                    self.watch.booted.store(true, Ordering::Release);
                }
                if !self.beaten && ends(&self.line, &self.marks.beat) {
                    self.beaten = true;
                    self.watch.beats.fetch_add(1, Ordering::AcqRel);
                }
                if self.line.len() >= LINE_BYTES {
                    self.end_line();
                }
            }
        }
    }

    fn end_line(&mut self) {
        if let Out::Terminal(guest) = self.out {
            // What a guest prints must not move a terminal's cursor.
            let shown: String = String::from_utf8_lossy(&self.line)
                .chars()
                .filter(|char| !char.is_control() || *char == '\t')
                .collect();
            eprintln!("[guest {guest}] {shown}");
        }
        self.line.clear();
        self.beaten = false;
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Out::File(file) = &mut self.out {
            file.write_all(bytes)?;
        }
        for byte in bytes {
            self.push(*byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console() -> Console {
        let marks = Marks {
            boot: Some("login:".to_owned()),
            beat: Some("beat".to_owned()),
        };
        Console::open(0, None, marks).unwrap()
    }

    #[test]
    fn a_prompt_counts_before_its_line_ends() {
        let mut console = console();
        let watch = console.watch();
        console.write_all(b"lo").unwrap();
        console.write_all(b"gin").unwrap();
        assert!(!watch.has_booted());
        console.write_all(b": ").unwrap();
        assert!(watch.has_booted());
        assert_eq!(watch.beats(), 0);
    }

    #[test]
    fn a_line_is_one_beat_at_most() {
        let mut console = console();
        let watch = console.watch();
        console
            .write_all(b"beat 1, beat 2\r\nbe\nat\nbeat\n")
            .unwrap();
        assert_eq!(watch.beats(), 2);
        assert!(!watch.has_booted());
    }

    #[test]
    fn a_line_without_end_does_not_grow_for_ever() {
        let mut console = console();
        console.write_all(&[b'x'; 3 * LINE_BYTES + 5]).unwrap();
        assert_eq!(console.line.len(), 5);
    }
}
