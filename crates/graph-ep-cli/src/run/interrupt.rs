//! Ctrl-C: a word that every rank looks at between steps.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Takes Ctrl-C over from the system. The first one lets every rank end in good order; the next one
/// ends the program.
pub(super) fn listen() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
}

/// Whether Ctrl-C came.
pub(super) fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
