//! A stream as operations see it: something to queue on, whether it runs or records.

use std::fmt;
use std::marker::PhantomData;
use std::sync::RwLockReadGuard;

use smallvec::SmallVec;

use crate::backend::{Backend, BackendError, LaunchShape, Retained};
use crate::buffer::DeviceSlice;
use crate::kernel::Kernel;

mod scope;

pub use scope::QueueScope;
use scope::Within;

/// A stream on which operations are queued that may use memory borrowed for `'a`.
///
/// While the stream runs its work directly, `'a` is `'static`: queued work outlives the call that
/// queued it, so it may only use memory that it can keep alive itself. While the stream records, `'a`
/// is a lifetime that the finished graph carries on.
pub struct Queue<'a, B: Backend> {
    backend: B,
    stream: B::Stream,
    /// Where it is one of a recording.
    scope: Option<Within>,
    // Invariant: a queue of a longer lifetime must not be filled through one of a shorter.
    _lifetime: PhantomData<fn(&'a ()) -> &'a ()>,
}

impl<B: Backend> Queue<'static, B> {
    /// The stream itself: work runs in the order in which it is queued.
    pub fn direct(backend: &B, stream: &B::Stream) -> Self {
        let (backend, stream) = (backend.clone(), stream.clone());
        Self { backend, stream, scope: None, _lifetime: PhantomData }
    }
}

impl<'a, B: Backend> Queue<'a, B> {
    /// A stream that records, for work that may use memory borrowed for `'a`. Takes nothing once `scope` is
    /// dropped.
    ///
    /// # Safety
    ///
    /// Unless `'a` is `'static`: the stream records when this is called and until `scope` is dropped, and every
    /// replay of the recording is queued within `'a`. So the caller holds the
    /// [key](Backend::begin_recording) of the recording, gives it to nobody who uses the queue, and drops
    /// `scope` before the recording ends. That a replay has run by the end of `'a` is promised by whoever
    /// borrowed memory for it, see [`DeviceSlice::borrowed`].
    pub unsafe fn recording(backend: &B, stream: &B::Stream, scope: &QueueScope) -> Self {
        let (backend, stream, scope) = (backend.clone(), stream.clone(), Some(scope.within()));
        Self { backend, stream, scope, _lifetime: PhantomData }
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The stream beneath, for work of the caller's own.
    pub fn stream(&self) -> &B::Stream {
        &self.stream
    }

    /// Whether operations are recorded rather than run.
    pub fn is_recording(&self) -> bool {
        self.backend.is_recording(&self.stream)
    }

    /// A queue on another stream that takes part in the same work: the body of a loop
    /// ([`Backend::begin_while`]), or a branch ([`Backend::order`]). Where work may use memory for as long
    /// as it likes, `'a` being `'static`, [`Queue::direct`] does the same for any stream.
    ///
    /// # Safety
    ///
    /// Work queued here runs only while `'a` lasts: unless that is `'static`, `stream` takes part in the
    /// recording of this queue, and for as long as the new queue is used it is a body that is open or a
    /// branch that was not joined, or takes nothing.
    pub unsafe fn with_stream(&self, stream: B::Stream) -> Self {
        let (backend, scope) = (self.backend.clone(), self.scope.clone());
        Self { backend, stream, scope, _lifetime: PhantomData }
    }

    /// Keeps the recording of the queue from ending while an operation is queued; fails if it has ended.
    fn enter(
        &self,
        operation: &'static str,
    ) -> Result<Option<RwLockReadGuard<'_, bool>>, BackendError> {
        self.scope.as_ref().map(|scope| scope.enter(operation)).transpose()
    }

    /// Queues one launch. `uses` names the slices whose addresses stand in `params`, `retained` what
    /// else must outlive the launch.
    ///
    /// # Errors
    ///
    /// Whatever the backend reports, and [`BackendError::Recording`] when the recording of the queue has ended,
    /// as for all operations; nothing is queued then.
    ///
    /// # Safety
    ///
    /// 1. Every address in `params` lies in a slice of `uses`, in something of `retained`, or in
    ///    memory that lives as long as the device. Of a slice of rows the kernel touches what is
    ///    [held](DeviceSlice::held), and beyond it only rows below the capacity that it reads from the
    ///    [word](crate::RowSet::capacity_word) of their set.
    /// 2. Other work that touches the same bytes is ordered with this by its stream or by signals.
    pub unsafe fn launch<K: Kernel>(
        &self,
        kernel: &B::Loaded<K>,
        shape: LaunchShape,
        params: &K::Params,
        uses: &[&DeviceSlice<'a, B>],
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        let _open = self.enter("launch")?;
        let mut keep: SmallVec<[Retained; 8]> = retained.iter().cloned().collect();
        keep.extend(uses.iter().filter_map(|slice| slice.retained().cloned()));
        // SAFETY: 1. an address in a slice is valid, where the slice holds it, while the slice's owner
        // lives, which `keep` holds, or while 'a lasts, which outlives the work; rows below the
        // capacity have memory; what is in `retained` is held by `keep`.
        // 2. Is the caller's promise.
        unsafe { self.backend.launch(&self.stream, kernel, shape, params, &keep) }
    }

    /// Queues a copy of the whole of `from` to the start of `to`.
    ///
    /// # Errors
    ///
    /// [`BackendError::Invalid`] if `to` is shorter than `from`, or if `from` or as much of `to` is not
    /// [held](DeviceSlice::held).
    ///
    /// # Safety
    ///
    /// The slices do not overlap, and other work that touches them is ordered with this.
    pub unsafe fn copy(
        &self,
        to: &DeviceSlice<'a, B>,
        from: &DeviceSlice<'a, B>,
    ) -> Result<(), BackendError> {
        const WHAT: &str = "length of a copy in bytes";
        let _open = self.enter("copy")?;
        within(WHAT, from.bytes(), to, "target")?;
        within(WHAT, from.bytes(), from, "source")?;
        let keep: SmallVec<[Retained; 2]> =
            [to, from].iter().filter_map(|slice| slice.retained().cloned()).collect();
        // SAFETY: both ranges are inside what their slices hold, which stays valid as argued in
        // `launch`; that they do not overlap is the caller's promise.
        unsafe {
            self.backend.copy(&self.stream, to.address(), from.address(), from.bytes(), &keep)
        }
    }

    /// Queues a copy of `data` to the start of `to`; refused while recording. `data` is copied before this
    /// returns. On a GPU it waits for the stream where the copies of a rank that are on their way have 4 MiB,
    /// or 64 pieces.
    ///
    /// # Errors
    ///
    /// [`BackendError::Invalid`] if `to` is shorter, or not [held](DeviceSlice::held) as far;
    /// [`BackendError::Recording`] while recording.
    ///
    /// # Safety
    ///
    /// Other work that touches the slice is ordered with this.
    pub unsafe fn upload(&self, to: &DeviceSlice<'a, B>, data: &[u8]) -> Result<(), BackendError> {
        let _open = self.enter("upload")?;
        within("length of an upload in bytes", data.len(), to, "target")?;
        let keep: SmallVec<[Retained; 1]> = to.retained().cloned().into_iter().collect();
        // SAFETY: the target range is inside what its slice holds, valid as argued in `launch`.
        unsafe { self.backend.upload(&self.stream, to.address(), data, &keep) }
    }

    /// Waits for the stream and copies the start of `from` to the host; refused while recording. What was
    /// queued on other streams is not waited for, unless this one was [ordered](Backend::order) behind it.
    ///
    /// # Errors
    ///
    /// [`BackendError::Invalid`] if `from` is shorter than `into`, or not [held](DeviceSlice::held) as
    /// far; [`BackendError::Recording`] while recording, and the failure of earlier work.
    ///
    /// # Safety
    ///
    /// Other work that writes the start of `from` is ordered with this: it has run once the stream's work
    /// has, or is queued after this returns. A GPU would merely read some mixture of old and new bytes; on
    /// the host backend the memory is this process's own, and a kernel that writes it meanwhile is a data
    /// race.
    pub unsafe fn download(
        &self,
        from: &DeviceSlice<'a, B>,
        into: &mut [u8],
    ) -> Result<(), BackendError> {
        let _open = self.enter("download")?;
        within("length of a download in bytes", into.len(), from, "source")?;
        // SAFETY: the range is inside what its slice holds, which outlives this blocking call; that
        // nothing writes it meanwhile is the caller's promise.
        unsafe { self.backend.download(&self.stream, from.address(), into) }
    }

    /// Queues or records taking the time at which the stream gets here, see [`Backend::reach`].
    ///
    /// # Errors
    ///
    /// [`BackendError::Recording`] in the body of a loop, and the failure of earlier work.
    pub fn reach(&self, mark: &B::Mark) -> Result<(), BackendError> {
        let _open = self.enter("reach")?;
        self.backend.reach(&self.stream, mark)
    }
}

/// Fails unless `slice`, the `end` of what is moved, holds `bytes` bytes.
fn within<B: Backend>(
    what: &'static str,
    bytes: usize,
    slice: &DeviceSlice<'_, B>,
    end: &str,
) -> Result<(), BackendError> {
    if bytes <= slice.held() {
        return Ok(());
    }
    let limit = format!("the {} bytes that its {end} holds", slice.held());
    Err(BackendError::Invalid { what, value: bytes as u64, limit })
}

impl<B: Backend> fmt::Debug for Queue<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("backend", &B::NAME).field("stream", &self.stream).finish()
    }
}
