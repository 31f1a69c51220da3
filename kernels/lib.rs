//! The device code as text.
//!
//! A kernel is one `.cu` file with one entry point that takes one parameter block by value. What
//! kernels share are the `.cuh` files in [`HEADERS`], which include each other by name and nothing
//! else: no framework's header and none of the CUDA toolkit. NVRTC is given them from memory, so that
//! a program that embeds this crate needs no include path where it runs.
#![no_std]

mod layouts;

/// A source file or header: the name by which it is included and named in errors, and its text.
pub type Text = (&'static str, &'static str);

/// Fixed-width types, and the check of a struct's layout against its Rust twin.
pub const TYPES: Text = ("types.cuh", include_str!("types.cuh"));
/// Instructions that CUDA C++ has no name for, and the ordered accesses of the protocol.
pub const PTX: Text = ("ptx.cuh", include_str!("ptx.cuh"));
/// How ranks wait for each other, signal, and give up.
pub const WAIT: Text = ("wait.cuh", include_str!("wait.cuh"));
/// The condition of a loop in a graph.
pub const LOOP: Text = ("loop.cuh", include_str!("loop.cuh"));
/// The structs that lie in memory which ranks, kernels and the host share.
pub const STRUCTS: Text = ("structs.cuh", include_str!("structs.cuh"));
/// The parameter blocks of the kernels of dispatch and combine.
pub const PARAMS: Text = ("params.cuh", include_str!("params.cuh"));
/// A lane and the counters of a step; the last block to arrive.
pub const LANE: Text = ("lane.cuh", include_str!("lane.cuh"));
/// Sums over the threads of a block.
pub const SCAN: Text = ("scan.cuh", include_str!("scan.cuh"));
/// What every rank has for each expert, added up.
pub const SOURCES: Text = ("sources.cuh", include_str!("sources.cuh"));
/// Number formats and their roundings.
pub const DTYPE: Text = ("dtype.cuh", include_str!("dtype.cuh"));
/// Moving and adding rows.
pub const ROWS: Text = ("rows.cuh", include_str!("rows.cuh"));
/// What all ranks have for this one, and what it requires.
pub const ACCOUNT: Text = ("account.cuh", include_str!("account.cuh"));
/// The next window of a dispatch.
pub const WINDOW: Text = ("window.cuh", include_str!("window.cuh"));
/// Rows on their way into shared memory.
pub const FEED: Text = ("feed.cuh", include_str!("feed.cuh"));
/// What a warp of a pushed combine adds up.
pub const COMBINE_UNITS: Text = ("combine_units.cuh", include_str!("combine_units.cuh"));
/// Sums that carry their turn.
pub const COMBINE_FEW: Text = ("combine_few.cuh", include_str!("combine_few.cuh"));
/// Sums of rows that are streamed through shared memory.
pub const COMBINE_STREAM: Text = ("combine_stream.cuh", include_str!("combine_stream.cuh"));
/// What all parts of a pushed dispatch have in common.
pub const PUSH_CONTEXT: Text = ("push_context.cuh", include_str!("push_context.cuh"));
/// Which ranks get which tokens.
pub const PUSH_LISTS: Text = ("push_lists.cuh", include_str!("push_lists.cuh"));
/// Tokens to the ranks of their experts.
pub const PUSH_SEND: Text = ("push_send.cuh", include_str!("push_send.cuh"));
/// Where rows belong.
pub const PUSH_PLACES: Text = ("push_places.cuh", include_str!("push_places.cuh"));
/// Pieces that carry their turn, to where they belong.
pub const PUSH_INCOMING: Text = ("push_incoming.cuh", include_str!("push_incoming.cuh"));
/// Rows to where they belong.
pub const PUSH_RECEIVE: Text = ("push_receive.cuh", include_str!("push_receive.cuh"));
/// A dispatch of few tokens.
pub const PUSH_FEW: Text = ("push_few.cuh", include_str!("push_few.cuh"));
/// Rows that are pushed, with a flag behind each piece.
pub const PUSH: Text = ("push.cuh", include_str!("push.cuh"));
/// Flags that the warps of a block raise together.
pub const RAISE: Text = ("raise.cuh", include_str!("raise.cuh"));
/// The items of several ranks, in turn.
pub const TURNS: Text = ("turns.cuh", include_str!("turns.cuh"));
/// Entries of pushed lists that carry their turn.
pub const STAMPED: Text = ("stamped.cuh", include_str!("stamped.cuh"));
/// Pieces of rows that carry their turn.
pub const STAMPED_ROWS: Text = ("stamped_rows.cuh", include_str!("stamped_rows.cuh"));
/// The items of a window.
pub const ITEMS: Text = ("items.cuh", include_str!("items.cuh"));
/// Lists for each destination.
pub const LISTS: Text = ("lists.cuh", include_str!("lists.cuh"));
/// Tokens to where peers read them.
pub const STAGE: Text = ("stage.cuh", include_str!("stage.cuh"));
/// Folding what every rank said into the counters of a step.
pub const FOLD: Text = ("fold.cuh", include_str!("fold.cuh"));
/// Finding that a step was recorded for shapes that do not hold any more.
pub const STALE: Text = ("stale.cuh", include_str!("stale.cuh"));

/// Every header, for a kernel that need not choose.
pub const HEADERS: &[Text] = &[
    TYPES,
    PTX,
    WAIT,
    LOOP,
    STRUCTS,
    PARAMS,
    LANE,
    SCAN,
    SOURCES,
    DTYPE,
    ROWS,
    FEED,
    STAMPED,
    STAMPED_ROWS,
    ITEMS,
    LISTS,
    STAGE,
    FOLD,
    ACCOUNT,
    WINDOW,
    PUSH,
    RAISE,
    TURNS,
    PUSH_CONTEXT,
    PUSH_LISTS,
    PUSH_SEND,
    PUSH_PLACES,
    PUSH_INCOMING,
    PUSH_RECEIVE,
    PUSH_FEW,
    COMBINE_UNITS,
    COMBINE_FEW,
    COMBINE_STREAM,
    STALE,
];

/// Kernels of the tests of the CUDA backend.
pub mod probes {
    use super::Text;

    /// Adds to every word of an array.
    pub const ADD: Text = ("probes/add.cu", include_str!("probes/add.cu"));
    /// Counts a word down and sets the condition of a loop by it.
    pub const COUNT_DOWN: Text = ("probes/count_down.cu", include_str!("probes/count_down.cu"));
    /// Signals a peer, waits for it, and says how the wait ended.
    pub const MEET: Text = ("probes/meet.cu", include_str!("probes/meet.cu"));
}

/// Kernels that run a group for long: inputs, experts and comparison in closed form.
pub mod soak {
    use super::{DTYPE, PTX, ROWS, SCAN, TYPES, Text};

    /// The closed form.
    pub const SOAK: Text = ("soak.cuh", include_str!("soak/soak.cuh"));
    /// The headers of these kernels.
    pub const HEADERS: &[Text] = &[TYPES, PTX, SCAN, DTYPE, ROWS, SOAK];

    /// Makes the inputs of a step.
    pub const INPUT: Text = ("soak/input.cu", include_str!("soak/input.cu"));
    /// The experts.
    pub const EXPERTS: Text = ("soak/experts.cu", include_str!("soak/experts.cu"));
    /// Compares the outputs of a step.
    pub const CHECK: Text = ("soak/check.cu", include_str!("soak/check.cu"));
}

/// Kernels that measure what a device can do at best.
pub mod limits {
    use super::Text;

    /// Copies from end to end.
    pub const COPY: Text = ("limits/copy.cu", include_str!("limits/copy.cu"));
    /// Waits until every rank has come.
    pub const ALIGN: Text = ("limits/align.cu", include_str!("limits/align.cu"));
    /// Sends a word to and fro between two ranks.
    pub const PING_PONG: Text = ("limits/ping_pong.cu", include_str!("limits/ping_pong.cu"));
    /// Does nothing.
    pub const EMPTY: Text = ("limits/empty.cu", include_str!("limits/empty.cu"));
    /// A loop whose trips do nothing.
    pub const TRIP: Text = ("limits/trip.cu", include_str!("limits/trip.cu"));

    /// All of them. They take no constants.
    pub const ALL: &[Text] = &[COPY, ALIGN, PING_PONG, EMPTY, TRIP];
}

/// Kernels of dispatch and combine.
pub mod dispatch {
    use super::Text;

    /// Counts a step and clears what is counted within one.
    pub const STEP_BEGIN: Text = ("step_begin.cu", include_str!("step_begin.cu"));
    /// The sender's half of dispatch.
    pub const ROUTE: Text = ("route.cu", include_str!("route.cu"));
    /// A whole dispatch whose rows are pushed.
    pub const PUSH_DISPATCH: Text = ("push_dispatch.cu", include_str!("push_dispatch.cu"));
    /// A whole combine after such a dispatch.
    pub const PUSH_COMBINE: Text = ("push_combine.cu", include_str!("push_combine.cu"));
    /// The wait for the senders of a dispatch.
    pub const COUNT: Text = ("count.cu", include_str!("count.cu"));
    /// Takes the next window of a dispatch.
    pub const WINDOW: Text = ("window.cu", include_str!("window.cu"));
    /// Brings the rows of a window.
    pub const GATHER: Text = ("gather.cu", include_str!("gather.cu"));
    /// The expert rank's half of combine.
    pub const REDUCE_PUSH: Text = ("reduce_push.cu", include_str!("reduce_push.cu"));
    /// The wait for the partial sums of a combine.
    pub const FOLD: Text = ("fold.cu", include_str!("fold.cu"));
    /// The owner's half of combine.
    pub const REDUCE: Text = ("reduce.cu", include_str!("reduce.cu"));
    /// Stages gradients along the routes of a kept handle.
    pub const RESTAGE: Text = ("restage.cu", include_str!("restage.cu"));
    /// The wait for such gradients.
    pub const ACQUIRE: Text = ("acquire.cu", include_str!("acquire.cu"));
    /// Brings gradients to the rows of their tokens.
    pub const REGATHER: Text = ("regather.cu", include_str!("regather.cu"));
    /// Returns gradients of weights that the caller computed.
    pub const PUSH_WEIGHT_GRADS: Text =
        ("push_weight_grads.cu", include_str!("push_weight_grads.cu"));
    /// The closing round of a step that ends in a dispatch.
    pub const ACKNOWLEDGE: Text = ("acknowledge.cu", include_str!("acknowledge.cu"));
    /// Publishes the record of a step.
    pub const STEP_END: Text = ("step_end.cu", include_str!("step_end.cu"));
    /// Lets steps run again behind an over-budget one.
    pub const RESUME: Text = ("resume.cu", include_str!("resume.cu"));
    /// Gives the group up.
    pub const ABANDON: Text = ("abandon.cu", include_str!("abandon.cu"));
}

/// Experts that need no weights: for demonstrations, tests and benchmarks.
pub const SYNTHETIC_EXPERTS: Text = ("synthetic_experts.cu", include_str!("synthetic_experts.cu"));
