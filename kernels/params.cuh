// The parameter blocks of the kernels: twins of the Rust structs of the same names, which say what
// the fields mean. A block crosses by value, as the only parameter of its kernel.
#pragma once

#include "structs.cuh"
#include "wait.cuh"

// The addresses of a lane.
struct LaneParams {
    u64 blocks;
    u64 state;
};
SAME_LAYOUT(LaneParams, 16, state, 8);

// The addresses of a handle: the private memory of one dispatch.
struct HandleParams {
    u64 fanouts;
    u64 destinations;
    u64 window;
    u64 expert_offsets;
    u64 tokens_per_expert;
    u64 total;
    u64 source_items;
    u64 source_pairs;
    u64 bases;
    u64 taken;
    u64 items;
    u64 pairs;
    u64 row_weights;
    u64 row_experts;
};
SAME_LAYOUT(HandleParams, 112, row_experts, 104);

// The generation of a row set for which a step was recorded.
struct ShapeCheck {
    u64 generation;
    u64 recorded;
};
SAME_LAYOUT(ShapeCheck, 16, recorded, 8);

struct StepBeginParams {
    wait::WaitParams wait;
    u64 state;
    u64 peer_required;
    u64 required_by_dispatch;
    u32 max_dispatches;
    u32 shape_count;
    ShapeCheck shapes[4];
};
SAME_LAYOUT(StepBeginParams, 128, shapes, 64);

struct RouteParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 state;
    u64 homes;
    u64 topk_ids;
    u64 topk_weights;
    u64 tokens;
    u64 scales;
    u64 num_tokens_word;
    u64 expert_counts;
    u64 rank_counts;
    u32 num_tokens;
    u32 id_bytes;
    u32 ordinal;
    u32 dependent;
};
SAME_LAYOUT(RouteParams, 504, dependent, 500);

// Halves of an operation that pushes.
constexpr u32 HALF_SEND = 1;
constexpr u32 HALF_RECEIVE = 2;

// A dispatch that pushes, or a half of it.
struct PushDispatchParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    u64 blocks[MOST_PUSHING];
    HandleParams handle;
    u64 state;
    u64 homes;
    u64 topk_ids;
    u64 topk_weights;
    u64 tokens;
    u64 scales;
    u64 num_tokens_word;
    u64 expert_counts;
    u64 rank_counts;
    u64 block_counts;
    u64 required_by_dispatch;
    u64 capacity;
    u64 rows;
    u64 received_scales;
    u64 condition;
    u32 num_tokens;
    u32 id_bytes;
    u32 ordinal;
    u32 dependent;
    u32 row_limit;
    u32 max_dispatches;
    u32 budgeted;
    u32 last;
    u32 listers;
    u32 senders;
    u32 halves;
    u32 reserved;
};
SAME_LAYOUT(PushDispatchParams, 840, reserved, 836);

// A combine after such a dispatch, or a half of it.
struct PushCombineParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    u64 blocks[MOST_PUSHING];
    HandleParams handle;
    u64 state;
    u64 peer_required;
    u64 expert_rows;
    u64 output;
    u32 ordinal;
    u32 weighted;
    u32 senders;
    u32 halves;
    // How many pieces of a sum a warp takes together, as a power of two, at most combine::Span::MOST: of a
    // partial sum, and of a token's.
    u32 push_span;
    u32 sum_span;
    u32 num_tokens;
    u32 row_limit;
};
SAME_LAYOUT(PushCombineParams, 736, row_limit, 732);

struct CountParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 state;
    u64 required_by_dispatch;
    u64 capacity;
    u32 row_limit;
    u32 max_dispatches;
    u32 ordinal;
    u32 budgeted;
    u32 dependent;
    u32 reserved;
    u64 condition;
};
SAME_LAYOUT(CountParams, 472, condition, 464);

struct WindowParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 state;
    u64 capacity;
    u32 row_limit;
    u32 last;
    u64 condition;
};
SAME_LAYOUT(WindowParams, 448, condition, 440);

struct GatherParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 rows;
    u64 scales;
};
SAME_LAYOUT(GatherParams, 432, scales, 424);

struct ReducePushParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 state;
    u64 expert_rows;
    u32 ordinal;
    u32 push;
    u32 release;
    u32 weighted;
    u32 row_limit;
    u32 reserved;
};
SAME_LAYOUT(ReducePushParams, 456, reserved, 452);

struct FoldParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    u64 state;
    u64 peer_required;
    u32 ordinal;
    u32 reserved;
};
SAME_LAYOUT(FoldParams, 328, reserved, 324);

struct ReduceParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 output;
    u64 weight_grads;
    u32 num_tokens;
    u32 reserved;
};
SAME_LAYOUT(ReduceParams, 440, reserved, 436);

struct RestageParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 state;
    u64 rows;
    u32 ordinal;
    u32 num_tokens;
};
SAME_LAYOUT(RestageParams, 440, num_tokens, 436);

struct AcquireParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    u64 state;
    u32 ordinal;
    u32 reserved;
};
SAME_LAYOUT(AcquireParams, 320, reserved, 316);

struct RegatherParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 rows;
    u64 expert_rows;
    u32 row_limit;
    u32 whole;
};
SAME_LAYOUT(RegatherParams, 440, whole, 436);

struct PushWeightGradsParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    HandleParams handle;
    u64 row_grads;
    u32 row_limit;
    u32 reserved;
};
SAME_LAYOUT(PushWeightGradsParams, 432, reserved, 428);

struct AcknowledgeParams {
    Geometry geometry;
    wait::WaitParams wait;
    LaneParams lane;
    u64 state;
    u64 peer_required;
    u32 ordinal;
    u32 reserved;
};
SAME_LAYOUT(AcknowledgeParams, 328, reserved, 324);

struct StepEndParams {
    wait::WaitParams wait;
    u64 state;
    u64 peer_required;
    u64 required_by_dispatch;
    u64 ring;
    u32 stride;
    u32 records;
    u32 max_dispatches;
    u32 hold;
};
SAME_LAYOUT(StepEndParams, 80, hold, 76);

struct ResumeParams {
    u64 state;
};
SAME_LAYOUT(ResumeParams, 8, state, 0);

struct AbandonParams {
    wait::WaitParams wait;
    u64 fault;
};
SAME_LAYOUT(AbandonParams, 40, fault, 32);
