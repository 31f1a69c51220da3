// The items of a window, on either side of its gather.
#pragma once

#include "lane.cuh"
#include "rows.cuh"
#include "stamped.cuh"

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

// The most pairs of one token for one rank.
__device__ __forceinline__ u32 pair_width(const Geometry &g) { return min(g.top_k, g.slots); }

// Where the entries are that `source` pushes into the block of `to`: each item's pairs have a place of their
// own, so that nobody has to read the item first to find them.
__device__ __forceinline__ stamped::Word *pushed_item(const Geometry &g, const Blocks &blocks, u32 to,
                                                      u32 source, u32 position) {
    return blocks.of<stamped::Word>(to, g.lane.pushed_items) + u64(source) * g.max_tokens + position;
}
__device__ __forceinline__ stamped::Word *pushed_pair(const Geometry &g, const Blocks &blocks, u32 to,
                                                      u32 source, u32 position, u32 place) {
    return blocks.of<stamped::Word>(to, g.lane.pushed_pairs) +
           (u64(source) * g.max_tokens + position) * pair_width(g) + place;
}

// The lists that `source` has for this rank, which has acquired the header of them: in the block of the
// source, or, where it pushed them, in that of this rank.
class Lists {
  public:
    __device__ __forceinline__ Lists(const Geometry &g, const Blocks &blocks, u32 source)
        : g_(g), blocks_(blocks), source_(source),
          header_(blocks.own<DispatchHeader>(g.lane.dispatch_headers)[source]) {}

    __device__ __forceinline__ Item item(u32 position) const {
        if (pushed()) {
            return stamped::item_of(
                g_, stamped::load(pushed_item(g_, blocks_, g_.rank, source_, position)));
        }
        return load(blocks_.of<Item>(source_, g_.lane.items) + header_.item_base + position);
    }

    // Pair `place` of `item`, which is at `position`.
    __device__ __forceinline__ Pair pair(u32 position, const Item &item, u32 place) const {
        if (pushed()) {
            return stamped::pair_of(
                stamped::load(pushed_pair(g_, blocks_, g_.rank, source_, position, place)));
        }
        return load(blocks_.of<Pair>(source_, g_.lane.pairs) + header_.pair_base + item.pair_begin +
                    place);
    }

  private:
    __device__ __forceinline__ bool pushed() const { return header_.transfer == TRANSFER_PUSH; }

    const Geometry &g_;
    const Blocks &blocks_;
    u32 source_;
    DispatchHeader header_;
};

// The weights beside the rows, and in the flat layout the experts. `place` is that of the pair in its
// item.
__device__ __forceinline__ void annotate(const Geometry &g, const HandleParams &handle,
                                         const RowRef &reference, u32 place) {
    float *weights = at<float>(handle.row_weights);
    if (g.flat == 0) {
        weights[reference.row] = reference.weight;
    } else {
        const u64 entry = u64(reference.row) * g.flat_width + place;
        weights[entry] = reference.weight;
        at<i32>(handle.row_experts)[entry] = i32(reference.slot);
    }
}

// The entries of a flat row behind its last expert.
__device__ __forceinline__ void annotate_rest(const Geometry &g, const HandleParams &handle, u32 row,
                                              u32 pairs) {
    for (u32 place = pairs + scan::lane(); place < g.flat_width; place += WARP) {
        const u64 entry = u64(row) * g.flat_width + place;
        at<float>(handle.row_weights)[entry] = 0.0f;
        at<i32>(handle.row_experts)[entry] = -1;
    }
}

// Rows of an expert that belong to no pair.
struct Padding {
    u32 begin;
    u32 end;

    __device__ __forceinline__ u32 rows() const { return end - begin; }
};

// A row of padding: its number among those of `experts` experts, from `first` on.
struct Padded {
    u32 first;
    u32 experts;
    u32 number;
};

// The padding of experts that follow each other, of whom each lane of a warp has a part of equally many. Sums
// over parts say with one look in which of them a row is. The whole warp calls this.
template <typename PaddingOf>
class PaddingParts {
  public:
    __device__ __forceinline__ PaddingParts(const PaddingOf &padding_of, u32 first, u32 experts)
        : first_(first), end_(first + experts), width_((experts + WARP - 1) / WARP) {
        const u32 begin = first_ + scan::lane() * width_;
        for (u32 expert = begin; expert < min(begin + width_, end_); ++expert) {
            rows_ += padding_of(expert).rows();
        }
        upto_ = scan::warp_inclusive(rows_);
    }

    // Rows of all.
    __device__ __forceinline__ u32 rows() const { return __shfl_sync(WHOLE, upto_, WARP - 1); }

    // The part that row `number` is in. There are more rows than that.
    __device__ __forceinline__ Padded part_of(u32 number) const {
        const u32 part = __popc(__ballot_sync(WHOLE, upto_ <= number));
        const u32 first = first_ + part * width_;
        return Padded{first, min(width_, end_ - first),
                      number - __shfl_sync(WHOLE, upto_ - rows_, part)};
    }

  private:
    u32 first_;
    u32 end_;
    u32 width_;
    // Of this lane's part; of all parts up to it.
    u32 rows_ = 0;
    u32 upto_;
};

// A warp, and all that share some work.
struct Team {
    u32 warp;
    u32 warps;

    // Of so many blocks of the grid, from `first` on. Neighbouring blocks take neighbouring work.
    static __device__ __forceinline__ Team of_blocks(u32 first, u32 blocks) {
        return Team{threadIdx.x / WARP * blocks + (blockIdx.x - first), blocks * (blockDim.x / WARP)};
    }
};

// Whatever `clear(row)` does, done by a whole warp for each padding row of the window; `padding_of(expert)`
// says where they are. The whole team calls this.
//
// Sums over experts are nowhere written down, so every warp makes its own. It could share them with its block,
// but would have to wait for warps that still bring rows.
template <typename PaddingOf, typename Clear>
__device__ __forceinline__ void for_each_padding(const Geometry &g, const Team &team,
                                                 PaddingOf padding_of, Clear clear) {
    const PaddingParts<PaddingOf> parts(padding_of, 0, g.local_experts);
    const u32 all = parts.rows();
    for (u32 number = team.warp; number < all; number += team.warps) {
        Padded padded = parts.part_of(number);
        while (padded.experts > 1) {
            const PaddingParts<PaddingOf> within(padding_of, padded.first, padded.experts);
            padded = within.part_of(padded.number);
        }
        clear(padding_of(padded.first).begin + padded.number);
    }
}

// Clears a row of padding: the row, its scales, its weight. A whole warp does one of its parts.
struct Clear {
    static constexpr u32 PARTS = 4;

    const Geometry &g;
    const HandleParams &handle;
    u64 rows;
    u64 scales;

    __device__ __forceinline__ void operator()(u32 row, u32 part) const {
        const u32 quads = g.row_bytes / sizeof(Quad);
        rows::clear(rows::row_of(rows, row, quads), part * quads / PARTS, (part + 1) * quads / PARTS);
        if (part != 0) {
            return;
        }
        if (g.scale_bytes != 0) {
            const u32 scale_quads = g.scale_bytes / sizeof(Quad);
            rows::clear(rows::row_of(scales, row, scale_quads), 0, scale_quads);
        }
        if (handle.row_weights != 0 && scan::lane() == 0) {
            at<float>(handle.row_weights)[row] = 0.0f;
        }
    }
};

// Clears the padding of the window. The whole team calls this.
template <typename PaddingOf>
__device__ __forceinline__ void clear_padding(const Clear &clear, const Team &team, PaddingOf padding_of) {
    for_each_padding(clear.g, team, padding_of, [&](u32 row) {
        for (u32 part = 0; part < Clear::PARTS; ++part) {
            clear(row, part);
        }
    });
}

// As the layout of the window says, which another kernel, or another block before an acquire, wrote.
__device__ __forceinline__ Padding padding_of(const HandleParams &handle, u32 expert) {
    const i32 *offsets = at<const i32>(handle.expert_offsets);
    const i32 *counts = at<const i32>(handle.tokens_per_expert);
    return Padding{u32(offsets[expert] + counts[expert]), u32(offsets[expert + 1])};
}

// Where the owner of `item` takes the gradient of the weight of one of its choices.
__device__ __forceinline__ float *weight_grad(const Geometry &g, const Blocks &blocks,
                                              const WindowItem &item, u32 choice) {
    const u32 token = item.slot / g.fanout;
    return blocks.of<float>(item.source, g.lane.weight_grads) + u64(token) * g.top_k + choice;
}

} // namespace items
