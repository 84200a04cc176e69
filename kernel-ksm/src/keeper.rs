//! [`Keeper`]: a process of its own that gives the host its settings back when
//! this one has ended, however it did.
//!
//! It reads what to write where from a pipe, and writes it when the pipe is
//! closed: that happens when the [`Keeper`] is dropped, and no less when this
//! process panics, exits, or is killed by any signal.

use std::io::{Read as _, Write as _, stdin};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::Context as _;

/// The only argument of a keeper.
const ARGUMENT: &str = "--keep-settings-until-end-of-input";

/// Keeps settings for as long as it lives.
#[derive(Debug)]
pub struct Keeper(Child);

impl Keeper {
    /// Starts a keeper that writes these values to these files in the end, in
    /// order. Without that a keeper never ends: the program must begin with
    /// [`serve_if_asked`].
    ///
    /// # Errors
    /// When the host gives no process or pipe.
    pub fn start(settings: &[(String, String)]) -> anyhow::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg(ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // What a terminal sends to this process must not end the keeper.
            .process_group(0)
            .spawn()
            .context("cannot start the process that restores the host's settings")?;
        let text: String = settings
            .iter()
            .map(|(path, value)| format!("{path} {value}\n"))
            .collect();
        let pipe = child.stdin.as_mut().expect("asked for a pipe");
        let written = pipe.write_all(text.as_bytes());
        let keeper = Self(child);
        written.context("cannot tell the host's settings to the process that restores them")?;
        Ok(keeper)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        match self.0.wait() {
            Ok(status) if status.success() => {}
            // It has said why.
            Ok(status) => eprintln!("the host's settings are not all restored: {status}"),
            Err(error) => eprintln!("the host's settings may not be restored: {error}"),
        }
    }
}

/// In a keeper's process, does what it is for. `None` in any other: the first
/// thing that a program with a [`Keeper`] calls.
#[must_use = "a keeper's process is to end with this"]
pub fn serve_if_asked() -> Option<ExitCode> {
    if std::env::args().nth(1)? != ARGUMENT {
        return None;
    }
    let mut text = String::new();
    if let Err(error) = stdin().read_to_string(&mut text) {
        eprintln!("cannot read which settings to restore: {error}");
        return Some(ExitCode::FAILURE);
    }
    let mut exit = ExitCode::SUCCESS;
    for (path, value) in text.lines().filter_map(|line| line.split_once(' ')) {
        if let Err(error) = std::fs::write(path, value) {
            eprintln!("cannot write {value} to {path}: {error}");
            exit = ExitCode::FAILURE;
        }
    }
    Some(exit)
}
