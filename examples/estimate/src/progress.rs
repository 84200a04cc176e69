//! How far the work is: a line on standard error, if that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar for `pages` pages of work.
pub(crate) fn bar(what: &str, pages: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}% {eta}")
        .expect("a template without mistakes");
    ProgressBar::new(pages)
        .with_style(style)
        .with_message(what.to_owned())
}
