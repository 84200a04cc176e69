//! [`Host`]: what this host can do, and what is missing.

use ksm_core::backend::linux::{LinuxBackend, OpenError};
use kvm_ioctls::Kvm;

use crate::args::{Args, Thp};

/// The version of KVM's interface, the same for ever.
const KVM_API_VERSION: i32 = 12;
/// The system's setting for huge pages.
const THP_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// What guests run on, and what merges their memory.
#[derive(Debug)]
pub(crate) struct Host {
    /// Without it, host threads are guests.
    pub(crate) kvm: Option<Kvm>,
    /// Without it, nothing is merged.
    pub(crate) backend: Option<LinuxBackend>,
    /// What is missing, what is done instead, and how to get it.
    pub(crate) notes: Vec<String>,
}

impl Host {
    /// Looks at what there is, as far as `args` want it.
    pub(crate) fn look(args: &Args) -> Self {
        let mut notes = Vec::new();
        let kvm = if args.host_threads {
            None
        } else {
            noted(&mut notes, open_kvm())
        };
        let backend = if args.no_dedup {
            None
        } else {
            noted(&mut notes, LinuxBackend::open().map_err(no_engine))
        };
        if args.thp == Thp::Always && thp_is_off() {
            notes.push(format!(
                "--thp always has no effect: the system allows no huge pages. Do `echo madvise > {THP_ENABLED}` as root."
            ));
        }
        Self {
            kvm,
            backend,
            notes,
        }
    }

    /// `kvm` or `host-threads`.
    pub(crate) const fn mode(&self) -> &'static str {
        match self.kvm {
            Some(_) => "kvm",
            None => "host-threads",
        }
    }
}

fn noted<T>(notes: &mut Vec<String>, found: Result<T, String>) -> Option<T> {
    found.map_err(|note| notes.push(note)).ok()
}

fn open_kvm() -> Result<Kvm, String> {
    let instead = "Guests are host threads instead";
    let kvm = Kvm::new().map_err(|error| {
        format!(
            "/dev/kvm cannot be opened ({error}). {instead}. Is there a CPU with virtualisation, and the module kvm_intel or kvm_amd loaded? Then become a member of the group kvm, or root."
        )
    })?;
    if kvm.get_api_version() != KVM_API_VERSION {
        return Err(format!(
            "/dev/kvm speaks version {} of its interface, not {KVM_API_VERSION}. {instead}.",
            kvm.get_api_version()
        ));
    }
    kvm.create_vm().map_err(|error| {
        format!("KVM makes no virtual machine ({error}). {instead}. Does another hypervisor hold the CPU?")
    })?;
    Ok(kvm)
}

fn no_engine(error: OpenError) -> String {
    let cause =
        std::error::Error::source(&error).map_or(String::new(), |cause| format!(" ({cause})"));
    format!("Nothing is merged: {error}{cause}.")
}

fn thp_is_off() -> bool {
    std::fs::read_to_string(THP_ENABLED).is_ok_and(|setting| setting.contains("[never]"))
}
