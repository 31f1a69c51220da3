//! Launching kernels, copying and filling.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::module::Loaded;
use super::stream::CudaStream;
use crate::backend::{BackendError, LaunchShape, Retained};
use crate::kernel::Kernel;

/// A kernel, compiled and loaded. A clone is the same kernel.
pub struct CudaKernel<K> {
    loaded: Arc<Loaded>,
    kernel: PhantomData<fn() -> K>,
}

impl<K: Kernel> CudaKernel<K> {
    pub(super) fn new(loaded: Arc<Loaded>) -> Self {
        Self { loaded, kernel: PhantomData }
    }

    /// Registers of a thread.
    pub fn registers(&self) -> u32 {
        self.loaded.registers
    }

    /// Local memory of a thread in bytes; where it is not zero, registers may have been spilled.
    pub fn local_bytes(&self) -> u32 {
        self.loaded.local_bytes
    }

    /// How many blocks of this shape can be resident on the device at the same time: blocks that
    /// wait for each other must not be more.
    ///
    /// # Errors
    ///
    /// [`BackendError::Invalid`] for a shape that cannot be launched, or what the driver reports.
    pub fn resident_blocks(&self, shape: LaunchShape) -> Result<u32, BackendError> {
        self.loaded.check(shape)?;
        self.loaded.resident_blocks(shape)
    }
}

impl<K> Clone for CudaKernel<K> {
    fn clone(&self) -> Self {
        Self { loaded: self.loaded.clone(), kernel: PhantomData }
    }
}

impl<K: Kernel> fmt::Debug for CudaKernel<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaKernel").field("name", &K::NAME).field("loaded", &self.loaded).finish()
    }
}

/// # Safety
///
/// As for [`crate::Backend::launch`].
pub(super) unsafe fn launch<K: Kernel>(
    stream: &CudaStream,
    kernel: &CudaKernel<K>,
    shape: LaunchShape,
    params: &K::Params,
    retained: &[Retained],
) -> Result<(), BackendError> {
    kernel.loaded.check(shape)?;
    let mut values = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
    stream.submit(K::NAME, retained, |driver, stream| {
        let config = sys::CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: stream,
            attrs: ptr::null_mut(),
            numAttrs: 0,
        };
        // SAFETY: the kernel has one parameter, of the size of the block that is given, as was
        // checked when it was loaded; the driver copies it before it returns. The shape was checked.
        // What the block addresses is valid by the caller's promise.
        unsafe {
            driver.cuLaunchKernelEx(
                &raw const config,
                kernel.loaded.function.0,
                values.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    })
}

/// # Safety
///
/// As for [`crate::Backend::copy`].
pub(super) unsafe fn copy(
    stream: &CudaStream,
    to: u64,
    from: u64,
    bytes: usize,
    retained: &[Retained],
) -> Result<(), BackendError> {
    if bytes == 0 {
        return Ok(());
    }
    stream.submit("copy", retained, |driver, stream| {
        // SAFETY: the caller's promise. Either address may be of this device, of a peer or of the
        // host: the driver tells by the address.
        unsafe { driver.cuMemcpyAsync(to, from, bytes, stream) }
    })
}

/// # Safety
///
/// As for [`crate::Backend::fill`].
pub(super) unsafe fn fill(
    stream: &CudaStream,
    to: u64,
    value: u8,
    bytes: usize,
    retained: &[Retained],
) -> Result<(), BackendError> {
    if bytes == 0 {
        return Ok(());
    }
    stream.submit("fill", retained, |driver, stream| {
        // SAFETY: the caller's promise.
        unsafe { driver.cuMemsetD8Async(to, value, bytes, stream) }
    })
}
