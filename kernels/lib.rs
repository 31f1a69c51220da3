//! The device code as text.
//!
//! A kernel is one `.cu` file with one entry point that takes one parameter block by value. What
//! kernels share are the `.cuh` files in [`HEADERS`], which include each other by name and nothing
//! else: no framework's header and none of the CUDA toolkit. NVRTC is given them from memory, so that
//! a program that embeds this crate needs no include path where it runs.
#![no_std]

/// A source file or header: the name by which it is included and named in errors, and its text.
pub type Text = (&'static str, &'static str);

/// Fixed-width types, and the check of a struct's layout against its Rust twin.
pub const TYPES: Text = ("types.cuh", include_str!("types.cuh"));
/// Instructions that CUDA C++ has no name for, and the ordered accesses of the protocol.
pub const PTX: Text = ("ptx.cuh", include_str!("ptx.cuh"));
/// How ranks wait for each other, signal, and give up.
pub const WAIT: Text = ("wait.cuh", include_str!("wait.cuh"));
/// The condition of a loop in a graph.
pub const LOOP: Text = ("loop.cuh", include_str!("loop.cuh"));

/// Every header, for a kernel that need not choose.
pub const HEADERS: &[Text] = &[TYPES, PTX, WAIT, LOOP];

/// Kernels of the tests of the CUDA backend.
pub mod probes {
    use super::Text;

    /// Adds to every word of an array.
    pub const ADD: Text = ("probes/add.cu", include_str!("probes/add.cu"));
    /// Counts a word down and sets the condition of a loop by it.
    pub const COUNT_DOWN: Text = ("probes/count_down.cu", include_str!("probes/count_down.cu"));
    /// Signals a peer, waits for it, and says how the wait ended.
    pub const MEET: Text = ("probes/meet.cu", include_str!("probes/meet.cu"));
}
