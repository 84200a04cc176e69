//! Scripts on the simulated backend, which has every power.

use super::host::{Event, Host, Meddling, Weather};
use crate::backend::sim::{SimBackend, SimConfig, SimGuest, SimPageState, Stop, Storm};
use crate::config::Config;
use crate::page::{PageBuf, PageIndex, PageRange};

/// A simulated host for scripts.
#[derive(Debug)]
pub struct SimHost {
    sim: SimBackend,
    config: SimConfig,
    /// What merging may cost, if less than most of what the host has.
    budget: Option<u64>,
}

impl SimHost {
    /// One with the default settings, but for the seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with(SimConfig {
            seed,
            ..SimConfig::default()
        })
    }

    /// One with these settings.
    #[must_use]
    pub fn with(config: SimConfig) -> Self {
        let sim = SimBackend::new(config.clone());
        Self {
            sim,
            config,
            budget: None,
        }
    }

    /// The same host, on which merging may cost so many VMAs only.
    #[must_use]
    pub fn with_budget(self, vmas: u64) -> Self {
        Self {
            budget: Some(vmas),
            ..self
        }
    }

    /// One that a byte chooses, for fuzzing: all of it is the seed; its highest
    /// bits say how pages are stopped, and whether limits are tight, its lowest
    /// ones whether mappings are scarce.
    #[must_use]
    pub fn chosen_by(byte: u8) -> Self {
        let tight = byte & 0x40 != 0;
        let default = SimConfig::default();
        let host = Self::with(SimConfig {
            seed: u64::from(byte),
            stop: match byte >> 5 {
                0b100 | 0b110 => Stop::Protect,
                0b101 | 0b111 => Stop::Memfd,
                _ => Stop::Move,
            },
            max_stop: if tight { 3 } else { default.max_stop },
            pages_per_huge: if tight { 2 } else { default.pages_per_huge },
            ..default
        });
        match byte & 3 {
            3 => host.with_budget(4 + u64::from(byte >> 2 & 7)),
            _ => host,
        }
    }

    /// The line that makes such a host again: see [`SimHost::from_line`].
    #[must_use]
    pub fn line(&self) -> String {
        let SimConfig {
            seed,
            stop,
            max_stop,
            pages_per_huge,
            ..
        } = self.config;
        let budget = self
            .budget
            .map_or(String::new(), |vmas| format!(" budget {vmas}"));
        format!("#! {seed} {stop:?} max_stop {max_stop} pages_per_huge {pages_per_huge}{budget}")
    }

    /// The host that a line like `#! 1 Move max_stop 256 pages_per_huge 16`
    /// describes, with ` budget 8` behind it or not: what a script needs besides
    /// its operations to be run again.
    #[must_use]
    pub fn from_line(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let (words, budget) = match words[..] {
            [.., "budget", vmas] => (&words[..words.len() - 2], Some(vmas)),
            _ => (&words[..], None),
        };
        let [
            "#!",
            seed,
            stop,
            "max_stop",
            max_stop,
            "pages_per_huge",
            huge,
        ] = *words
        else {
            return None;
        };
        let host = Self::with(SimConfig {
            seed: seed.parse().ok()?,
            stop: match stop {
                "Move" => Stop::Move,
                "Protect" => Stop::Protect,
                "Memfd" => Stop::Memfd,
                _ => return None,
            },
            max_stop: max_stop.parse().ok()?,
            pages_per_huge: huge.parse().ok()?,
            ..SimConfig::default()
        });
        match budget {
            Some(vmas) => Some(host.with_budget(vmas.parse().ok()?)),
            None => Some(host),
        }
    }

    /// The host.
    #[must_use]
    pub const fn sim(&self) -> &SimBackend {
        &self.sim
    }

    /// The aligned pages around one: a huge page.
    fn around(&self, page: PageIndex) -> PageRange {
        let pages = self.config.pages_per_huge;
        PageRange::new(PageIndex(page.0 / pages * pages), pages)
    }
}

impl Host for SimHost {
    type Backend = SimBackend;
    type Guest = SimGuest;

    fn backend(&self) -> SimBackend {
        self.sim.clone()
    }

    fn config(&self) -> Config {
        Config {
            max_vmas: self.budget,
            parallel_pages: u32::MAX,
            seed: Some([1; 32]),
            ..Config::default()
        }
    }

    fn guest(&mut self, pages: u64) -> SimGuest {
        self.sim.guest(pages)
    }

    fn source(&self, guest: &SimGuest) -> SimGuest {
        guest.clone()
    }

    fn write(&mut self, guest: &SimGuest, page: PageIndex, bytes: &PageBuf) {
        guest.write(page, bytes);
    }

    fn read(&mut self, guest: &SimGuest, page: PageIndex) -> PageBuf {
        guest.read(page)
    }

    fn pause(&mut self, guest: &SimGuest, paused: bool) {
        guest.pause(paused);
    }

    fn reads_fill(&self) -> bool {
        self.config.stop == Stop::Memfd
    }

    fn peek(&mut self, guest: &SimGuest, page: PageIndex) -> Option<PageBuf> {
        let bytes = guest.peek(page);
        Some(bytes.expect("nothing is out between operations"))
    }

    fn meddle(&mut self, guest: &SimGuest, range: PageRange, how: Meddling) -> Option<PageRange> {
        let (page, nothing) = (range.start, PageRange::default());
        match how {
            // Nothing would notice it.
            Meddling::Pin if self.config.stop != Stop::Move => return None,
            Meddling::Pin | Meddling::AnnouncedPin => {
                return guest.pin(page).then(|| PageRange::one(page));
            }
            Meddling::Huge => return guest.collapse(page).then(|| self.around(page)),
            Meddling::Unpin => guest.unpin(page),
            Meddling::Fork => guest.fork(range),
            Meddling::Swap => {
                for page in range.iter() {
                    guest.swap_out(page);
                }
            }
        }
        Some(nothing)
    }

    fn set_weather(&mut self, weather: Weather) -> bool {
        match weather {
            Weather::Fail { call, failure, nth } => self.sim.fail_nth(call, failure, nth),
            Weather::MaxVmas(max) => self.sim.set_max_vmas(max),
            Weather::Storm => self.sim.set_storm(Storm::rough()),
            Weather::Calm => {
                self.sim.set_storm(Storm::default());
                self.sim.no_failures();
                self.sim.set_max_vmas(self.config.max_vmas);
            }
        }
        true
    }

    fn hold_still(&mut self, still: bool) {
        self.sim.hold_still(still);
    }

    fn events(&mut self, guest: &SimGuest) -> Vec<Event> {
        guest.take_storm_log()
    }

    fn mergeable(&self, guest: &SimGuest, page: PageIndex) -> bool {
        let own = guest.state(page) == SimPageState::Private;
        let refused = match self.config.stop {
            Stop::Move => own && guest.is_forked(page),
            Stop::Protect => guest.is_huge(page),
            Stop::Memfd => false,
        };
        !refused && !guest.is_swapped(page) && !guest.is_pinned(page)
    }

    fn merged(&self, guest: &SimGuest) -> Option<u64> {
        Some(guest.count(SimPageState::Merged))
    }

    fn verdict(&self) -> Result<(), String> {
        if let Some(violation) = self.sim.violation() {
            return Err(violation);
        }
        let busy = self.sim.busy();
        if busy.is_idle() {
            return Ok(());
        }
        Err(format!("not idle between operations: {busy:?}"))
    }
}
