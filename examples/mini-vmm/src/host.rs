//! [`Host`]: what this host can do, and what is missing.

use ksm_core::backend::linux::{LinuxBackend, OpenError};
use kvm_ioctls::Kvm;

use crate::args::{Args, Engine, Thp};

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
        let mut kvm = if args.host_threads {
            None
        } else {
            noted(&mut notes, open_kvm())
        };
        let mut backend = None;
        if !args.no_dedup && args.engine == Engine::Ours {
            backend = open_backend(&mut notes, &mut kvm);
        }
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

    /// Whether Linux guests cannot be run as `args` ask: without KVM there are none, and
    /// without a backend they would not be merged. The notes say why.
    pub(crate) const fn lacks_for_linux(&self, args: &Args) -> bool {
        let ours = !args.no_dedup && matches!(args.engine, Engine::Ours);
        self.kvm.is_none() || (ours && self.backend.is_none())
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

/// Without the right to stop KVM's writes, guests cannot run under KVM and be
/// merged. Host threads can, without any right.
fn open_backend(notes: &mut Vec<String>, kvm: &mut Option<Kvm>) -> Option<LinuxBackend> {
    let error = match LinuxBackend::open() {
        Ok(backend) => return Some(backend),
        Err(error) => error,
    };
    let in_user_mode = match &error {
        OpenError::UserfaultfdNotPermitted(_) => LinuxBackend::open_user_mode().ok(),
        _ => None,
    };
    if in_user_mode.is_some() && kvm.take().is_some() {
        notes.push(format!(
            "KVM's writes to guest memory cannot be stopped. Guests are host threads instead. {}.",
            explained(&error)
        ));
    } else if in_user_mode.is_none() {
        notes.push(format!("Nothing is merged: {}.", explained(&error)));
    }
    in_user_mode
}

/// An error with its cause.
fn explained(error: &OpenError) -> String {
    let cause =
        std::error::Error::source(error).map_or(String::new(), |cause| format!(" ({cause})"));
    format!("{error}{cause}")
}

fn thp_is_off() -> bool {
    std::fs::read_to_string(THP_ENABLED).is_ok_and(|setting| setting.contains("[never]"))
}
