//! The files of `/sys/kernel/mm/ksm`.

use anyhow::Context as _;

/// Where the settings and counters are.
pub const FOLDER: &str = "/sys/kernel/mm/ksm";

/// What a keeper must write so that the host is as it is now, the files `also`
/// among it, where they are.
pub(crate) fn to_restore(also: &[&str]) -> anyhow::Result<Vec<(String, String)>> {
    let mut settings = Vec::new();
    for &path in also {
        if let Ok(value) = std::fs::read_to_string(path) {
            settings.push((path.to_owned(), value.trim().to_owned()));
        }
    }
    let mut keep = |name: &str, value: String| settings.push((format!("{FOLDER}/{name}"), value));
    let run = setting("run")?;
    if run == "0" {
        // Nothing may stay merged that was not.
        keep("run", "2".to_owned());
    }
    keep("run", run);
    for name in ["pages_to_scan", "sleep_millisecs", "use_zero_pages"] {
        keep(name, setting(name)?);
    }
    for name in ["smart_scan", "advisor_mode"] {
        if let Ok(value) = setting(name) {
            keep(name, value);
        }
    }
    Ok(settings)
}

/// A setting as it is to be written: of several the chosen one.
///
/// # Errors
/// When it cannot be read.
pub fn setting(name: &str) -> anyhow::Result<String> {
    let path = format!("{FOLDER}/{name}");
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!("cannot read {path}: a kernel with KSM is needed, 6.8 or later")
    })?;
    let chosen = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    Ok(chosen.map_or(text.trim(), |(chosen, _)| chosen).to_owned())
}

/// A counter.
///
/// # Errors
/// When it cannot be read.
pub fn count(name: &str) -> anyhow::Result<u64> {
    setting(name)?
        .parse()
        .with_context(|| format!("{FOLDER}/{name} is not a number"))
}

/// Changes a setting.
///
/// # Errors
/// When this is not root, or the kernel refuses the value.
pub fn set(name: &str, value: &str) -> anyhow::Result<()> {
    let path = format!("{FOLDER}/{name}");
    std::fs::write(&path, value)
        .with_context(|| format!("cannot write {value} to {path}: ksmd obeys root alone"))
}
