//! Kernels of this process on one device: each compiled, loaded and kept once.

use std::any::TypeId;
use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::cache::CacheFolder;
use super::compile::{Job, architecture};
use super::device::Device;
use super::driver::{Driver, DriverError, Handle, ask, ask_handle};
use crate::backend::{BackendError, LaunchShape, Specialization};
use crate::kernel::Kernel;
use crate::sync::lock;

/// Kernels that are loaded. They stay for the life of the process: graphs may hold their functions
/// longer than anything else, and unloading waits for the device.
#[derive(Debug, Default)]
pub(super) struct KernelCache {
    // Held while one is compiled, so that ranks which are threads compile each kernel once.
    loaded: Mutex<HashMap<(TypeId, Specialization), Arc<Loaded>>>,
}

/// A function of a loaded module.
pub(super) struct Loaded {
    device: Arc<Device>,
    name: &'static str,
    pub(super) function: Handle<sys::CUfunc_st>,
    pub(super) registers: u32,
    pub(super) local_bytes: u32,
    max_threads: u32,
    max_shared_bytes: u32,
}

impl KernelCache {
    /// The kernel with these constants, compiled and loaded if it was not before.
    pub(super) fn get<K: Kernel>(
        device: &Arc<Device>,
        folder: &CacheFolder,
        constants: &Specialization,
    ) -> Result<Arc<Loaded>, BackendError> {
        let key = (TypeId::of::<K>(), constants.clone());
        let mut loaded = lock(&device.kernels.loaded);
        if let Some(kernel) = loaded.get(&key) {
            return Ok(kernel.clone());
        }
        // A kernel that is there already is had without a call that may wait.
        device.collect()?;
        let source = K::SOURCE.ok_or_else(|| BackendError::Unavailable {
            what: format!("kernel {} on a GPU", K::NAME),
            reason: "it exists on the host backend alone".to_owned(),
        })?;
        let job = Job::new(&source, constants, &architecture(device.properties.capability));
        let cubin = folder.get_or_compile(&job)?;
        let kernel = Arc::new(Loaded::new(device, K::NAME, size_of::<K::Params>(), &cubin)?);
        loaded.insert(key, kernel.clone());
        Ok(kernel)
    }
}

impl Loaded {
    fn new(
        device: &Arc<Device>,
        name: &'static str,
        param_bytes: usize,
        cubin: &[u8],
    ) -> Result<Self, BackendError> {
        device.enter_beside_recordings(|driver| {
            let image = cubin.as_ptr().cast();
            // SAFETY: the place is valid, and the image a whole cubin: its length lies in itself.
            let module = ask_handle(|module| unsafe { driver.cuModuleLoadData(module, image) })?;
            Self::find(device, driver, module, name, param_bytes).inspect_err(|_| {
                // SAFETY: nothing of the module is in use.
                let _ = unsafe { driver.cuModuleUnload(module.0) };
            })
        })
    }

    fn find(
        device: &Arc<Device>,
        driver: &'static Driver,
        module: Handle<sys::CUmod_st>,
        name: &'static str,
        param_bytes: usize,
    ) -> Result<Self, BackendError> {
        use sys::CUfunction_attribute as A;
        let wrong = |reason: String| BackendError::Unavailable {
            what: format!("kernel {name} on a GPU"),
            reason,
        };
        let symbol =
            CString::new(name).map_err(|_| wrong("its name has a zero byte".to_owned()))?;
        let function =
            // SAFETY: the place is valid, and the name ends with a zero byte.
            ask_handle(|place| unsafe { driver.cuModuleGetFunction(place, module.0, symbol.as_ptr()) })
                .map_err(|error| wrong(format!("its code has no such entry: {}", error.text())))?;
        // Under lazy loading the code would come to the device with the first launch only, and might
        // wait for it.
        // SAFETY: the function was just found.
        unsafe { driver.cuFuncLoad(function.0)? };
        check_params(driver, function, param_bytes).map_err(wrong)?;
        let ask_number = |which| attribute(driver, function, which);
        let fixed = ask_number(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let dynamic = device.properties.shared_bytes_per_block.saturating_sub(fixed);
        // SAFETY: the function is loaded; the value is within what the device gives.
        unsafe {
            driver.cuFuncSetAttribute(
                function.0,
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                c_int::try_from(dynamic).unwrap_or(c_int::MAX),
            )?;
        }
        Ok(Self {
            device: device.clone(),
            name,
            function,
            registers: ask_number(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: ask_number(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            max_threads: ask_number(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            max_shared_bytes: dynamic,
        })
    }

    /// Fails for a shape that the device would refuse.
    pub(super) fn check(&self, shape: LaunchShape) -> Result<(), BackendError> {
        let within = |what, value: u32, least: u32, most: u32| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(BackendError::Invalid {
                what,
                value: value.into(),
                limit: format!(
                    "{least} to {most} for kernel {} on {}",
                    self.name, self.device.properties.name
                ),
            })
        };
        within("blocks of a launch", shape.blocks, 1, i32::MAX.unsigned_abs())?;
        within("threads of a block", shape.threads, 1, self.max_threads)?;
        within("dynamic shared memory of a block", shape.shared_bytes, 0, self.max_shared_bytes)
    }

    pub(super) fn resident_blocks(&self, shape: LaunchShape) -> Result<u32, BackendError> {
        let threads = c_int::try_from(shape.threads).unwrap_or(c_int::MAX);
        let shared = shape.shared_bytes as usize;
        let multiprocessors = self.device.properties.multiprocessors;
        self.device.enter(|driver| {
            // SAFETY: the place is valid, and the function loaded.
            let blocks = ask(|blocks| unsafe {
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    blocks,
                    self.function.0,
                    threads,
                    shared,
                )
            })?;
            Ok(u32::try_from(blocks).unwrap_or(0).saturating_mul(multiprocessors))
        })
    }
}

fn attribute(
    driver: &Driver,
    function: Handle<sys::CUfunc_st>,
    which: sys::CUfunction_attribute,
) -> Result<u32, DriverError> {
    // SAFETY: the place is valid, and the function loaded.
    let value = ask(|value| unsafe { driver.cuFuncGetAttribute(value, which, function.0) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// Fails unless the kernel's parameter has the size of its block on the side of Rust. That it is the
/// only one is not asked: the driver answers that with an error, which a sanitizer would report.
fn check_params(
    driver: &Driver,
    function: Handle<sys::CUfunc_st>,
    expected: usize,
) -> Result<(), String> {
    let (mut offset, mut bytes) = (0_usize, 0_usize);
    // SAFETY: the places are valid; an index beyond the last parameter is an error.
    unsafe { driver.cuFuncGetParamInfo(function.0, 0, &raw mut offset, &raw mut bytes) }
        .map_err(|error| format!("it takes no parameter: {}", error.text()))?;
    if bytes != expected {
        return Err(format!("its parameter block has {bytes} bytes, its Rust twin {expected}"));
    }
    Ok(())
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded")
            .field("name", &self.name)
            .field("registers", &self.registers)
            .field("local_bytes", &self.local_bytes)
            .finish_non_exhaustive()
    }
}
