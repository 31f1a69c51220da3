//! Loops on the device: WHILE nodes.

use std::ptr;

use cudarc::driver::sys;

use super::driver::{Driver, DriverError, GraphHandle, Handle, StreamHandle, ask};
use super::graph::{child_of, kind_of, nodes_of};
use super::recorder::{MODE, Position, continue_behind};
use crate::recording::{Body, ScopeId};

/// The body of a loop while it is recorded.
#[derive(Debug)]
pub(super) struct OpenBody {
    pub(super) id: ScopeId,
    pub(super) stream: StreamHandle,
    pub(super) graph: GraphHandle,
}

impl Body for OpenBody {
    fn id(&self) -> ScopeId {
        self.id
    }
}

/// A condition for a loop in `graph`, zero when a replay begins.
pub(super) fn create_condition(
    driver: &Driver,
    graph: GraphHandle,
    context: Handle<sys::CUctx_st>,
) -> Result<u64, DriverError> {
    let flags = sys::CU_GRAPH_COND_ASSIGN_DEFAULT;
    ask(|handle| {
        // SAFETY: the place is valid, the graph is being recorded, and the context is that of the
        // kernels which will set the condition.
        unsafe { driver.cuGraphConditionalHandleCreate(handle, graph.0, context.0, 0, flags) }
    })
}

/// Appends a loop to what `outer` records, where it stands `at` now, and makes `inner` record its body.
/// Returns the body's graph, which belongs to the loop.
pub(super) fn open(
    driver: &Driver,
    context: Handle<sys::CUctx_st>,
    outer: StreamHandle,
    at: &Position,
    inner: StreamHandle,
    condition: u64,
) -> Result<GraphHandle, DriverError> {
    // SAFETY: a struct of numbers and pointers and an enum with a variant of value zero; the driver
    // asks for unused bytes to be zero.
    let mut params: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
    params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
    params.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
        handle: condition,
        type_: sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE,
        size: 1,
        phGraph_out: ptr::null_mut(),
        ctx: context.0,
    };
    let mut node = ptr::null_mut();
    // SAFETY: the graph and the dependencies are those that the driver has just named, and the
    // parameters are of the kind that they say.
    unsafe {
        driver.cuGraphAddNode_v2(
            &raw mut node,
            at.graph.0,
            at.dependencies,
            at.edges,
            at.count,
            &raw mut params,
        )?;
    }
    continue_behind(driver, outer, node)?;
    // SAFETY: the call has succeeded for a conditional node with one body, so that it has stored the
    // address of an array of one graph, which lasts as long as the node.
    let body = unsafe { *params.__bindgen_anon_1.conditional.phGraph_out };
    // SAFETY: the stream is valid and does not record; the graph is new and empty.
    unsafe {
        driver.cuStreamBeginCaptureToGraph(inner.0, body, ptr::null(), ptr::null(), 0, MODE)?;
    }
    Ok(Handle(body))
}

/// What of a finished body, graphs within it included, the driver would refuse when the graph is
/// instantiated: it names no culprit then.
pub(super) fn forbidden_in_body(
    driver: &Driver,
    graph: GraphHandle,
) -> Result<Option<String>, DriverError> {
    use sys::CUgraphNodeType as T;
    const ALLOWED: [T; 5] = [
        T::CU_GRAPH_NODE_TYPE_KERNEL,
        T::CU_GRAPH_NODE_TYPE_MEMCPY,
        T::CU_GRAPH_NODE_TYPE_MEMSET,
        T::CU_GRAPH_NODE_TYPE_EMPTY,
        T::CU_GRAPH_NODE_TYPE_CONDITIONAL,
    ];
    for node in nodes_of(driver, graph)? {
        let kind = kind_of(driver, node)?;
        if kind == T::CU_GRAPH_NODE_TYPE_GRAPH as u32 {
            if let Some(found) = forbidden_in_body(driver, child_of(driver, node)?)? {
                return Ok(Some(found));
            }
        } else if ALLOWED.iter().all(|allowed| *allowed as u32 != kind) {
            return Ok(Some(describe(kind)));
        }
    }
    Ok(None)
}

fn describe(kind: u32) -> String {
    use sys::CUgraphNodeType as T;
    let name = [
        (T::CU_GRAPH_NODE_TYPE_HOST, "a call of a host function"),
        (T::CU_GRAPH_NODE_TYPE_WAIT_EVENT, "a wait for an event from outside the graph"),
        (T::CU_GRAPH_NODE_TYPE_EVENT_RECORD, "the record of an event that others wait for"),
        (T::CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL, "the signal of an external semaphore"),
        (T::CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT, "the wait for an external semaphore"),
        (T::CU_GRAPH_NODE_TYPE_MEM_ALLOC, "an allocation"),
        (T::CU_GRAPH_NODE_TYPE_MEM_FREE, "the freeing of an allocation"),
        (T::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, "a batch of memory operations"),
    ]
    .into_iter()
    .find(|(known, _)| *known as u32 == kind);
    name.map_or_else(|| format!("a node of kind {kind}"), |(_, name)| name.to_owned())
}
