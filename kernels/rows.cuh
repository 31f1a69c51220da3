// Moving and adding rows, a warp at a time.
//
// A warp works on a piece of a row: DEPTH times 32 quads of 16 bytes, of which each lane holds DEPTH
// and has them all in flight at once. Pieces of one row go to different warps, so that a few long rows
// occupy as much of the device as many short ones.
#pragma once

#include "dtype.cuh"
#include "scan.cuh"

namespace rows {

using scan::WARP;
using scan::WHOLE;

// The warps of the whole grid, and this one among them.
__device__ __forceinline__ u32 warps() { return gridDim.x * (blockDim.x / WARP); }
__device__ __forceinline__ u32 warp() {
    return blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
}

// How many pieces make a row of so many quads.
template <u32 DEPTH>
__device__ __forceinline__ u32 pieces(u32 quads) {
    return (quads + DEPTH * WARP - 1) / (DEPTH * WARP);
}

// Row `row` of a table of rows of `quads` quads.
__device__ __forceinline__ Quad *row_of(u64 table, u32 row, u32 quads) {
    return at<Quad>(table) + u64(row) * quads;
}

// A piece on its way from one row to others.
template <u32 DEPTH>
class Piece {
  public:
    __device__ __forceinline__ Piece(u32 number, u32 quads)
        : first_(number * (DEPTH * WARP) + scan::lane()), quads_(quads) {}

    __device__ __forceinline__ void load(const Quad *row) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first_ + i * WARP < quads_) {
                quad_[i] = ptx::load_once(row + first_ + i * WARP);
            }
        }
    }

    __device__ __forceinline__ void store(Quad *row) const {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first_ + i * WARP < quads_) {
                ptx::store_quad(row + first_ + i * WARP, quad_[i]);
            }
        }
    }

    // Stores the values times `weight`, each product rounded to the format.
    __device__ __forceinline__ void store_times(float weight, Quad *row) const {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first_ + i * WARP < quads_) {
                float values[dtype::Element::VALUES];
                dtype::Element::decode(quad_[i], values);
#pragma unroll
                for (float &value : values) {
                    value = __fmul_rn(weight, value);
                }
                ptx::store_quad(row + first_ + i * WARP, dtype::Element::encode(values));
            }
        }
    }

    // This lane's part of the sum of products with the values of another row.
    __device__ __forceinline__ float dot(const Quad *row) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first_ + i * WARP < quads_) {
                float ours[dtype::Element::VALUES];
                float theirs[dtype::Element::VALUES];
                dtype::Element::decode(quad_[i], ours);
                dtype::Element::decode(ptx::load_once(row + first_ + i * WARP), theirs);
#pragma unroll
                for (u32 at = 0; at < dtype::Element::VALUES; ++at) {
                    sum = __fadd_rn(sum, __fmul_rn(ours[at], theirs[at]));
                }
            }
        }
        return sum;
    }

  private:
    u32 first_;
    u32 quads_;
    Quad quad_[DEPTH];
};

// Zeroes the quads of a row from `begin` up to `end`; a whole warp calls this.
__device__ __forceinline__ void clear(Quad *row, u32 begin, u32 end) {
    for (u32 i = begin + scan::lane(); i < end; i += WARP) {
        ptx::store_quad(row + i, Quad{});
    }
}

// The sum of the same piece of several rows, in fp32: rows are added one after the other, each value
// rounded as it is added, and the sum is rounded once to the format. AHEAD rows are in flight.
template <u32 DEPTH, u32 AHEAD = 4>
class Sum {
  public:
    __device__ __forceinline__ Sum(u32 number, u32 quads)
        : Sum(number * (DEPTH * WARP), quads, quads) {}

    // Of the quads from `begin` on that lie before `end`, in rows of `quads` quads.
    __device__ __forceinline__ Sum(u32 begin, u32 end, u32 quads)
        : first_(begin + scan::lane()), end_(end), quads_(quads) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            dtype::clear(sum_[i]);
        }
    }

    // What it is rounded to the format.
    struct Rounded {
        Quad quad[DEPTH];
    };
    __device__ __forceinline__ Rounded rounded() const {
        Rounded rounded;
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            rounded.quad[i] = dtype::Element::encode(sum_[i]);
        }
        return rounded;
    }

    // Adds the same piece of another sum.
    __device__ __forceinline__ void add(const Rounded &other) { add(other.quad); }

    // Adds the same piece of a row that is at hand, or `weight` times that.
    __device__ __forceinline__ void add(const Quad (&quads)[DEPTH]) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            dtype::add(sum_[i], quads[i]);
        }
    }
    __device__ __forceinline__ void add(const Quad (&quads)[DEPTH], float weight) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            dtype::add_weighted(sum_[i], weight, quads[i]);
        }
    }

    // Adds rows of `table`, in the order of the lanes in `lanes` (the same in every lane), each of
    // which names one of them and its weight.
    __device__ __forceinline__ void add(u64 table, u32 row, float weight, bool weighted, u32 lanes) {
        // Defined before it is known which of them are loaded: else these registers would be taken from the beginning
        // of the kernel on.
        Quad quads[AHEAD][DEPTH] = {};
        while (lanes != 0) {
            float weights[AHEAD];
            u32 left = lanes;
#pragma unroll
            for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
                if (left != 0) {
                    const u32 from = __ffs(left) - 1;
                    left &= left - 1;
                    weights[ahead] = __shfl_sync(WHOLE, weight, from);
                    const Quad *start = row_of(table, __shfl_sync(WHOLE, row, from), quads_);
#pragma unroll
                    for (u32 i = 0; i < DEPTH; ++i) {
                        if (first_ + i * WARP < end_) {
                            quads[ahead][i] = ptx::load_once(start + first_ + i * WARP);
                        }
                    }
                }
            }
#pragma unroll
            for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
                if (lanes != 0) {
                    lanes &= lanes - 1;
#pragma unroll
                    for (u32 i = 0; i < DEPTH; ++i) {
                        if (first_ + i * WARP < end_) {
                            if (weighted) {
                                dtype::add_weighted(sum_[i], weights[ahead], quads[ahead][i]);
                            } else {
                                dtype::add(sum_[i], quads[ahead][i]);
                            }
                        }
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void store(Quad *row) const {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first_ + i * WARP < end_) {
                ptx::store_quad(row + first_ + i * WARP, dtype::Element::encode(sum_[i]));
            }
        }
    }

  private:
    u32 first_;
    u32 end_;
    u32 quads_;
    float sum_[DEPTH][dtype::Element::VALUES];
};

} // namespace rows
