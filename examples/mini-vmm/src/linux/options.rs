//! The part of the command line that is about Linux guests.

use std::path::PathBuf;

use super::acpi::MAX_CPUS;

/// Options of Linux guests.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Linux guests")]
pub(crate) struct LinuxArgs {
    /// Boot this Linux kernel in every guest: a bzImage, or a vmlinux (ELF). What
    /// else a guest does is its ramdisk's business
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["image", "recipe", "seed", "rewrites", "busy", "chaos", "host_threads"]
    )]
    pub(crate) kernel: Option<PathBuf>,

    /// Its initial ramdisk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,

    /// Its command line. This machine resets by the keyboard controller
    #[arg(
        long,
        value_name = "TEXT",
        requires = "kernel",
        default_value = "console=ttyS0 reboot=k panic=-1"
    )]
    pub(crate) cmdline: String,

    /// CPUs of each guest
    #[arg(
        long,
        value_name = "N",
        requires = "kernel",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_CPUS))
    )]
    pub(crate) vcpus: u8,

    /// Write each guest's serial console to a file of its own in this folder,
    /// guest-N.log, instead of to standard error
    #[arg(long, value_name = "FOLDER", requires = "kernel")]
    pub(crate) serial_dir: Option<PathBuf>,

    /// A guest has booted when this text is on its console; nothing is merged before
    /// all have
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub(crate) boot_marker: Option<String>,

    /// A guest is well as long as lines with this text come on its console. It must
    /// go on after everything is merged, or the run fails
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub(crate) beat_marker: Option<String>,

    /// Never let two guests run at once: boot one after another, then let them take
    /// turns, for hosts on which only one does well
    #[arg(long, requires_all = ["kernel", "boot_marker"])]
    pub(crate) one_at_a_time: bool,

    /// First let the host's ksmd merge the same guests, paused, then ours, and say
    /// what each has found; ksmd's merges are undone in between
    #[arg(long, requires_all = ["kernel", "boot_marker"], conflicts_with = "no_dedup")]
    pub(crate) compare_kernel: bool,
}

/// What a guest boots.
#[derive(Clone, Debug)]
pub(super) struct BootOptions {
    pub(super) kernel: PathBuf,
    pub(super) initrd: Option<PathBuf>,
    pub(super) cmdline: String,
    pub(super) vcpus: u8,
}

impl LinuxArgs {
    /// What guests boot, if they are Linux guests.
    pub(super) fn boot_options(&self) -> Option<BootOptions> {
        let kernel = self.kernel.clone()?;
        Some(BootOptions {
            kernel,
            initrd: self.initrd.clone(),
            cmdline: self.cmdline.clone(),
            vcpus: self.vcpus,
        })
    }
}
