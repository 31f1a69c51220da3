//! A device operation with one parameter block and a body for each backend.

use bytemuck::Pod;

/// Where the device code of a kernel is, as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSource {
    /// The name of the file, for the compiler's messages.
    pub file: &'static str,
    /// Its text: CUDA C++ with one entry point of the kernel's name and C linkage, which takes the
    /// parameter block by value as its only parameter.
    pub text: &'static str,
    /// The headers that it may include: the name to include each by, and its text.
    pub headers: &'static [(&'static str, &'static str)],
}

/// A device operation.
///
/// The parameter block is plain data that crosses to the device as bytes, so its layout is the same
/// in Rust and in CUDA C++. Both bodies do the same arithmetic in the same order: the host body is
/// what the device body is tested against.
pub trait Kernel: Send + Sync + 'static {
    /// The parameters of one launch.
    type Params: Pod + Send + Sync;

    /// The operation's name: the entry point on a device, the label in traces and errors.
    const NAME: &'static str;

    /// The device code; `None` for a kernel that exists on the host backend alone. The constants of
    /// a [`Specialization`](crate::Specialization) are macros in it.
    const SOURCE: Option<KernelSource> = None;

    /// The body on the host backend: the whole grid in one call, on the thread of the stream.
    ///
    /// Nothing unwinds into the caller of the launch; a panic is reported as the failure of the
    /// stream, after which it runs nothing more.
    ///
    /// # Safety
    ///
    /// Every address in `params` is valid for what the operation does with it, and nothing else
    /// touches these bytes meanwhile except as the operation's own signals order it.
    unsafe fn run_on_host(params: &Self::Params);
}
