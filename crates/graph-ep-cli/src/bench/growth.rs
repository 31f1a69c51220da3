//! The names of results of growth: by how much, and by which memory.
//!
//! `by 1024.00 MiB, fresh` and `by 1024.00 MiB, given back`; the way for rows, if one was asked for, follows.
//! A name that does not say which is of memory that had been given back.

use crate::table::bytes;

/// The memory by which a buffer grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Nobody gave it back since the bench began.
    Fresh,
    /// The same rank gave it back just before.
    GivenBack,
}

impl Memory {
    const ALL: [Self; 2] = [Self::Fresh, Self::GivenBack];

    const fn word(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::GivenBack => "given back",
        }
    }
}

/// What the name of a result says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Growth {
    /// GiB by which each rank's buffer grew.
    pub(crate) gib: f64,
    /// The memory by which it did.
    pub(crate) memory: Memory,
}

impl Growth {
    /// What the variant of a result says; none if it is no growth.
    pub(crate) fn read(variant: &str) -> Option<Self> {
        let (size, rest) = halves(variant);
        let words: Vec<&str> = size.split(' ').collect();
        let ["by", number, unit] = words[..] else { return None };
        let unit = match unit {
            "B" => 1.0 / f64::from(1 << 30),
            "KiB" => 1.0 / f64::from(1 << 20),
            "MiB" => 1.0 / 1024.0,
            "GiB" => 1.0,
            _ => return None,
        };
        let gib = number.parse::<f64>().ok()? * unit;
        let memory = said(rest).unwrap_or(Memory::GivenBack);
        (gib > 0.0).then_some(Self { gib, memory })
    }
}

/// The variant of growth by so many bytes of `memory`.
pub(super) fn variant(more: u64, memory: Memory) -> String {
    format!("by {}, {}", bytes(more), memory.word())
}

/// `variant` with the memory that it is of, if it is a growth and does not say; results of one kind have one
/// name, also in reports that were written when there was one kind.
pub(super) fn named(variant: &str) -> Option<String> {
    let memory = Growth::read(variant)?.memory.word();
    let (size, rest) = halves(variant);
    if said(rest).is_some() {
        return None;
    }
    let words = [size, memory, rest];
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    Some(words.join(", "))
}

/// By how much, and the rest.
fn halves(variant: &str) -> (&str, &str) {
    variant.split_once(", ").unwrap_or((variant, ""))
}

fn said(rest: &str) -> Option<Memory> {
    let word = rest.split(", ").next()?;
    Memory::ALL.into_iter().find(|memory| memory.word() == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_read_from_its_name() {
        let read = |variant: &str| Growth::read(variant).map(|growth| (growth.gib, growth.memory));
        assert_eq!(read("by 1024.00 MiB, fresh"), Some((1.0, Memory::Fresh)));
        assert_eq!(read("by 2.50 GiB, given back, push"), Some((2.5, Memory::GivenBack)));
        assert_eq!(read("by 2.50 GiB, push"), Some((2.5, Memory::GivenBack)));
        assert_eq!(read("by 0 GiB"), None);
        assert_eq!(read("by 1.00 GiB of it"), None);
        assert_eq!(read("clean"), None);
        for memory in Memory::ALL {
            assert_eq!(read(&variant(3 << 29, memory)), Some((1.5, memory)));
        }
    }

    #[test]
    fn a_name_that_does_not_say_is_of_what_was_given_back() {
        assert_eq!(named("by 1.00 GiB").as_deref(), Some("by 1.00 GiB, given back"));
        assert_eq!(named("by 1.00 GiB, push").as_deref(), Some("by 1.00 GiB, given back, push"));
        for variant in ["by 1.00 GiB, fresh", "by 1.00 GiB, given back, push", "grow", ""] {
            assert_eq!(named(variant), None);
        }
    }
}
