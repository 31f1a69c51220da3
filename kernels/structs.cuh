// Structs that ranks, kernels and the host share: what lies in memory.
//
// Each is the twin of the Rust struct of its name, which says what the fields mean; fields stand in the
// same order. Those of 16 bytes or a multiple are aligned so that one access moves 16 bytes: they
// only ever lie at such addresses.
#pragma once

#include "types.cuh"

// No dispatch, no rank, no position.
constexpr u32 NONE = 0xffffffff;
// The receiver reads rows from the sender's staging area, and lists from the sender's block.
constexpr u32 TRANSFER_PULL = 0;
// The sender writes lists and rows into the receiver's block, and a flag behind each piece of a row.
constexpr u32 TRANSFER_PUSH = 1;

// Ranks of a group that pushes: the ranks of a token are the lanes of a warp.
constexpr u32 MOST_PUSHING = 32;

// Byte offsets of the regions of a lane's shared block.
struct LaneLayout {
    u64 dispatch_words;
    u64 combine_words;
    u64 dispatch_headers;
    u64 combine_headers;
    u64 counts;
    u64 tallies;
    u64 prefixes;
    u64 items;
    u64 pairs;
    u64 staging;
    u64 scales;
    u64 landing;
    u64 weight_grads;
    u64 pushed_items;
    u64 pushed_pairs;
    u64 arrived;
    u64 returned;
    u64 pushed_rows;
    u64 pushed_scales;
    u64 bytes;
};
SAME_LAYOUT(LaneLayout, 160, bytes, 152);

// The sizes that every kernel works with.
struct Geometry {
    u32 world;
    u32 rank;
    u32 experts;
    u32 slots;
    u32 local_experts;
    u32 top_k;
    u32 fanout;
    u32 max_tokens;
    u32 alignment;
    u32 hidden;
    u32 row_bytes;
    u32 scale_bytes;
    u32 token_bytes;
    u32 sum_bytes;
    u32 dtype;
    u32 quantize;
    u32 flat;
    u32 flat_width;
    u32 weighted;
    u32 push;
    u32 row_pieces;
    u32 sum_pieces;
    u32 clear_padding;
    u32 stamped;
    LaneLayout lane;
};
SAME_LAYOUT(Geometry, 256, lane, 96);

// What a sender tells each rank in a dispatch.
struct alignas(16) DispatchHeader {
    u32 step;
    u32 ordinal;
    u32 items;
    u32 item_base;
    u32 pairs;
    u32 pair_base;
    u32 transfer;
    u32 reserved;
};
SAME_LAYOUT(DispatchHeader, 32, reserved, 28);

// What a rank tells each rank in a combine, or in the closing round of a step.
struct alignas(16) CombineHeader {
    u32 step;
    u32 ordinal;
    u32 prefix;
    u32 required;
    u32 first_over;
    u32 reserved[3];
};
SAME_LAYOUT(CombineHeader, 32, reserved, 20);

// One token for one destination.
struct alignas(16) Item {
    u32 token;
    u32 slot;
    u32 pair_begin;
    u32 pairs;
};
SAME_LAYOUT(Item, 16, pairs, 12);

// One token for one expert.
struct alignas(16) Pair {
    u32 slot;
    u32 index;
    float weight;
    u32 choice;
};
SAME_LAYOUT(Pair, 16, choice, 12);

// Where one partial sum of a token comes from.
struct alignas(8) Destination {
    u32 rank;
    u32 position;
};
SAME_LAYOUT(Destination, 8, position, 4);

// An item inside the window, as its receiver keeps it.
struct alignas(16) WindowItem {
    u32 source;
    u32 slot;
    u32 begin;
    u32 rows;
};
SAME_LAYOUT(WindowItem, 16, rows, 12);

// One pair of such an item: its row and its weight.
struct alignas(16) RowRef {
    u32 row;
    float weight;
    u32 choice;
    u32 slot;
};
SAME_LAYOUT(RowRef, 16, slot, 12);

// Where an expert lives.
struct alignas(8) ExpertHomeEntry {
    u32 rank;
    u32 slot;
};
SAME_LAYOUT(ExpertHomeEntry, 8, slot, 4);

// What blocks count in one turn of a lane.
struct TurnCounters {
    u32 counted;
    u32 listed;
    u32 sent;
    u32 taken;
    u32 pushed;
    u32 reduced;
};
SAME_LAYOUT(TurnCounters, 24, reduced, 20);

// A lane's words in private device memory.
struct LaneState {
    u32 epoch;
    u32 arrivals;
    u64 turn;
    TurnCounters counters[2];
    u64 placed;
    u32 silent;
    u32 begun;
};
SAME_LAYOUT(LaneState, 80, begun, 76);

// What a rank counts over one step. Lanes may count at the same time; see `StepView`.
struct StepState {
    u32 step;
    u32 held;
    u32 drained;
    u32 first_over;
    u32 required;
    u32 dispatches;
    u32 windows;
    u32 capacity;
    u64 dropped;
    u64 delivered;
    u64 invalid_ids;
    u64 repeated_ids;
};
SAME_LAYOUT(StepState, 64, repeated_ids, 56);

// The window of a dispatch that its receiver works on.
struct WindowState {
    u32 tokens;
    u32 items;
    u32 pairs;
    u32 required;
    u32 begin;
    u32 end;
    u32 pair_begin;
    u32 window_pairs;
    u32 capacity;
    u32 windows;
    u32 silent;
    u32 reserved;
};
SAME_LAYOUT(WindowState, 48, reserved, 44);

// The fixed part of a published record.
struct RecordHeader {
    u64 sequence;
    u32 step;
    u32 drained;
    u32 first_over;
    u32 required;
    u32 dispatches;
    u32 windows;
    u32 capacity;
    u32 reserved;
    u64 fault;
    u64 dropped;
    u64 delivered;
    u64 invalid_ids;
    u64 repeated_ids;
};
SAME_LAYOUT(RecordHeader, 80, repeated_ids, 72);
