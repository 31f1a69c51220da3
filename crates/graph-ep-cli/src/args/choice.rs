//! Arguments that are one of a few words.

use clap::ValueEnum;
use graph_ep::GrowthPolicy;
use serde::{Deserialize, Serialize};

/// Prints the word by which the command line and a report know a value.
macro_rules! display_as_value_name {
    ($($name:ty),*) => {$(
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.to_possible_value() {
                    Some(value) => f.pad(value.get_name()),
                    None => Ok(()),
                }
            }
        }
    )*};
}

pub(crate) use display_as_value_name;

display_as_value_name!(BackendChoice, Mode, GraphChoice, GrowthChoice, Dtype, TransferChoice);

/// How rows get from rank to rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum)]
pub enum TransferChoice {
    /// Pushed, unless ranks share a GPU
    #[default]
    Auto,
    /// Receivers read them
    Pull,
    /// Senders write them
    Push,
}

/// Where ranks run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendChoice {
    /// GPUs if there are any, otherwise the host
    #[default]
    Auto,
    /// On the CPU
    Host,
    /// On NVIDIA GPUs, each rank on one; ranks beyond their number share them in turn
    Cuda,
}

/// What happens when routing requires more rows than a rank has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// It cannot: the host waits for the exact number of rows in every layer; no graph
    Eager,
    /// The run fails at the step that does
    Static,
    /// Grow, record again, replay the step
    #[default]
    Recover,
    /// Work through all rows in as many windows as it takes, in a loop on the device
    Rounds,
    /// Leave out what does not fit, and say so
    Drop,
}

/// Whether growth invalidates a recorded graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GraphChoice {
    /// The graph is limited to the capacity at which it was recorded; growth records it again
    #[default]
    CapacityShaped,
    /// The graph reads its row counts on the device; no recording is repeated
    DeviceCounts,
}

/// How much to grow after an overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GrowthChoice {
    /// Each rank that overflowed, to its own requirement
    Exact,
    /// Each rank that overflowed, by a factor, until it suffices
    Geometric,
    /// All ranks, to 1.2 times the largest requirement
    Headroom,
    /// All ranks, to 1.2 times what two ranks have required; one that requires far more than the others
    /// grows alone; between steps too, once a requirement comes within 5 % of the capacity
    #[default]
    Adaptive,
}

impl From<GrowthChoice> for GrowthPolicy {
    fn from(choice: GrowthChoice) -> Self {
        match choice {
            GrowthChoice::Exact => Self::Exact,
            GrowthChoice::Geometric => Self::geometric(),
            GrowthChoice::Headroom => Self::headroom(),
            GrowthChoice::Adaptive => Self::adaptive(),
        }
    }
}

/// Element type of tokens on their way between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// Brain floating point, 16 bits
    #[default]
    Bf16,
    /// IEEE half precision, 16 bits
    Fp16,
    /// IEEE single precision, 32 bits
    Fp32,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report says `T` in the words of the command line.
    pub(crate) fn assert_same_words<T: ValueEnum + std::fmt::Display + Serialize>() {
        for value in T::value_variants() {
            let json = serde_json::to_value(value).unwrap();
            assert_eq!(json, value.to_string());
            assert!(!value.to_string().is_empty());
        }
    }

    #[test]
    fn words_are_the_same_on_the_command_line_and_in_the_report() {
        assert_same_words::<BackendChoice>();
        assert_same_words::<Mode>();
        assert_same_words::<GraphChoice>();
        assert_same_words::<GrowthChoice>();
        assert_same_words::<Dtype>();
    }
}
