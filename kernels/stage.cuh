// Tokens to where peers read them.
#pragma once

#include "lane.cuh"
#include "rows.cuh"

namespace stage {

using scan::WARP;
using scan::WHOLE;

// Some blocks of a grid that share work: this one's place among them.
struct Team {
    u32 block;
    u32 blocks;
};

// Copies `bytes` bytes, a multiple of 16.
__device__ __forceinline__ void copy(const Team &team, void *to, u64 from, u64 bytes) {
    constexpr u32 DEPTH = 4;
    Quad *target = static_cast<Quad *>(to);
    const Quad *source = at<const Quad>(from);
    const u64 quads = bytes / sizeof(Quad);
    const u64 tile = u64(blockDim.x) * DEPTH;
    for (u64 first = team.block * tile; first < quads; first += team.blocks * tile) {
        Quad quad[DEPTH];
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            const u64 place = first + i * blockDim.x + threadIdx.x;
            if (place < quads) {
                quad[i] = ptx::load_once(source + place);
            }
        }
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            const u64 place = first + i * blockDim.x + threadIdx.x;
            if (place < quads) {
                ptx::store_quad(target + place, quad[i]);
            }
        }
    }
}

// Values that share one scale, and how many of them a lane has.
constexpr u32 BLOCK = 128;
constexpr u32 LANE_VALUES = BLOCK / WARP;
constexpr float LARGEST = 448.0f;

// Four values from the one at `first` on, or zeros behind the end of the row.
__device__ __forceinline__ void read(const Geometry &g, const u8 *row, u32 first,
                                     float (&values)[LANE_VALUES]) {
#pragma unroll
    for (u32 i = 0; i < LANE_VALUES; ++i) {
        values[i] = 0.0f;
        if (first + i < g.hidden) {
            if (g.dtype == dtype::FP32) {
                values[i] = reinterpret_cast<const float *>(row)[first + i];
            } else {
                const u32 half = reinterpret_cast<const u16 *>(row)[first + i];
                values[i] = g.dtype == dtype::BF16 ? __uint_as_float(half << 16)
                                                   : ptx::from_fp16(half);
            }
        }
    }
}

// Quantises tokens to e4m3 with a scale for each block of values. A scale is the largest magnitude of
// its block over 448, or 1 if that is zero or not finite. A warp makes one block.
__device__ __forceinline__ void quantize(const RouteParams &p, const Team &team, const Blocks &blocks,
                                         u32 tokens) {
    const Geometry &g = p.geometry;
    const u32 warps = blockDim.x / WARP;
    // Padding behind the scales of a row is zeroed, as if it belonged to blocks without values.
    const u32 entries = g.scale_bytes / sizeof(float);
    const u64 units = u64(tokens) * entries;
    u8 *staging = blocks.own<u8>(g.lane.staging);
    u8 *scales = blocks.own<u8>(g.lane.scales);
    for (u64 unit = u64(team.block) * warps + threadIdx.x / WARP; unit < units;
         unit += u64(team.blocks) * warps) {
        const u32 token = u32(unit / entries);
        const u32 entry = u32(unit % entries);
        const u32 first = entry * BLOCK + scan::lane() * LANE_VALUES;
        float values[LANE_VALUES];
        read(g, at<const u8>(p.tokens) + u64(token) * g.token_bytes, first, values);
        float largest = 0.0f;
#pragma unroll
        for (float value : values) {
            // A NaN is not the larger of two.
            largest = fmaxf(largest, fabsf(value));
        }
#pragma unroll
        for (u32 step = WARP / 2; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(WHOLE, largest, step));
        }
        float scale = __fdiv_rn(largest, LARGEST);
        scale = scale > 0.0f && scale < __uint_as_float(0x7f800000) ? scale : 1.0f;
        if (scan::lane() == 0) {
            reinterpret_cast<float *>(scales + u64(token) * g.scale_bytes)[entry] =
                entry * BLOCK < g.hidden ? scale : 0.0f;
        }
        if (first < g.hidden) {
#pragma unroll
            for (float &value : values) {
                value = __fdiv_rn(value, scale);
            }
            // Rows have a multiple of 16 values here, so all four belong to it.
            *reinterpret_cast<u32 *>(staging + u64(token) * g.row_bytes + first) =
                dtype::to_e4m3x4(values);
        }
    }
}

// Stages the tokens of a dispatch, unless the caller wrote them where they belong.
__device__ __forceinline__ void tokens(const RouteParams &p, const Team &team, const Blocks &blocks,
                                       u32 count) {
    const Geometry &g = p.geometry;
    if (g.quantize != 0) {
        quantize(p, team, blocks, count);
        return;
    }
    u8 *staging = blocks.own<u8>(g.lane.staging);
    if (p.tokens != u64(staging)) {
        copy(team, staging, p.tokens, u64(count) * g.row_bytes);
    }
    u8 *scales = blocks.own<u8>(g.lane.scales);
    if (g.scale_bytes != 0 && p.scales != u64(scales)) {
        copy(team, scales, p.scales, u64(count) * g.scale_bytes);
    }
}

} // namespace stage
