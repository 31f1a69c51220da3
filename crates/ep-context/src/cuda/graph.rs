//! Finished recordings and the graphs that are replayed.

use std::ffi::CString;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{Driver, DriverError, ExecHandle, GraphHandle, UPDATE_FAILURE, ask_handle};
use super::graveyard::Grave;
use super::stream::CudaStream;
use crate::backend::{BackendError, Retained, Update};
use crate::sync::lock;

/// A graph as it was recorded, and everything that its operations use.
pub(super) struct Graph {
    device: Arc<Device>,
    handle: GraphHandle,
    /// The graphs of all loop bodies, those in other bodies included. They go with `handle`.
    bodies: Vec<GraphHandle>,
    nodes: usize,
    retained: Vec<Retained>,
}

impl Graph {
    /// Takes charge of a graph, also when counting its nodes fails. The context is current.
    pub(super) fn new(
        device: &Arc<Device>,
        driver: &Driver,
        handle: GraphHandle,
        bodies: Vec<GraphHandle>,
        retained: Vec<Retained>,
    ) -> Result<Self, DriverError> {
        let mut graph = Self { device: device.clone(), handle, bodies, nodes: 0, retained };
        let mut nodes = count_nodes(driver, handle)?;
        for body in &graph.bodies {
            nodes += count_nodes(driver, *body)?;
        }
        graph.nodes = nodes;
        Ok(graph)
    }

    pub(super) fn handle(&self) -> GraphHandle {
        self.handle
    }

    pub(super) fn has_loops(&self) -> bool {
        !self.bodies.is_empty()
    }

    fn write_dot(&self, path: &Path) -> Result<(), BackendError> {
        use sys::CUgraphDebugDot_flags as F;
        let name =
            CString::new(path.as_os_str().as_bytes()).map_err(|_| BackendError::Invalid {
                what: "path of a graph's drawing",
                value: 0,
                limit: "paths without a zero byte".to_owned(),
            })?;
        let flags = F::CU_GRAPH_DEBUG_DOT_FLAGS_RUNTIME_TYPES as u32
            | F::CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_PARAMS as u32
            | F::CU_GRAPH_DEBUG_DOT_FLAGS_MEMCPY_NODE_PARAMS as u32
            | F::CU_GRAPH_DEBUG_DOT_FLAGS_MEMSET_NODE_PARAMS as u32
            | F::CU_GRAPH_DEBUG_DOT_FLAGS_CONDITIONAL_NODE_PARAMS as u32;
        self.device.enter(|driver| {
            // SAFETY: the graph is this value's, and the name ends with a zero byte.
            unsafe { driver.cuGraphDebugDotPrint(self.handle.0, name.as_ptr(), flags)? };
            Ok(())
        })
    }

    fn describe(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("nodes", &self.nodes)
            .field("loops", &self.bodies.len())
            .field("retained", &self.retained.len())
            .finish()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::Graph(self.handle));
    }
}

/// The nodes of a graph, without those in bodies and graphs within it.
pub(super) fn nodes_of(
    driver: &Driver,
    graph: GraphHandle,
) -> Result<Vec<sys::CUgraphNode>, DriverError> {
    let mut count = 0;
    // SAFETY: without an array only the count is stored.
    unsafe { driver.cuGraphGetNodes(graph.0, ptr::null_mut(), &raw mut count)? };
    let mut nodes = vec![ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: the array has as many places as the count says.
        unsafe { driver.cuGraphGetNodes(graph.0, nodes.as_mut_ptr(), &raw mut count)? };
    }
    nodes.truncate(count);
    Ok(nodes)
}

/// The number by which the driver tells kinds of nodes apart: newer drivers have kinds of their own.
pub(super) fn kind_of(driver: &Driver, node: sys::CUgraphNode) -> Result<u32, DriverError> {
    let mut kind = 0_u32;
    // SAFETY: the place is valid for the number behind the enum.
    unsafe { driver.cuGraphNodeGetType(node, (&raw mut kind).cast::<sys::CUgraphNodeType>())? };
    Ok(kind)
}

/// The graph that a node of the kind "graph" stands for.
pub(super) fn child_of(
    driver: &Driver,
    node: sys::CUgraphNode,
) -> Result<GraphHandle, DriverError> {
    // SAFETY: the place is valid, and the node of this kind.
    ask_handle(|graph| unsafe { driver.cuGraphChildGraphNodeGetGraph(node, graph) })
}

fn count_nodes(driver: &Driver, graph: GraphHandle) -> Result<usize, DriverError> {
    let nodes = nodes_of(driver, graph)?;
    let mut count = nodes.len();
    for node in nodes {
        if kind_of(driver, node)? == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH as u32 {
            count += count_nodes(driver, child_of(driver, node)?)?;
        }
    }
    Ok(count)
}

/// A finished recording. It owns what was retained while it was made.
pub struct CudaRecording {
    graph: Arc<Graph>,
}

impl CudaRecording {
    pub(super) fn new(graph: Graph) -> Self {
        Self { graph: Arc::new(graph) }
    }

    /// Writes the graph to a file in the language of Graphviz.
    ///
    /// # Errors
    ///
    /// What the driver reports, for a path that cannot be written too.
    pub fn write_dot(&self, path: &Path) -> Result<(), BackendError> {
        self.graph.write_dot(path)
    }
}

impl fmt::Debug for CudaRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.graph.describe("CudaRecording", f)
    }
}

/// A graph ready to be replayed, on any stream of its device.
///
/// Replays of one graph never overlap, on whatever streams they are queued: the driver orders them.
pub struct CudaExecutable {
    exec: Arc<Exec>,
    graph: Arc<Graph>,
}

struct Exec {
    device: Arc<Device>,
    handle: ExecHandle,
    /// The driver forbids two calls on one executable graph at the same time.
    calls: Mutex<()>,
}

impl Exec {
    fn instantiate(graph: &Graph) -> Result<Arc<Self>, BackendError> {
        let device = &graph.device;
        let handle = device.enter_beside_recordings(|driver| {
            let (source, flags) = (graph.handle.0, 0);
            // SAFETY: the place is valid, and the graph is whole and has no other executable.
            Ok(ask_handle(|exec| unsafe {
                driver.cuGraphInstantiateWithFlags(exec, source, flags)
            })?)
        })?;
        let exec = Arc::new(Self { device: device.clone(), handle, calls: Mutex::new(()) });
        device.upload_graph(handle)?;
        Ok(exec)
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::Exec(self.handle));
    }
}

impl CudaExecutable {
    pub(super) fn instantiate(recording: CudaRecording) -> Result<Self, BackendError> {
        let graph = recording.graph;
        Ok(Self { exec: Exec::instantiate(&graph)?, graph })
    }

    /// Later replays run `recording`; those that are queued run what they were queued with, and keep
    /// what that uses.
    pub(super) fn update(&mut self, recording: CudaRecording) -> Result<Update, BackendError> {
        let graph = recording.graph;
        let device = &graph.device;
        let mut info = MaybeUninit::<sys::CUgraphExecUpdateResultInfo>::zeroed();
        let updated = device.enter_beside_recordings(|driver| {
            let _alone = lock(&self.exec.calls);
            let (exec, source) = (self.exec.handle.0, graph.handle.0);
            // SAFETY: both are valid, and no other call on the executable runs. What is stored in
            // the place is never read: the result of the call says all that is needed.
            match unsafe { driver.cuGraphExecUpdate_v2(exec, source, info.as_mut_ptr()) } {
                Ok(()) => Ok(true),
                Err(error) if error.code == UPDATE_FAILURE => Ok(false),
                Err(error) => Err(error.into()),
            }
        })?;
        if updated {
            self.graph = graph;
            return Ok(Update::InPlace);
        }
        self.exec = Exec::instantiate(&graph)?;
        self.graph = graph;
        Ok(Update::Reinstantiated)
    }

    /// Queues one replay, or appends the graph to what the stream records.
    pub(super) fn replay(&self, stream: &CudaStream) -> Result<(), BackendError> {
        if stream.is_recording() {
            return stream.append_graph(&self.graph);
        }
        let held: [Retained; 2] = [self.exec.clone(), self.graph.clone()];
        stream.submit("replay", &held, |driver, stream| {
            let _alone = lock(&self.exec.calls);
            // SAFETY: both are valid, and no other call on the executable runs. What the graph uses
            // is held until the replay has run.
            unsafe { driver.cuGraphLaunch(self.exec.handle.0, stream) }
        })
    }

    pub(super) fn node_count(&self) -> usize {
        self.graph.nodes
    }

    /// Writes the graph to a file in the language of Graphviz.
    ///
    /// # Errors
    ///
    /// What the driver reports, for a path that cannot be written too.
    pub fn write_dot(&self, path: &Path) -> Result<(), BackendError> {
        self.graph.write_dot(path)
    }
}

impl fmt::Debug for CudaExecutable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.graph.describe("CudaExecutable", f)
    }
}
