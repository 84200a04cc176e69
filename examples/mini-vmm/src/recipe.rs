//! Recipes: what guests fill their memory with.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// How the pages of the shares lie among one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// One share after the other, at the same place in every guest.
    Sorted,
    /// Runs of 16 pages change places, differently in every guest.
    Shuffled,
    /// Single pages change places, differently in every guest.
    Scattered,
}

impl Order {
    const NAMES: [(&'static str, Self); 3] = [
        ("in-order", Self::Sorted),
        ("shuffled", Self::Shuffled),
        ("scattered", Self::Scattered),
    ];
}

/// Shares of a guest's memory, in percent, and how they are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recipe {
    /// Pages that every guest has, in percent of all.
    pub(crate) common: u8,
    /// Pages that no other page is equal to.
    pub(crate) unique: u8,
    /// Pages of zeros.
    pub(crate) zero: u8,
    /// Pages whose counters all guests increment in lockstep.
    pub(crate) rewritten: u8,
    /// Pages that `--chaos` discards; the guest then checks that they are zero,
    /// and fills them again. Common to all guests.
    pub(crate) discardable: u8,
    /// The part of the common pages, in percent of them, that is one long
    /// stretch of a single content.
    pub(crate) stretch: u8,
    /// The part of the common pages, in percent of them, whose last byte is the
    /// guest's own, so that they look common and are not.
    pub(crate) last_byte: u8,
    /// How the shares lie among one another.
    pub(crate) order: Order,
    /// How long a rewritten page rests before it is rewritten, in milliseconds.
    pub(crate) rest_millisecs: u32,
    /// How often a rewritten page is incremented before it rests again.
    pub(crate) times: u32,
    /// Into how many parts the rewritten pages are cut. One part is rewritten
    /// while the others rest.
    pub(crate) slices: u32,
}

/// The word that a stretch repeats: how kernels poison free memory.
pub(crate) const POISON: u64 = 0xcccc_cccc_cccc_cccc;

const DEFAULT: Recipe = Recipe {
    common: 40,
    unique: 20,
    zero: 20,
    rewritten: 20,
    discardable: 0,
    stretch: 0,
    last_byte: 5,
    order: Order::Sorted,
    rest_millisecs: 2000,
    times: 4,
    slices: 32,
};

const LOCKSTEP: Recipe = Recipe {
    common: 4,
    unique: 3,
    zero: 3,
    rewritten: 90,
    rest_millisecs: 1000,
    ..DEFAULT
};

/// Recipes with a name, and what they are for.
pub(crate) const PRESETS: [(&str, Recipe, &str); 5] = [
    ("default", DEFAULT, "a bit of everything"),
    (
        "lockstep",
        LOCKSTEP,
        "nearly all pages are rewritten in lockstep while they are merged",
    ),
    (
        "chaos",
        Recipe {
            common: 10,
            unique: 10,
            zero: 10,
            rewritten: 50,
            discardable: 20,
            rest_millisecs: 1000,
            order: Order::Shuffled,
            ..DEFAULT
        },
        "rewritten pages beside pages that --chaos can discard",
    ),
    (
        "scattered",
        Recipe {
            order: Order::Scattered,
            ..DEFAULT
        },
        "equal pages stand alone, at another place in every guest",
    ),
    (
        "poison",
        Recipe {
            stretch: 75,
            order: Order::Shuffled,
            ..DEFAULT
        },
        "most common pages are one content, 0xcc, in long stretches",
    ),
];

impl Default for Recipe {
    fn default() -> Self {
        DEFAULT
    }
}

/// What is wrong with a recipe.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum RecipeError {
    /// Neither a preset nor `name=value`.
    #[error("`{0}` is neither a preset ({names}) nor name=value", names = preset_names())]
    NotAnItem(String),
    /// No such setting.
    #[error("no setting `{0}`: there are {KEYS}")]
    Unknown(String),
    /// The value makes no sense.
    #[error("{key}={value}: expected {expected}")]
    Value {
        /// The setting.
        key: String,
        /// What was given.
        value: String,
        /// What can be given.
        expected: &'static str,
    },
    /// The shares do not make a whole.
    #[error("common + unique + zero + rewritten + discardable is {0}%, not 100%")]
    Sum(u32),
    /// The dials of the common pages exceed them.
    #[error("stretch + lastbyte is {0}% of the common pages, more than 100%")]
    Common(u32),
}

const KEYS: &str =
    "common, unique, zero, rewritten, discardable, stretch, lastbyte, order, rest, times, slices";

fn preset_names() -> String {
    PRESETS.map(|(name, ..)| name).join(", ")
}

/// Items with commas between them, from left to right: the name of a preset, or
/// `name=value`.
impl FromStr for Recipe {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        let mut recipe = Self::default();
        let mut shares_given = false;
        for item in text.split(',').map(str::trim) {
            if let Some((_, preset, _)) = PRESETS.iter().find(|(name, ..)| *name == item) {
                recipe = *preset;
                continue;
            }
            let (key, value) = item
                .split_once('=')
                .ok_or_else(|| RecipeError::NotAnItem(item.to_owned()))?;
            // Shares are given as a whole: those left out are then 0.
            if recipe.share_mut(key).is_some() && !shares_given {
                shares_given = true;
                for share in SHARES {
                    *recipe.share_mut(share).expect("SHARES names shares") = 0;
                }
            }
            recipe.set(key, value)?;
        }
        recipe.check()
    }
}

const SHARES: [&str; 5] = ["common", "unique", "zero", "rewritten", "discardable"];

impl Recipe {
    fn share_mut(&mut self, key: &str) -> Option<&mut u8> {
        match key {
            "common" => Some(&mut self.common),
            "unique" => Some(&mut self.unique),
            "zero" => Some(&mut self.zero),
            "rewritten" => Some(&mut self.rewritten),
            "discardable" => Some(&mut self.discardable),
            _ => None,
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), RecipeError> {
        let bad = |expected| RecipeError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            expected,
        };
        let percent = || {
            let digits = value.strip_suffix('%').unwrap_or(value);
            let percent: Option<u8> = digits.parse().ok();
            percent
                .filter(|&percent| percent <= 100)
                .ok_or_else(|| bad("0 to 100"))
        };
        let number = || {
            let number: Option<u32> = value.parse().ok();
            number
                .filter(|number| (1..=1_000_000).contains(number))
                .ok_or_else(|| bad("1 to 1000000"))
        };
        if let Some(share) = self.share_mut(key) {
            *share = percent()?;
            return Ok(());
        }
        match key {
            "stretch" => self.stretch = percent()?,
            "lastbyte" => self.last_byte = percent()?,
            "rest" => self.rest_millisecs = number()?,
            "times" => self.times = number()?,
            "slices" => self.slices = number()?,
            "order" => {
                let order = Order::NAMES.iter().find(|(name, _)| *name == value);
                self.order = order
                    .ok_or_else(|| bad("in-order, shuffled or scattered"))?
                    .1;
            }
            _ => return Err(RecipeError::Unknown(key.to_owned())),
        }
        Ok(())
    }

    fn check(mut self) -> Result<Self, RecipeError> {
        let sum = SHARES
            .iter()
            .map(|share| u32::from(*self.share_mut(share).expect("SHARES names shares")))
            .sum();
        if sum != 100 {
            return Err(RecipeError::Sum(sum));
        }
        let common = u32::from(self.stretch) + u32::from(self.last_byte);
        if common > 100 {
            return Err(RecipeError::Common(common));
        }
        Ok(self)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, order)| order == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "common={},unique={},zero={},rewritten={},discardable={},stretch={},lastbyte={},order={},rest={},times={},slices={}",
            self.common,
            self.unique,
            self.zero,
            self.rewritten,
            self.discardable,
            self.stretch,
            self.last_byte,
            self.order,
            self.rest_millisecs,
            self.times,
            self.slices,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_reads_back_as_it_is_printed() {
        for (name, recipe, _) in PRESETS {
            assert_eq!(name.parse::<Recipe>().unwrap(), recipe, "{name}");
            assert_eq!(recipe.to_string().parse::<Recipe>().unwrap(), recipe);
        }
    }

    #[test]
    fn settings_refine_a_preset_and_shares_stand_alone() {
        let recipe: Recipe = "lockstep,rest=20,order=scattered".parse().unwrap();
        assert_eq!(recipe.rewritten, LOCKSTEP.rewritten);
        assert_eq!(
            (recipe.rest_millisecs, recipe.order),
            (20, Order::Scattered)
        );

        let recipe: Recipe = "common=50%, unique=50".parse().unwrap();
        assert_eq!((recipe.common, recipe.zero, recipe.rewritten), (50, 0, 0));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| text.parse::<Recipe>().unwrap_err();
        assert_eq!(error("common=50,unique=40"), RecipeError::Sum(90));
        assert_eq!(error("stretch=60,lastbyte=41"), RecipeError::Common(101));
        assert_eq!(error("colour=1"), RecipeError::Unknown("colour".to_owned()));
        assert_eq!(
            error("nothing"),
            RecipeError::NotAnItem("nothing".to_owned())
        );
        for text in ["common=101", "order=random", "times=0", "rest=-1"] {
            assert!(matches!(error(text), RecipeError::Value { .. }), "{text}");
        }
    }
}
