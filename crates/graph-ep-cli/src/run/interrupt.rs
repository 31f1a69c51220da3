//! Ctrl-C: a word that every rank looks at between steps.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What the second Ctrl-C does. The first one lets every rank end in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Second {
    /// It ends this process.
    Ends,
    /// No more than the first: the process that started this one hears it as well, ends, and takes this
    /// one with it.
    IsIgnored,
}

/// Takes Ctrl-C over from the system.
pub(super) fn listen(second: Second) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) && second == Second::Ends {
            std::process::exit(130);
        }
    })
}

/// Whether Ctrl-C came.
pub(super) fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
