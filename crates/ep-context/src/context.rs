//! One rank's membership of an expert-parallel group.

use std::fmt;
use std::sync::Arc;

use crate::account::MemoryAccount;
use crate::backend::{Backend, BackendError, MappedMemory, Memory, Retained};
use crate::buffer::Buffer;
use crate::deadline::Deadlines;
use crate::error::ContextError;
use crate::fault::{Fault, Phase};
use crate::rank::Rank;
use crate::rendezvous::{self, Rendezvous};
use crate::signal::HostControl;
use crate::signal::params::{AttentionBlock, ControlBlock, WaitParams};
use crate::symmetric::SymmetricBlock;

/// One rank's membership of an expert-parallel group: its device, its peers, and the words by which
/// they wait for each other. A clone is the same membership.
///
/// Building one is collective: every rank of the group builds its own, and all of them fail if one
/// does.
pub struct EpContext<B: Backend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: Backend> {
    backend: B,
    rendezvous: Box<dyn Rendezvous>,
    account: MemoryAccount,
    deadlines: Deadlines,
    signals: Arc<SignalMemory<B>>,
}

/// What every kernel that waits needs to stay mapped.
struct SignalMemory<B: Backend> {
    control: B::Mapped,
    attention: SymmetricBlock<B>,
    table: Buffer<B>,
}

/// Collects what a context is built from.
#[derive(Debug)]
pub struct EpContextBuilder<B: Backend> {
    backend: B,
    rendezvous: Box<dyn Rendezvous>,
    deadlines: Deadlines,
    memory_limit: Option<u64>,
}

impl<B: Backend> EpContextBuilder<B> {
    /// How long each phase may wait. Ranks may differ in it.
    #[must_use]
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// Refuses to hold more than `bytes` bytes of device memory on this rank.
    #[must_use]
    pub fn memory_limit(mut self, bytes: Option<u64>) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// Meets the other ranks and maps their signal words. Collective; allocates and synchronises.
    ///
    /// # Errors
    ///
    /// When a rank is missing, runs another backend or protocol, or cannot allocate: the same error
    /// on every rank that is there.
    pub fn build(self) -> Result<EpContext<B>, ContextError> {
        let Self { backend, rendezvous, deadlines, memory_limit } = self;
        let deadline = deadlines.of(Phase::Setup);
        rendezvous::agree(
            rendezvous.as_ref(),
            "context",
            &[
                ("protocol", PROTOCOL.to_string()),
                ("backend", B::NAME.to_owned()),
                ("ranks", rendezvous.world().to_string()),
            ],
            deadline,
        )?;
        let account = MemoryAccount::new(memory_limit);
        let attention = SymmetricBlock::allocate(
            &backend,
            rendezvous.as_ref(),
            "attention block",
            size_of::<AttentionBlock>(),
            &account,
            deadline,
        )?;
        let local = local_signals(&backend, &account, &deadlines, &attention);
        let (control, table) =
            rendezvous::all_or_none(rendezvous.as_ref(), "signal memory", local, deadline)?;
        let signals = Arc::new(SignalMemory { control, attention, table });
        let weak = Arc::downgrade(&signals);
        rendezvous.watch(Box::new(move |gone| {
            // Nobody waits any more where the words are gone.
            if let Some(signals) = weak.upgrade() {
                tracing::warn!(rank = gone.0, "a rank ended without leaving the group");
                signals.host_control().gone(gone);
            }
        }));
        tracing::debug!(
            rank = rendezvous.rank().0,
            world = rendezvous.world(),
            backend = B::NAME,
            "joined the group"
        );
        Ok(EpContext {
            inner: Arc::new(Inner { backend, rendezvous, account, deadlines, signals }),
        })
    }
}

/// Counts the incompatible changes of what ranks write into each other's memory.
const PROTOCOL: u32 = 1;

fn local_signals<B: Backend>(
    backend: &B,
    account: &MemoryAccount,
    deadlines: &Deadlines,
    attention: &SymmetricBlock<B>,
) -> Result<(B::Mapped, Buffer<B>), ContextError> {
    let control = backend.allocate_mapped(size_of::<ControlBlock>())?;
    // SAFETY: the block is mapped, zeroed (a valid ControlBlock), and lives as long as `control`,
    // which outlives this view.
    unsafe { HostControl::from_address(control.host_address() as u64) }.set_deadlines(deadlines);
    let bytes: &[u8] = bytemuck::cast_slice(attention.addresses());
    let charge = account.charge("attention table", bytes.len() as u64)?;
    let table = Buffer::new(backend.allocate(bytes.len())?, "attention table", charge);
    let stream = backend.stream("set-up")?;
    // SAFETY: the table was allocated a moment ago for these bytes; nothing else knows it.
    unsafe { backend.upload(&stream, table.address(), bytes, &[]) }?;
    backend.synchronize(&stream)?;
    Ok((control, table))
}

impl<B: Backend> EpContext<B> {
    /// Starts to build a context on `backend`, with the ranks that `rendezvous` brings together.
    pub fn builder(backend: B, rendezvous: impl Rendezvous + 'static) -> EpContextBuilder<B> {
        EpContextBuilder {
            backend,
            rendezvous: Box::new(rendezvous),
            deadlines: Deadlines::default(),
            memory_limit: None,
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.inner.rendezvous.rank()
    }

    /// Ranks in the group.
    pub fn world(&self) -> usize {
        self.inner.rendezvous.world()
    }

    /// The device of this rank.
    pub fn backend(&self) -> &B {
        &self.inner.backend
    }

    /// The exchange between the hosts of all ranks.
    pub fn rendezvous(&self) -> &dyn Rendezvous {
        self.inner.rendezvous.as_ref()
    }

    /// The device memory of this rank, as counted.
    pub fn account(&self) -> &MemoryAccount {
        &self.inner.account
    }

    /// How long each phase may wait.
    pub fn deadlines(&self) -> &Deadlines {
        &self.inner.deadlines
    }

    /// A new stream on this rank's device.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn stream(&self, name: &str) -> Result<B::Stream, BackendError> {
        self.inner.backend.stream(&format!("{}/{name}", self.rank().0))
    }

    /// Zeroed private device memory. Local; may synchronise the device.
    ///
    /// # Errors
    ///
    /// [`BackendError::OutOfMemory`] where the limit of this rank or the device has no room.
    pub fn allocate(&self, label: &'static str, bytes: usize) -> Result<Buffer<B>, BackendError> {
        let charge = self.inner.account.charge(label, bytes as u64)?;
        Ok(Buffer::new(self.inner.backend.allocate(bytes)?, label, charge))
    }

    /// Zeroed private device memory that does not count against the limit of this rank: for tensors
    /// of the caller's own. Local; may synchronise the device.
    ///
    /// # Errors
    ///
    /// [`BackendError::OutOfMemory`] where the device has no room.
    pub fn allocate_uncounted(
        &self,
        label: &'static str,
        bytes: usize,
    ) -> Result<Buffer<B>, BackendError> {
        let charge = self.inner.account.charge_nothing();
        Ok(Buffer::new(self.inner.backend.allocate(bytes)?, label, charge))
    }

    /// Memory of `bytes` bytes on every rank, mapped by every rank. Collective: all ranks call it in
    /// the same order with the same size.
    ///
    /// # Errors
    ///
    /// The same on every rank when one cannot allocate, asks for another size, or is missing.
    pub fn share(
        &self,
        label: &'static str,
        bytes: usize,
    ) -> Result<SymmetricBlock<B>, ContextError> {
        Ok(SymmetricBlock::allocate(
            &self.inner.backend,
            self.rendezvous(),
            label,
            bytes,
            &self.inner.account,
            self.inner.deadlines.of(Phase::Setup),
        )?)
    }

    /// Compares a configuration over all ranks. Collective.
    ///
    /// # Errors
    ///
    /// The same on every rank: the first field that differs, with both values and ranks.
    pub fn agree(
        &self,
        purpose: &str,
        fields: &[(&'static str, String)],
    ) -> Result<(), ContextError> {
        let deadline = self.inner.deadlines.of(Phase::Setup);
        Ok(rendezvous::agree(self.rendezvous(), purpose, fields, deadline)?)
    }

    /// What a kernel of this rank needs to wait and to signal. Its addresses stay valid while
    /// [`EpContext::retain_signals`] is held.
    pub fn wait_params(&self) -> WaitParams {
        WaitParams {
            control: self.inner.signals.control.address(),
            attention: self.inner.signals.table.address(),
            own: self.inner.signals.attention.own_address(),
            rank: self.rank().0,
            world: u32::try_from(self.world()).unwrap_or(u32::MAX),
        }
    }

    /// Keeps the words of [`EpContext::wait_params`] mapped.
    pub fn retain_signals(&self) -> Retained {
        self.inner.signals.clone()
    }

    /// Asks every wait of this rank on its device to end. The waits report
    /// [`FaultKind::Aborted`](crate::fault::FaultKind::Aborted) with this rank as the culprit, to
    /// this rank's host and to all peers. Does not wait.
    pub fn abort(&self) {
        self.control().abort();
    }

    /// The fault that this rank holds: its own, or one that a peer told it and a kernel took note of.
    pub fn fault(&self) -> Option<Fault> {
        self.control().fault()
    }

    /// Stops the clock of every deadline on this rank's device until the guard is dropped: for
    /// warm-up, where a first launch may compile, and for debuggers.
    #[must_use = "deadlines count again when the guard is dropped"]
    pub fn suspend_deadlines(&self) -> Suspended<B> {
        self.control().suspend();
        Suspended { signals: self.inner.signals.clone() }
    }

    fn control(&self) -> HostControl<'_> {
        self.inner.signals.host_control()
    }
}

impl<B: Backend> SignalMemory<B> {
    fn host_control(&self) -> HostControl<'_> {
        // SAFETY: the block is mapped for as long as `self`, and was zeroed, a valid ControlBlock.
        let control = unsafe { HostControl::from_address(self.control.host_address() as u64) };
        if !B::HOST_REACHES_DEVICE_MEMORY {
            // Waits look at the control block again soon enough.
            return control;
        }
        // SAFETY: host threads reach the attention block, which is mapped for as long as `self` and
        // was zeroed, a valid AttentionBlock.
        unsafe { control.ringing(self.attention.own_address()) }
    }
}

impl<B: Backend> Clone for EpContext<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<B: Backend> fmt::Debug for EpContext<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpContext")
            .field("rank", &self.rank())
            .field("world", &self.world())
            .field("backend", &B::NAME)
            .finish_non_exhaustive()
    }
}

/// While it lives, deadlines on this rank's device do not count.
pub struct Suspended<B: Backend> {
    signals: Arc<SignalMemory<B>>,
}

impl<B: Backend> Drop for Suspended<B> {
    fn drop(&mut self) {
        self.signals.host_control().resume();
    }
}

impl<B: Backend> fmt::Debug for Suspended<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suspended").finish_non_exhaustive()
    }
}
