//! What all dispatches of a rank share: configuration, kernels, counters, records, lanes.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Zeroable;
use ep_context::backend::Memory;
use ep_context::rendezvous::all_or_none;
use ep_context::signal::params::WaitParams;
use ep_context::{
    Backend, Buffer, ContextError, DeviceSlice, EpContext, Fault, FaultKind, LaunchShape, Phase,
    Queue, Rank, Retained, RowSet, RowShape,
};
use smallvec::SmallVec;

use crate::config::{DispatchConfig, LEAST_SMS, Transfer};
use crate::error::DispatchError;
use crate::experts::{ExpertHome, ExpertMap};
use crate::geometry::Geometry;
use crate::kernels;
use crate::lane::{Lane, LaneMemory};
use crate::launch;
use crate::launch_order::LaunchOrder;
use crate::params::{
    AbandonParams, ExpertHomeEntry, MAX_CHECKED_SETS, ResumeParams, ShapeCheck, StepBeginParams,
    StepEndParams, StepState,
};
use crate::record::RecordRing;

mod loaded;
mod numbers;

pub(crate) use loaded::Kernels;
pub use loaded::device_kernels;
use numbers::StepNumbers;

/// One rank's part in moving tokens: everything that its dispatches and combines share. A clone is
/// the same dispatcher.
///
/// Building one is collective. Nothing that it allocates depends on routing: what routing sizes lies
/// in [`RowSet`]s.
pub struct TokenDispatcher<B: Backend> {
    pub(crate) inner: Arc<Inner<B>>,
}

pub(crate) struct Inner<B: Backend> {
    pub(crate) context: EpContext<B>,
    pub(crate) config: DispatchConfig,
    /// The map that was set last.
    map: Mutex<ExpertMap>,
    pub(crate) geometry: Geometry,
    pub(crate) kernels: Kernels<B>,
    pub(crate) shared: Arc<SharedMemory<B>>,
    pub(crate) lanes: Vec<Arc<LaneMemory<B>>>,
    /// Whether static steps push.
    pub(crate) pushes: bool,
    /// Whether a device is used by more than one rank of the group.
    shares_devices: bool,
    /// The most blocks of a kernel that fills multiprocessors.
    pub(crate) blocks: u32,
    /// The same for one that waits with all of them: those of all lanes are resident at once.
    pub(crate) push_blocks: u32,
    /// The most shared memory of a block, in bytes.
    pub(crate) shared_bytes_per_block: u32,
    numbers: StepNumbers,
    launch_order: Arc<LaunchOrder>,
    id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Device memory that every step uses.
pub(crate) struct SharedMemory<B: Backend> {
    pub(crate) homes: Buffer<B>,
    pub(crate) state: Buffer<B>,
    pub(crate) peer_required: Buffer<B>,
    pub(crate) required_by_dispatch: Buffer<B>,
    pub(crate) ring: RecordRing<B>,
}

impl<B: Backend> TokenDispatcher<B> {
    /// Compares the configuration with all ranks, allocates, and maps the lanes of every peer.
    /// Collective; allocates, loads kernels and synchronises.
    ///
    /// # Errors
    ///
    /// On every rank: a field that differs, a rank that is missing or out of memory. On this rank: a
    /// configuration made for another number of ranks.
    pub fn new(context: &EpContext<B>, config: DispatchConfig) -> Result<Self, DispatchError> {
        let map = config.experts.clone();
        Self::with_map(context, config, map)
    }

    /// A dispatcher with the configuration of this one but for the most tokens of a rank, and with experts where
    /// they are now. Shares no memory with this one. Collective, between steps; otherwise as
    /// [`TokenDispatcher::new`].
    ///
    /// # Errors
    ///
    /// On every rank: a number of tokens that is out of range on any of them, or differs, a map that differs,
    /// and what [`TokenDispatcher::new`] reports. This dispatcher is then as before.
    pub fn resized(&self, max_tokens: usize) -> Result<Self, DispatchError> {
        let (context, map) = (self.context(), self.expert_map());
        let deadline = context.deadlines().of(Phase::Setup);
        let config = self.config().with_max_tokens(max_tokens);
        let config = all_or_none(context.rendezvous(), "resized dispatcher", config, deadline)
            .map_err(ContextError::from)?;
        context.agree("expert map", &[("homes of experts", map.fingerprint())])?;
        Self::with_map(context, config, map)
    }

    /// A dispatcher whose first map has no more slots than that of the configuration.
    fn with_map(
        context: &EpContext<B>,
        config: DispatchConfig,
        map: ExpertMap,
    ) -> Result<Self, DispatchError> {
        let (rank, world) = (context.rank(), context.world());
        context.agree("dispatch configuration", &config.fields())?;
        if config.experts.ranks() != world {
            return Err(DispatchError::Config {
                field: "ranks of the expert map",
                value: config.experts.ranks().to_string(),
                limit: format!("{world}, the ranks of the group"),
            });
        }
        let geometry = Geometry::new(&config, rank, world);
        let share = device_share(context)?;
        let stream = context.stream("set-up")?;
        let queue = Queue::direct(context.backend(), &stream);
        let deadline = context.deadlines().of(Phase::Setup);
        let local = Kernels::load(context.backend(), &config, world)
            .and_then(|kernels| Ok((kernels, SharedMemory::new(context, &config, &map, &queue)?)));
        let (kernels, shared) = all_or_none(context.rendezvous(), "dispatcher", local, deadline)
            .map_err(ContextError::from)?;
        let lanes = (0..config.lanes)
            .map(|_| Ok(Arc::new(LaneMemory::new(context, &config, &geometry, &queue)?)))
            .collect::<Result<Vec<_>, DispatchError>>()?;
        // Nobody signals a lane before its owner has set its words.
        let ready = context.backend().synchronize(&stream);
        all_or_none(context.rendezvous(), "lanes", ready, deadline).map_err(ContextError::from)?;
        let (first_step, lanes_in_flight) = (config.first_step, config.lanes as u32);
        // By what is the same on all ranks, so that all push or none.
        let pushes = geometry.push != 0
            && share.fewest_multiprocessors / share.ranks / lanes_in_flight >= LEAST_SMS
            && (share.ranks == 1 || config.transfer == Transfer::Push);
        let most = (share.multiprocessors / share.ranks).max(1);
        let blocks = if config.sm_budget == 0 { most } else { config.sm_budget.min(most) };
        let push_blocks = (blocks / lanes_in_flight).max(launch::LEAST_BLOCKS);
        Ok(Self {
            inner: Arc::new(Inner {
                context: context.clone(),
                config,
                map: Mutex::new(map),
                geometry,
                kernels,
                shared: Arc::new(shared),
                lanes,
                pushes,
                shares_devices: share.ranks > 1,
                blocks,
                push_blocks,
                shared_bytes_per_block: context.backend().processors().shared_bytes_per_block,
                numbers: StepNumbers::after(first_step),
                launch_order: Arc::default(),
                id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            }),
        })
    }

    /// The membership that this dispatcher was built on.
    pub fn context(&self) -> &EpContext<B> {
        &self.inner.context
    }

    /// The configuration.
    pub fn config(&self) -> &DispatchConfig {
        &self.inner.config
    }

    /// Whether static steps push their rows, so recorded ones and those that are recovered. Rounds, eager
    /// steps and backward passes pull always; see [`Transfer`].
    pub fn pushes(&self) -> bool {
        self.inner.pushes
    }

    /// Whether any device is used by several ranks of the group: the same on all ranks. What occupies a
    /// device for a while there, such as making a graph with loops ready, is in the way of others.
    pub fn shares_devices(&self) -> bool {
        self.inner.shares_devices
    }

    /// Expert slots of this rank.
    pub fn local_experts(&self) -> usize {
        self.inner.geometry.local_experts as usize
    }

    /// A lane: room for one dispatch–combine pair. `None` beyond the configured number.
    pub fn lane(&self, index: usize) -> Option<Lane<B>> {
        let memory = self.inner.lanes.get(index)?;
        Some(Lane::new(self.clone(), memory.clone(), index))
    }

    /// The most rows that routing can ever send to this rank: a row set that reserves so many never
    /// refuses a growth for lack of addresses. See [`worst_case_rows`](crate::worst_case_rows).
    pub fn worst_case_rows(&self) -> u32 {
        let config = &self.inner.config;
        crate::worst_case_rows(
            config.max_tokens * self.inner.context.world(),
            config.top_k,
            self.local_experts(),
            config.alignment,
        )
    }

    /// The fewest rows with which any token can be processed: min(top-k, local experts) · alignment.
    pub fn least_rows(&self) -> u32 {
        let config = &self.inner.config;
        config.top_k.min(self.local_experts()) as u32 * config.alignment
    }

    /// The order of the steps in flight of all who launch ahead on this dispatcher, and may have to launch
    /// them again.
    pub fn launch_order(&self) -> &Arc<LaunchOrder> {
        &self.inner.launch_order
    }

    /// The records that steps publish.
    pub fn records(&self) -> crate::record::Records<'_, B> {
        crate::record::Records::new(self)
    }

    /// Where experts are: the map that was set last, which holds for steps queued from now on.
    pub fn expert_map(&self) -> ExpertMap {
        self.map().clone()
    }

    fn map(&self) -> MutexGuard<'_, ExpertMap> {
        self.inner.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes where experts live, in the order of `queue`: between steps, at the same step on all
    /// ranks, which all set the same map. Recorded graphs stay valid, since the map lies in device
    /// memory; moving the experts' weights is the caller's part.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] for a map of other experts or ranks, or with more slots than
    /// [`expert_slots`](crate::DispatchConfigBuilder::expert_slots). Nothing has changed then.
    pub fn set_expert_map(
        &self,
        queue: &Queue<'static, B>,
        map: &ExpertMap,
    ) -> Result<(), DispatchError> {
        let config = &self.inner.config;
        let same = |field, value: usize, limit: usize| match value == limit {
            true => Ok(()),
            false => Err(DispatchError::Config {
                field,
                value: value.to_string(),
                limit: format!("{limit}, as when the dispatcher was made"),
            }),
        };
        same("experts of the expert map", map.experts(), config.experts.experts())?;
        same("ranks of the expert map", map.ranks(), config.experts.ranks())?;
        for rank in (0..map.ranks()).map(Rank::from_index) {
            if map.slots_of(rank) > config.slots_of(rank) {
                return Err(DispatchError::Config {
                    field: "slots of the expert map",
                    value: format!("{} on {rank}", map.slots_of(rank)),
                    limit: format!("at most {}, see expert_slots", config.slots_of(rank)),
                });
            }
        }
        let homes = home_entries(map, self.rank());
        let mut current = self.map();
        // SAFETY: routes read the map, and are ordered with this by the stream.
        unsafe { queue.upload(&self.inner.shared.homes.slice(), bytemuck::cast_slice(&homes)) }?;
        *current = map.clone();
        Ok(())
    }

    /// Lets steps run again that were held back behind an over-budget one. Queued on `queue`.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn resume(&self, queue: &Queue<'_, B>) -> Result<(), DispatchError> {
        let params = ResumeParams { state: self.inner.shared.state.address() };
        // SAFETY: the state lives in `shared`, which is retained; no step runs meanwhile, since this
        // is ordered with them by the stream.
        Ok(unsafe {
            queue.launch::<kernels::Resume>(
                &self.inner.kernels.resume,
                LaunchShape::ONE_WARP,
                &params,
                &[],
                &self.retained(),
            )
        }?)
    }

    /// Gives the group up because this rank's host cannot go on: every wait of every rank ends with a
    /// fault that names this rank. Queued on `queue`.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn abandon(&self, queue: &Queue<'_, B>, phase: Phase) -> Result<(), DispatchError> {
        let fault =
            Fault { phase, culprit: self.inner.context.rank(), kind: FaultKind::Failed }.to_word();
        let params = AbandonParams { wait: self.wait_params(), fault };
        // SAFETY: the signal words are retained; they are made for being written at any time.
        Ok(unsafe {
            queue.launch::<kernels::Abandon>(
                &self.inner.kernels.abandon,
                LaunchShape::ONE_WARP,
                &params,
                &[],
                &self.retained(),
            )
        }?)
    }

    /// Tells this dispatcher from every other while it lives.
    pub(crate) fn id(&self) -> u64 {
        self.inner.id
    }

    /// Whether the two are handles of one dispatcher.
    pub fn is(&self, other: &Self) -> bool {
        self.id() == other.id()
    }

    pub(crate) fn rank(&self) -> Rank {
        self.inner.context.rank()
    }

    pub(crate) fn wait_params(&self) -> WaitParams {
        self.inner.context.wait_params()
    }

    /// What every operation of a step needs to stay mapped.
    pub(crate) fn retained(&self) -> SmallVec<[Retained; 4]> {
        let shared: Retained = self.inner.shared.clone();
        [shared, self.inner.context.retain_signals()].into_iter().collect()
    }

    /// Begins a step. One that is recorded and whose replays the host does not see checks `shapes` by
    /// itself.
    pub(crate) fn launch_begin(
        &self,
        queue: &Queue<'_, B>,
        shapes: &[(RowSet<B>, RowShape)],
    ) -> Result<(), DispatchError> {
        let shared = &self.inner.shared;
        let words: SmallVec<[DeviceSlice<'_, B>; MAX_CHECKED_SETS]> =
            shapes.iter().map(|(set, _)| set.generation_word()).collect();
        let mut checks = [ShapeCheck::zeroed(); MAX_CHECKED_SETS];
        for (check, (word, (_, shape))) in checks.iter_mut().zip(words.iter().zip(shapes)) {
            *check = ShapeCheck { generation: word.address(), recorded: shape.generation };
        }
        let params = StepBeginParams {
            wait: self.wait_params(),
            state: shared.state.address(),
            peer_required: shared.peer_required.address(),
            required_by_dispatch: shared.required_by_dispatch.address(),
            max_dispatches: self.inner.config.max_dispatches as u32,
            shape_count: words.len().min(MAX_CHECKED_SETS) as u32,
            shapes: checks,
        };
        let uses: SmallVec<[&DeviceSlice<'_, B>; MAX_CHECKED_SETS]> = words.iter().collect();
        // SAFETY: every address lies in `shared` or the signal memory, both retained, or in `uses`;
        // operations of one dispatcher are ordered by its streams, and so is a change of capacity.
        Ok(unsafe {
            queue.launch::<kernels::StepBegin>(
                &self.inner.kernels.step_begin,
                launch::peers(&self.inner.geometry),
                &params,
                &uses,
                &self.retained(),
            )
        }?)
    }

    pub(crate) fn launch_end(&self, queue: &Queue<'_, B>, hold: bool) -> Result<(), DispatchError> {
        let shared = &self.inner.shared;
        let params = StepEndParams {
            wait: self.wait_params(),
            state: shared.state.address(),
            peer_required: shared.peer_required.address(),
            required_by_dispatch: shared.required_by_dispatch.address(),
            ring: shared.ring.memory().address(),
            stride: shared.ring.stride() as u32,
            records: self.inner.config.record_ring as u32,
            max_dispatches: self.inner.config.max_dispatches as u32,
            hold: u32::from(hold),
        };
        // SAFETY: as for the beginning; the ring is written by this operation alone.
        Ok(unsafe {
            queue.launch::<kernels::StepEnd>(
                &self.inner.kernels.step_end,
                launch::step_end(&self.inner.geometry),
                &params,
                &[],
                &self.retained(),
            )
        }?)
    }
}

/// What of a device a rank has.
struct DeviceShare {
    /// Multiprocessors of the device.
    multiprocessors: u32,
    /// Those of the device that has the fewest.
    fewest_multiprocessors: u32,
    /// Ranks that use it: the most that use any device, so that all ranks come to the same conclusions.
    ranks: u32,
}

/// Finds out which ranks share a device. Collective.
fn device_share<B: Backend>(context: &EpContext<B>) -> Result<DeviceShare, DispatchError> {
    let processors = context.backend().processors();
    let deadline = context.deadlines().of(Phase::Setup);
    let multiprocessors = processors.multiprocessors;
    let own = [&multiprocessors.to_le_bytes()[..], &processors.device].concat();
    let gathered =
        context.rendezvous().all_gather("devices", &own, deadline).map_err(ContextError::from)?;
    let devices: Vec<(u32, &[u8])> = gathered
        .iter()
        .filter_map(|told| told.split_first_chunk::<4>())
        .map(|(count, device)| (u32::from_le_bytes(*count), device))
        .collect();
    let sharing = |device: &[u8]| devices.iter().filter(|(_, other)| *other == device).count();
    // A device without a name is nobody else's.
    let named = devices.iter().filter(|(_, device)| !device.is_empty());
    let ranks = named.map(|(_, device)| sharing(device) as u32).max().unwrap_or(1);
    let fewest = devices.iter().map(|(count, _)| *count).min().unwrap_or(multiprocessors);
    Ok(DeviceShare { multiprocessors, fewest_multiprocessors: fewest, ranks })
}

impl<B: Backend> SharedMemory<B> {
    fn new(
        context: &EpContext<B>,
        config: &DispatchConfig,
        map: &ExpertMap,
        queue: &Queue<'static, B>,
    ) -> Result<Self, DispatchError> {
        let homes = home_entries(map, context.rank());
        let bytes: &[u8] = bytemuck::cast_slice(&homes);
        let memory = Self {
            homes: context.allocate("expert map", bytes.len())?,
            state: context.allocate("step counters", size_of::<StepState>())?,
            peer_required: context.allocate("requirements of ranks", 4 * context.world())?,
            required_by_dispatch: context
                .allocate("requirements of dispatches", 4 * config.max_dispatches)?,
            ring: RecordRing::new(context, config)?,
        };
        let state = StepState { step: config.first_step, ..StepState::zeroed() };
        // SAFETY: both were allocated a moment ago; no operation reads them yet.
        unsafe {
            queue.upload(&memory.homes.slice(), bytes)?;
            queue.upload(&memory.state.slice(), bytemuck::bytes_of(&state))?;
        }
        Ok(memory)
    }
}

/// Where `sender` sends the tokens of each expert, as kernels read it.
fn home_entries(map: &ExpertMap, sender: Rank) -> Vec<ExpertHomeEntry> {
    let entry = |home: ExpertHome| ExpertHomeEntry { rank: home.rank.0, slot: home.slot };
    map.homes_for(sender).into_iter().map(entry).collect()
}

impl<B: Backend> Clone for TokenDispatcher<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<B: Backend> fmt::Debug for TokenDispatcher<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenDispatcher")
            .field("context", &self.inner.context)
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}
