//! Which architectures kernels can be compiled for.

use std::ffi::CString;

use super::nvrtc::{Nvrtc, Program};
use crate::backend::BackendError;

/// The compute capability from which on there is what kernels are written with (reductions over a warp
/// among it): ten times the major version and the minor one.
pub const OLDEST_CAPABILITY: u32 = 80;

/// Why kernels cannot run on a device of this compute capability, major and minor, if they cannot.
pub(super) fn refusal((major, minor): (u32, u32)) -> Option<String> {
    (10 * major + minor < OLDEST_CAPABILITY).then(|| {
        format!(
            "it is sm_{major}{minor}, and kernels are written for sm_{OLDEST_CAPABILITY} and later"
        )
    })
}

/// What NVRTC calls an architecture beside those that any later chip can run: with features of one chip, and
/// of its family.
const SUFFIXES: [&str; 3] = ["", "a", "f"];

/// Whether the NVRTC at hand compiles for `architecture`, named as by [`architecture`](super::architecture).
/// Compiles an empty program. Needs no GPU.
///
/// # Errors
///
/// [`BackendError::Unavailable`] without NVRTC, or with one that cannot compile an empty program.
pub fn compiles_for(architecture: &str) -> Result<bool, BackendError> {
    let nvrtc = Nvrtc::find()?;
    let failed = |reason: String| BackendError::Unavailable {
        what: format!("NVRTC for {architecture}"),
        reason,
    };
    let Ok(option) = CString::new(format!("--gpu-architecture={architecture}")) else {
        return Ok(false);
    };
    let program = Program::new(nvrtc, c"", c"empty.cu", &[], &[]).map_err(failed)?;
    match program.compile(&[option]) {
        Ok(()) => Ok(true),
        // A number that is unknown is an invalid option, a suffix that the chip has not a failure of
        // compilation, as nothing else can be in an empty text.
        Err(failure) if failure.is_of_input() => Ok(false),
        Err(failure) => Err(failed(failure.into())),
    }
}

/// All architectures that the NVRTC at hand compiles kernels for, the oldest first. Compiles an empty program for
/// each, half a second in all. Needs no GPU.
///
/// # Errors
///
/// As for [`compiles_for`].
pub fn architectures() -> Result<Vec<String>, BackendError> {
    let capabilities = Nvrtc::find()?.capabilities().map_err(|reason| {
        BackendError::Unavailable { what: "the list of architectures".to_owned(), reason }
    })?;
    let mut found = Vec::new();
    for capability in capabilities {
        if u32::try_from(capability).is_ok_and(|capability| capability >= OLDEST_CAPABILITY) {
            for suffix in SUFFIXES {
                let name = format!("sm_{capability}{suffix}");
                if compiles_for(&name)? {
                    found.push(name);
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_kernels_cannot_run_on_is_named() {
        let refused = refusal((7, 5)).expect("too old");
        assert!(refused.contains("sm_75") && refused.contains("sm_80"), "{refused}");
        for capability in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)] {
            assert_eq!(refusal(capability), None);
        }
    }
}
