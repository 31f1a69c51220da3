//! How a run ends, and what the program's exit code says of it.

use std::process::ExitCode;

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything ran and every output was verified. Exit code 0.
    Verified,
    /// An output differs, a limit was reached, or a rank failed. Exit code 1.
    Failed,
    /// The run could not begin: its input or its arguments are wrong, or ask for what is not built.
    /// Exit code 2, as for arguments that do not parse.
    BadInput,
}

impl Verdict {
    /// The exit code as a number.
    pub fn code(self) -> u8 {
        match self {
            Self::Verified => 0,
            Self::Failed => 1,
            Self::BadInput => 2,
        }
    }
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        verdict.code().into()
    }
}
