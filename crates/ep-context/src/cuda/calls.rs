//! The calls of the driver that the backend makes, as one table that is filled or refused as a whole.
//!
//! cudarc supplies the bindings, and the argument types here are checked against them when this is
//! compiled. Its own wrappers are not called: they panic where a symbol is missing, and their result
//! type cannot hold a code that a newer driver may return.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;

use super::clock::clocked;
use super::driver::{Class, Driver, DriverError, count, lacks};
use crate::backend::BackendError;

/// The binding to compare an entry with: that of its own name, or the one that is named.
macro_rules! binding {
    ($name:ident) => {
        sys::$name
    };
    ($name:ident $other:ident) => {
        sys::$other
    };
}

macro_rules! driver_calls {
    ($($class:ident $name:ident($($arg:ident: $ty:ty),* $(,)?) $(typed as $other:ident)?;)*) => {
        /// The driver's entry points. The result is a plain number: an enum that came from outside
        /// with a value of its own would be undefined behaviour.
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $($name: unsafe extern "C" fn($($ty),*) -> c_uint,)*
        }

        impl Table {
            pub(super) fn fill() -> Result<Self, BackendError> {
                // SAFETY: the library was found by `Driver::find`, its only caller, so that this
                // does not panic.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: a symbol of this name is, in every version of libcuda that has it,
                        // a function of the type that cudarc's binding declares, which the constants
                        // below compare with the type used here, but for the result, which is 32
                        // bits of integer in either. The library is never unloaded.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($ty),*) -> c_uint>(symbol.as_bytes())
                        }
                        .map_err(|_| lacks(stringify!($name)))?
                    },)*
                })
            }
        }

        // The argument types above are those of cudarc's bindings, or this does not compile.
        $(const _: unsafe fn($($ty),*) -> sys::CUresult = binding!($name $($other)?);)*

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Driver {
            $(
                /// # Safety
                ///
                /// The contract of the driver's call of this name.
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), DriverError> {
                    count(Class::$class);
                    let code = clocked(stringify!($name), || {
                        // SAFETY: the caller's promise; the type of the function is right by `fill`.
                        unsafe { (self.table.$name)($($arg),*) }
                    });
                    self.outcome(stringify!($name), code)
                }
            )*
        }
    };
}

driver_calls! {
    Query cuInit(flags: c_uint);
    Query cuDriverGetVersion(version: *mut c_int);
    Query cuDeviceGetCount(count: *mut c_int);
    Query cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    Query cuDeviceGetName(name: *mut c_char, length: c_int, device: sys::CUdevice);
    Query cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
    Query cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
    Query cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
    Allocate cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    Query cuCtxGetCurrent(context: *mut sys::CUcontext);
    Query cuCtxPushCurrent_v2(context: sys::CUcontext);
    Query cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
    Query cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);

    Allocate cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
    Allocate cuMemFree_v2(address: sys::CUdeviceptr);
    Query cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    Allocate cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint);
    Query cuMemHostGetDevicePointer_v2(address: *mut sys::CUdeviceptr, start: *mut c_void, flags: c_uint);
    Allocate cuMemFreeHost(start: *mut c_void);
    Query cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const sys::CUmemAllocationProp, option: sys::CUmemAllocationGranularity_flags);
    Query cuMemGetAllocationPropertiesFromHandle(properties: *mut sys::CUmemAllocationProp, handle: sys::CUmemGenericAllocationHandle);
    Allocate cuMemAddressReserve(address: *mut sys::CUdeviceptr, bytes: usize, alignment: usize, hint: sys::CUdeviceptr, flags: c_ulonglong);
    Allocate cuMemAddressFree(address: sys::CUdeviceptr, bytes: usize);
    Allocate cuMemCreate(handle: *mut sys::CUmemGenericAllocationHandle, bytes: usize, properties: *const sys::CUmemAllocationProp, flags: c_ulonglong);
    Allocate cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
    Allocate cuMemMap(address: sys::CUdeviceptr, bytes: usize, offset: usize, handle: sys::CUmemGenericAllocationHandle, flags: c_ulonglong);
    Allocate cuMemUnmap(address: sys::CUdeviceptr, bytes: usize);
    Allocate cuMemSetAccess(address: sys::CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize);
    Query cuMemExportToShareableHandle(descriptor: *mut c_void, handle: sys::CUmemGenericAllocationHandle, kind: sys::CUmemAllocationHandleType, flags: c_ulonglong);
    Allocate cuMemImportFromShareableHandle(handle: *mut sys::CUmemGenericAllocationHandle, descriptor: *mut c_void, kind: sys::CUmemAllocationHandleType);

    Allocate cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    Allocate cuStreamDestroy_v2(stream: sys::CUstream);
    Wait cuStreamSynchronize(stream: sys::CUstream);
    Query cuStreamQuery(stream: sys::CUstream);
    Query cuStreamIsCapturing(stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus);
    Allocate cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    Queue cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    Queue cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    Query cuEventQuery(event: sys::CUevent);
    Wait cuEventSynchronize(event: sys::CUevent);
    Queue cuEventRecordWithFlags(event: sys::CUevent, stream: sys::CUstream, flags: c_uint);
    // The bindings for CUDA 13 know the second version alone, which drivers before 12.8 lack.
    Query cuEventElapsedTime(milliseconds: *mut f32, from: sys::CUevent, to: sys::CUevent) typed as cuEventElapsedTime_v2;
    Allocate cuEventDestroy_v2(event: sys::CUevent);

    Queue cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream);
    Wait cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    Queue cuMemcpyAsync(to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    Queue cuMemsetD8Async(to: sys::CUdeviceptr, value: u8, bytes: usize, stream: sys::CUstream);
    Queue cuLaunchKernelEx(config: *const sys::CUlaunchConfig, function: sys::CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void);

    Allocate cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    Allocate cuModuleUnload(module: sys::CUmodule);
    Allocate cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    Allocate cuFuncLoad(function: sys::CUfunction);
    Query cuFuncSetAttribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int);
    Query cuFuncGetAttribute(value: *mut c_int, attribute: sys::CUfunction_attribute, function: sys::CUfunction);
    Query cuFuncGetParamInfo(function: sys::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    Query cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: sys::CUfunction, threads: c_int, shared_bytes: usize);

    Queue cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
    Queue cuStreamBeginCaptureToGraph(stream: sys::CUstream, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode, edges: *const sys::CUgraphEdgeData, count: usize, mode: sys::CUstreamCaptureMode);
    Queue cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
    Query cuStreamGetCaptureInfo_v3(stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus, id: *mut sys::cuuint64_t, graph: *mut sys::CUgraph, dependencies: *mut *const sys::CUgraphNode, edges: *mut *const sys::CUgraphEdgeData, count: *mut usize);
    Queue cuStreamUpdateCaptureDependencies_v2(stream: sys::CUstream, dependencies: *mut sys::CUgraphNode, edges: *const sys::CUgraphEdgeData, count: usize, flags: c_uint);
    Queue cuGraphConditionalHandleCreate(handle: *mut sys::CUgraphConditionalHandle, graph: sys::CUgraph, context: sys::CUcontext, value: c_uint, flags: c_uint);
    Queue cuGraphAddNode_v2(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode, edges: *const sys::CUgraphEdgeData, count: usize, params: *mut sys::CUgraphNodeParams);
    Queue cuGraphAddChildGraphNode(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode, count: usize, child: sys::CUgraph);
    Query cuUserObjectCreate(object: *mut sys::CUuserObject, held: *mut c_void, destroy: sys::CUhostFn, references: c_uint, flags: c_uint);
    Query cuUserObjectRelease(object: sys::CUuserObject, count: c_uint);
    Query cuGraphRetainUserObject(graph: sys::CUgraph, object: sys::CUuserObject, count: c_uint, flags: c_uint);
    Allocate cuGraphDestroy(graph: sys::CUgraph);
    Query cuGraphGetNodes(graph: sys::CUgraph, nodes: *mut sys::CUgraphNode, count: *mut usize);
    Query cuGraphNodeGetType(node: sys::CUgraphNode, kind: *mut sys::CUgraphNodeType);
    Query cuGraphChildGraphNodeGetGraph(node: sys::CUgraphNode, graph: *mut sys::CUgraph);
    Query cuGraphDebugDotPrint(graph: sys::CUgraph, path: *const c_char, flags: c_uint);
    Allocate cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
    Allocate cuGraphExecUpdate_v2(exec: sys::CUgraphExec, graph: sys::CUgraph, result: *mut sys::CUgraphExecUpdateResultInfo);
    Allocate cuGraphUpload(exec: sys::CUgraphExec, stream: sys::CUstream);
    Queue cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream);
    Allocate cuGraphExecDestroy(exec: sys::CUgraphExec);
}
