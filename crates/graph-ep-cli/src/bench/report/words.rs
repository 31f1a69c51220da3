//! Fields of a report that are one of a few words, the same on the command line.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::args::display_as_value_name;

display_as_value_name!(Op, By, LayoutChoice, Dtype, Padding, LimitKind);

/// What is measured.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// From tokens and their choices in ordinary memory to rows in the order of the layout
    Dispatch,
    /// From expert outputs to summed tokens in ordinary memory
    Combine,
    /// A dispatch and the combine that follows it
    Pair,
    /// A whole step with experts
    Replay,
    /// Growth of the receive buffer, by fresh memory and by memory that was given back
    Grow,
    /// A step that overflows, until its outputs are complete
    Recover,
    /// A step that works through its rows in several windows
    Round,
    /// What the host spends on a step that fits
    Host,
    /// Layers with and without the counters and the record of a step
    Counters,
}

/// Whose code ran.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// This project's
    GraphEp,
    /// NCCL's send and receive of the same bytes
    Nccl,
}

/// Order of received rows.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    ValueEnum,
    Serialize,
    Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum LayoutChoice {
    /// One row for each token and expert, grouped by expert
    #[default]
    Expert,
    /// One row for each token that has experts on the rank
    Flat,
}

/// Element type of tokens on their way between ranks.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    ValueEnum,
    Serialize,
    Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// Brain floating point, 16 bits
    #[default]
    Bf16,
    /// IEEE half precision, 16 bits
    Fp16,
    /// IEEE single precision, 32 bits
    Fp32,
    /// Eight bits, with scales beside
    Fp8,
}

/// What a dispatch does with the rows with which those of an expert are padded.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    ValueEnum,
    Serialize,
    Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Padding {
    /// They are zero
    #[default]
    Cleared,
    /// They keep what was there
    Left,
}

impl Padding {
    /// Whether they are zero.
    pub fn is_cleared(&self) -> bool {
        *self == Self::Cleared
    }
}

/// What the hardware can do at best.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum LimitKind {
    /// Reading a peer's memory from end to end, while it does the same
    PeerRead,
    /// Writing a peer's memory from end to end, while it does the same
    PeerWrite,
    /// Copying within a device's memory
    MemoryCopy,
    /// A word written to a peer until an answer is seen, halved
    Signal,
    /// All ranks waiting for each other
    Barrier,
    /// Replaying a graph that does nothing
    EmptyReplay,
    /// One trip of a loop in a graph that does nothing
    EmptyTrip,
    /// Two marks with nothing between them
    EmptyInterval,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::choice::tests::assert_same_words;

    #[test]
    fn words_are_the_same_on_the_command_line_and_in_the_report() {
        assert_same_words::<Op>();
        assert_same_words::<By>();
        assert_same_words::<LayoutChoice>();
        assert_same_words::<Dtype>();
        assert_same_words::<Padding>();
        assert_same_words::<LimitKind>();
    }

    /// Scripts look for these.
    #[test]
    fn words_are_those_documented() {
        let words = |all: &[String]| all.join(" ");
        let ops: Vec<_> = Op::value_variants().iter().map(Op::to_string).collect();
        assert_eq!(words(&ops), "dispatch combine pair replay grow recover round host counters");
        let layouts: Vec<_> =
            LayoutChoice::value_variants().iter().map(|l| l.to_string()).collect();
        assert_eq!(words(&layouts), "expert flat");
        let types: Vec<_> = Dtype::value_variants().iter().map(Dtype::to_string).collect();
        assert_eq!(words(&types), "bf16 fp16 fp32 fp8");
        assert_eq!(
            Padding::value_variants().iter().map(Padding::to_string).collect::<Vec<_>>(),
            ["cleared", "left"]
        );
        assert_eq!(
            (By::GraphEp.to_string(), By::Nccl.to_string()),
            ("graph-ep".into(), "nccl".into())
        );
    }
}
