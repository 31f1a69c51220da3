// The items of a window, on either side of its gather.
#pragma once

#include "lane.cuh"
#include "rows.cuh"

namespace items {

using scan::WARP;
using scan::WHOLE;

// The rank that the item at `position` of all items for this rank came from; a whole warp asks.
__device__ __forceinline__ u32 source_of(const u32 *source_items, u32 world, u32 position) {
    u32 source = 0;
    for (u32 first = 0; first < world; first += WARP) {
        const u32 rank = first + scan::lane();
        const bool before = rank < world && source_items[rank + 1] <= position;
        source += __popc(__ballot_sync(WHOLE, before));
    }
    return source;
}

// Sixteen bytes of a peer's lists, as the struct that they are.
template <typename T>
__device__ __forceinline__ T load(const T *from) {
    static_assert(sizeof(T) == sizeof(Quad), "one access");
    union {
        Quad quad;
        T value;
    } both;
    both.quad = ptx::load_once(reinterpret_cast<const Quad *>(from));
    return both.value;
}

// Whatever `clear(row)` does, done by a whole warp for each padding row of the window.
template <typename Clear>
__device__ __forceinline__ void for_each_padding(const Geometry &g, const HandleParams &handle,
                                                 Clear clear) {
    const i32 *offsets = at<const i32>(handle.expert_offsets);
    const i32 *counts = at<const i32>(handle.tokens_per_expert);
    // An expert has fewer of them than the alignment.
    const u64 most = u64(g.local_experts) * g.alignment;
    for (u64 unit = rows::warp(); unit < most; unit += rows::warps()) {
        const u32 expert = u32(unit / g.alignment);
        const u32 row = u32(offsets[expert] + counts[expert]) + u32(unit % g.alignment);
        if (row < u32(offsets[expert + 1])) {
            clear(row);
        }
    }
}

// Where the owner of `item` takes the gradient of the weight of one of its choices.
__device__ __forceinline__ float *weight_grad(const Geometry &g, const Blocks &blocks,
                                              const WindowItem &item, u32 choice) {
    const u32 token = item.slot / g.fanout;
    return blocks.of<float>(item.source, g.lane.weight_grads) + u64(token) * g.top_k + choice;
}

} // namespace items
