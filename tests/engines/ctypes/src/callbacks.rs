//! What the engine does when it is asked to.

use graph_ep::ep_context::cuda::CudaBackend;
use graph_ep::{BodyError, Queue, Received};

/// Captures a step: begins a capture, calls `gep_record`, ends it. Nonzero if that failed.
type Capture = unsafe extern "C" fn() -> i32;

/// Launches what was captured last.
type Launch = unsafe extern "C" fn() -> i32;

/// Queues the experts on a stream: rows, outputs, offsets, the rows to be covered, the stream.
type Experts = unsafe extern "C" fn(u64, u64, u64, u32, u64) -> i32;

/// The functions of an engine. Those that a call does not need may be null.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Callbacks {
    capture: Option<Capture>,
    launch: Option<Launch>,
    experts: Option<Experts>,
}

impl Callbacks {
    pub(crate) fn capture(&self) -> Result<(), BodyError> {
        // SAFETY: the engine has given a function of this type.
        said("capture", self.capture.map(|call| unsafe { call() }))
    }

    pub(crate) fn launch(&self) -> Result<(), BodyError> {
        // SAFETY: as above.
        said("launch", self.launch.map(|call| unsafe { call() }))
    }

    pub(crate) fn experts(
        &self,
        queue: &Queue<'static, CudaBackend>,
        received: &Received<'_, CudaBackend>,
    ) -> Result<(), BodyError> {
        let rows = received.rows.address();
        let outputs = received.outputs.address();
        let offsets = received.handle.expert_offsets().address();
        let stream = queue.stream().raw() as u64;
        let limit = received.row_limit;
        // SAFETY: as above.
        let call = |call: Experts| unsafe { call(rows, outputs, offsets, limit, stream) };
        said("experts", self.experts.map(call))
    }
}

fn said(what: &str, code: Option<i32>) -> Result<(), BodyError> {
    match code {
        Some(0) => Ok(()),
        Some(code) => Err(format!("the engine's function for {what} returned {code}").into()),
        None => Err(format!("the engine has no function for {what}").into()),
    }
}
