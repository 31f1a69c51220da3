//! Waiting and signalling between streams of one device, and every way in which a wait ends.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use ep_context::backend::{MappedMemory, Memory};
use ep_context::cuda::{CacheFolder, CudaMapped, CudaMemory, CudaStream};
use ep_context::signal::{AttentionBlock, ControlBlock, HostControl, WaitParams};
use ep_context::{
    Backend, CudaBackend, CudaOptions, Deadlines, Fault, FaultKind, Kernel, KernelSource,
    LaunchShape, Phase, Rank, Retained, Specialization,
};
use graph_ep_kernels::probes;

use crate::gpu::{Gpu, source_of};

/// Long enough that it only runs out when something is wrong.
const LONG: Duration = Duration::from_secs(20);

struct Meet;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct MeetParams {
    wait: WaitParams,
    theirs: u64,
    ours: u64,
    outcome: u64,
    peer: u32,
    epoch: u32,
}

impl Kernel for Meet {
    type Params = MeetParams;
    const NAME: &'static str = "meet";
    const SOURCE: Option<KernelSource> = source_of(probes::MEET);

    unsafe fn run_on_host(_params: &MeetParams) {}
}

/// Two ranks on one device. Each has a control block on the host; attention blocks, the table of
/// them and the words that are waited for lie on the device.
struct Pair {
    gpu: Gpu,
    streams: [CudaStream; 2],
    control: [Arc<CudaMapped>; 2],
    attention: Arc<CudaMemory>,
    table: Arc<CudaMemory>,
    words: Arc<CudaMemory>,
    outcomes: Arc<CudaMapped>,
}

impl Pair {
    fn find(test: &str) -> Option<Self> {
        let gpu = Gpu::find(test)?;
        let mapped = |bytes| Arc::new(gpu.backend.allocate_mapped(bytes).expect("memory"));
        let memory = |bytes| Arc::new(gpu.backend.allocate(bytes).expect("memory"));
        let control = [(); 2].map(|()| mapped(size_of::<ControlBlock>()));
        let attention = memory(2 * size_of::<AttentionBlock>());
        let table = memory(16);
        let at = attention.address();
        gpu.write(table.address(), &[at, at + size_of::<AttentionBlock>() as u64]);
        let (words, outcomes) = (memory(16), mapped(16));
        let streams = ["rank 0", "rank 1"].map(|name| gpu.backend.stream(name).expect("a stream"));
        let pair = Self { gpu, streams, control, attention, table, words, outcomes };
        // Loaded before anything spins.
        pair.gpu.backend.load::<Meet>(&Specialization::new()).expect("compiles");
        (0..2).for_each(|rank| pair.host(rank).set_deadlines(&Deadlines::all(LONG)));
        Some(pair)
    }

    fn host(&self, rank: usize) -> HostControl<'_> {
        // SAFETY: the block lies in memory that lives as long as this value, is aligned to a page, and
        // is accessed by atomic operations only.
        unsafe { HostControl::from_address(self.control[rank].host_address() as u64) }
    }

    /// Queues a meeting of `rank` with the other, which it signals if `signals`.
    fn meet(&self, rank: usize, epoch: u32, signals: bool) {
        self.meet_at(0, rank, epoch, signals);
    }

    /// The same with one of two pairs of words.
    fn meet_at(&self, pair: u64, rank: usize, epoch: u32, signals: bool) {
        let peer = 1 - rank;
        let word = |rank: usize| self.words.address() + 8 * pair + 4 * rank as u64;
        let rank_number = u32::try_from(rank).expect("0 or 1");
        let params = MeetParams {
            wait: WaitParams {
                control: self.control[rank].address(),
                attention: self.table.address(),
                own: self.attention.address() + (rank * size_of::<AttentionBlock>()) as u64,
                rank: rank_number,
                world: 2,
            },
            theirs: if signals { word(peer) } else { 0 },
            ours: word(rank),
            outcome: self.outcomes.address() + 8 * rank as u64,
            peer: 1 - rank_number,
            epoch,
        };
        let retained: [Retained; 5] = [
            self.control[rank].clone(),
            self.attention.clone(),
            self.table.clone(),
            self.words.clone(),
            self.outcomes.clone(),
        ];
        let kernel = self.gpu.backend.load::<Meet>(&Specialization::new()).expect("loaded");
        // SAFETY: the launch retains everything that it addresses, and the words are signals.
        unsafe {
            self.gpu.backend.launch(
                &self.streams[rank],
                &kernel,
                LaunchShape::ONE_WARP,
                &params,
                &retained,
            )
        }
        .expect("queued");
    }

    /// Waits for a meeting of `rank`; returns the fault that ended it.
    fn outcome(&self, rank: usize) -> Option<Fault> {
        self.gpu.backend.synchronize(&self.streams[rank]).expect("nothing failed");
        // SAFETY: the stream is idle, and nothing else uses the rank's word.
        let word = unsafe { self.outcomes.host_address().cast::<u64>().add(rank).read_volatile() };
        let fault = Fault::from_word(word.checked_sub(1).expect("the kernel has run"));
        assert_eq!(fault.is_none(), word == 1);
        assert_eq!(self.host(rank).fault(), fault);
        fault
    }

    fn fault(culprit: u32, kind: FaultKind) -> Option<Fault> {
        Some(Fault { phase: Phase::Dispatch, culprit: Rank(culprit), kind })
    }
}

#[test]
fn two_streams_meet_as_often_as_they_like() {
    let Some(pair) = Pair::find("two_streams_meet_as_often_as_they_like") else { return };
    // Epochs wrap. The pairs of words take turns: that a rank comes to one pair says that it has found
    // what it waited for in the other, which may then be signalled again.
    pair.gpu.write(pair.words.address(), &[u32::MAX - 5; 4]);
    for round in 0..20_u32 {
        let epoch = (u32::MAX - 4).wrapping_add(round);
        for words in 0..2 {
            pair.meet_at(words, 0, epoch, true);
            pair.meet_at(words, 1, epoch, true);
        }
    }
    assert_eq!((pair.outcome(0), pair.outcome(1)), (None, None));
}

#[test]
fn uploads_do_not_wait_for_a_kernel_that_waits() {
    let Some(pair) = Pair::find("uploads_do_not_wait_for_a_kernel_that_waits") else { return };
    let memory = pair.gpu.words(&[0; 1024]);
    pair.meet(0, 1, false);
    // Behind a kernel that waits for the other rank, on the same host thread.
    for value in 1..=8_u32 {
        let data = [value; 1024];
        // SAFETY: the memory lives until the stream is idle.
        unsafe {
            pair.gpu.backend.upload(
                &pair.streams[0],
                memory.address(),
                bytemuck::cast_slice(&data),
                &[],
            )
        }
        .expect("queued");
    }
    pair.gpu.write(pair.words.address(), &[1_u32]);
    assert_eq!(pair.outcome(0), None);
    assert_eq!(pair.gpu.read(memory.address(), 1024), [8; 1024]);
}

#[test]
fn uploads_wait_for_no_kernel_of_another_rank() {
    let Some(pair) = Pair::find("uploads_wait_for_no_kernel_of_another_rank") else { return };
    // More than a rank has page-locked memory, so that it waits for its own.
    const WORDS: usize = 3 << 20;
    let memory = pair.gpu.words(&vec![0; WORDS]);
    let options = CudaOptions::new(0).with_cache(CacheFolder::at(pair.gpu.cache.path()));
    let other = CudaBackend::new(options).expect("a second rank");
    let stream = other.stream("other").expect("a stream");
    pair.meet(0, 1, false);
    let data: Vec<u32> = (0..).take(WORDS).collect();
    let bytes = bytemuck::cast_slice(&data);
    // SAFETY: the memory lives until the stream is idle.
    unsafe { other.upload(&stream, memory.address(), bytes, &[]) }.expect("queued");
    let mut there = vec![0; WORDS];
    let into = bytemuck::cast_slice_mut(&mut there);
    // SAFETY: the memory has this length, and nothing else writes it.
    unsafe { other.download(&stream, memory.address(), into) }.expect("it ran");
    pair.gpu.write(pair.words.address(), &[1_u32]);
    assert_eq!(pair.outcome(0), None, "the kernel was waited for");
    assert_eq!(there, data);
}

#[test]
fn graphs_are_made_ready_while_memory_waits_to_be_given_back() {
    let test = "graphs_are_made_ready_while_memory_waits_to_be_given_back";
    let Some(pair) = Pair::find(test) else { return };
    let (backend, stream) = (&pair.gpu.backend, &pair.streams[1]);
    let memory = pair.gpu.words(&[0; 4]);
    let dropped = (
        backend.allocate(1 << 20).expect("memory"),
        backend.allocate_mapped(1 << 20).expect("memory"),
        backend.allocate_shared(1 << 20).expect("memory"),
    );
    pair.meet(0, 1, false);
    drop(dropped);
    let key = backend.begin_recording(stream).expect("begun");
    let retained: [Retained; 1] = [memory.clone()];
    // SAFETY: the graph retains the memory.
    unsafe { backend.fill(stream, memory.address(), 1, 16, &retained) }.expect("recorded");
    let graph = backend.instantiate(backend.end_recording(&key).expect("ended")).expect("made");
    backend.replay(stream, &graph).expect("queued");
    backend.synchronize(stream).expect("it ran");
    assert_eq!(backend.uncollected(), 3, "memory waits for the device, and so waits itself");
    pair.gpu.write(pair.words.address(), &[1_u32]);
    assert_eq!(pair.outcome(0), None, "the kernel was waited for");
    backend.collect().expect("collected");
    assert_eq!(backend.uncollected(), 0);
    assert_eq!(pair.gpu.read(memory.address(), 4), [0x0101_0101; 4]);
}

#[test]
fn a_peer_that_does_not_come_is_named_and_told() {
    let Some(pair) = Pair::find("a_peer_that_does_not_come_is_named_and_told") else { return };
    pair.host(0).set_deadline(Phase::Dispatch, Duration::from_millis(20));
    pair.meet(0, 1, true);
    let fault = Pair::fault(1, FaultKind::Timeout);
    assert_eq!(pair.outcome(0), fault);
    // Sticky, and the peer is told, although its signal is there.
    pair.gpu.write(pair.words.address(), &[1_u32]);
    pair.meet(0, 1, true);
    pair.meet(1, 1, true);
    assert_eq!((pair.outcome(0), pair.outcome(1)), (fault, fault));
}

#[test]
fn an_abort_ends_the_waits_of_both() {
    let Some(pair) = Pair::find("an_abort_ends_the_waits_of_both") else { return };
    pair.meet(0, 1, false);
    pair.meet(1, 1, false);
    pair.host(1).abort();
    let fault = Pair::fault(1, FaultKind::Aborted);
    assert_eq!((pair.outcome(0), pair.outcome(1)), (fault, fault));
}

#[test]
fn a_peer_that_is_gone_ends_the_wait_for_it() {
    let Some(pair) = Pair::find("a_peer_that_is_gone_ends_the_wait_for_it") else { return };
    pair.meet(0, 1, false);
    pair.host(0).gone(Rank(1));
    assert_eq!(pair.outcome(0), Pair::fault(1, FaultKind::Gone));
}

#[test]
fn a_peer_in_another_step_is_found_out() {
    let Some(pair) = Pair::find("a_peer_in_another_step_is_found_out") else { return };
    pair.gpu.write(pair.words.address(), &[7_u32]);
    pair.meet(0, 5, false);
    assert_eq!(pair.outcome(0), Pair::fault(1, FaultKind::OutOfStep));
}

#[test]
fn deadlines_do_not_count_while_they_are_suspended() {
    let Some(pair) = Pair::find("deadlines_do_not_count_while_they_are_suspended") else { return };
    pair.host(0).set_deadline(Phase::Dispatch, Duration::from_millis(1));
    pair.host(0).suspend();
    pair.meet(0, 1, false);
    // However long this takes: a wait that ignored the suspension would have ended in a timeout.
    thread::sleep(Duration::from_millis(100));
    pair.gpu.write(pair.words.address(), &[1_u32]);
    assert_eq!(pair.outcome(0), None);
    pair.host(0).resume();
    pair.meet(0, 2, false);
    assert_eq!(pair.outcome(0), Pair::fault(1, FaultKind::Timeout));
}
