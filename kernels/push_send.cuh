// A token's row to every other rank of its experts.
#pragma once

#include "push_context.cuh"

namespace dispatch {

// Every token goes to a place that follows from its number, so that nothing has to be known before.
class Sending {
  public:
    __device__ __forceinline__ explicit Sending(const Context &c) : c_(c) {}

    // Pieces of tokens as warps come free, the first tokens before the last. Where there is at most one for
    // each warp there is nothing to share out.
    __device__ __forceinline__ void run() {
        const u32 pieces = c_.g().row_pieces;
        const u32 units = c_.tokens * pieces;
        const bool shares = units > c_.p.senders * (THREADS / WARP);
        u32 unit = threadIdx.x / WARP * c_.p.senders + (blockIdx.x - c_.p.listers - 1);
        push::board.clear();
        for (;;) {
            unit = shares ? take_next(&c_.counters()->sent) : unit;
            if (unit >= units) {
                break;
            }
            send(unit / pieces, unit % pieces);
            if (!shares) {
                break;
            }
        }
        Raiser(Raise{c_}).finish(pending_);
    }

    // One piece of a token with its turn to every other rank of its experts, and the token's scales with the first.
    __device__ __forceinline__ void send_stamped(u32 token, u32 number) const {
        const Geometry &geometry = c_.g();
        const u32 row_quads = geometry.row_bytes / sizeof(Quad);
        const push::Piece piece = push::piece_of(row_quads, number, geometry.row_pieces);
        const stamped::Piece whole(piece.end - piece.begin);
        Quad quads[stamped::ROW_QUADS];
        whole.load(at<const Quad>(c_.p.tokens) + u64(token) * row_quads + piece.begin, quads);
        const u32 rank = goes_to(token);
        put(places(rank, geometry.lane.pushed_rows, token, push::landed_bytes(geometry.row_bytes)),
            number, whole, quads);
        const u32 scale_quads = geometry.scale_bytes / sizeof(Quad);
        const u32 scale_pieces = number == 0 ? stamped::pieces_of(scale_quads) : 0;
        for (u32 i = 0; i < scale_pieces; ++i) {
            const push::Piece of_scales = push::piece_of(scale_quads, i, scale_pieces);
            const stamped::Piece part(of_scales.end - of_scales.begin);
            part.load(at<const Quad>(c_.p.scales) + u64(token) * scale_quads + of_scales.begin, quads);
            put(places(rank, geometry.lane.pushed_scales, token,
                       push::landed_bytes(geometry.scale_bytes)),
                i, part, quads);
        }
    }

  private:
    // Raises the flags of a piece in the blocks of several ranks. A note is the number of the piece, and the
    // ranks, a bit each.
    struct Raise {
        const Context &c;
        __device__ __forceinline__ void operator()(u64 note) const {
            for (u32 ranks = u32(note >> 32); ranks != 0; ranks &= ranks - 1) {
                ptx::store_relaxed_sys(push::arrived(c.blocks, c.g(), __ffs(ranks) - 1, c.g().rank,
                                                     u32(note)),
                                       c.turn);
            }
        }
    };
    using Raiser = push::Raiser<Raise>;

    // The rank that the lane's choice of a token takes it to, in the first lane for each other rank.
    __device__ __forceinline__ u32 goes_to(u32 token) const {
        const Geometry &geometry = c_.g();
        const u32 choice = scan::lane();
        u32 rank = NONE;
        if (choice < geometry.top_k) {
            const u64 entry = u64(token) * geometry.top_k + choice;
            const i64 id = c_.p.id_bytes == 8 ? at<const i64>(c_.p.topk_ids)[entry]
                                           : i64(at<const i32>(c_.p.topk_ids)[entry]);
            if (id >= 0 && id < i64(geometry.experts)) {
                rank = at<const ExpertHomeEntry>(c_.p.homes)[id].rank;
            }
        }
        const bool first = u32(__ffs(__match_any_sync(WHOLE, rank))) == choice + 1;
        return first && rank != geometry.rank ? rank : NONE;
    }

    // The place of the lane's rank for a row of a token.
    __device__ __forceinline__ push::Targets places(u32 rank, u64 region, u32 token,
                                                    u32 row_bytes) const {
        push::Targets to{0, __ballot_sync(WHOLE, rank != NONE)};
        if (rank != NONE) {
            to.row = push::rows_in(c_.blocks, c_.g(), region, rank, c_.g().rank, row_bytes) +
                     u64(token) * row_bytes;
        }
        return to;
    }

    // One piece of a token to every other rank of its experts. Its flag is raised while the next piece is
    // on its way: whoever raises it at once waits for the link.
    __device__ __forceinline__ void send(u32 token, u32 number) {
        const Geometry &geometry = c_.g();
        const u32 row_bytes = geometry.row_bytes;
        const push::Piece piece =
            push::piece_of(row_bytes / sizeof(Quad), number, geometry.row_pieces);
        u32 rank = NONE;
        const u64 from = c_.p.tokens + u64(token) * row_bytes;
        const bool sent = push::move<DEPTH, push::Reading::FIRST>(from, piece, [&] {
            rank = goes_to(token);
            flush();
            return places(rank, geometry.lane.pushed_rows, token, row_bytes);
        });
        if (!sent) {
            return;
        }
        const u32 scale_bytes = geometry.scale_bytes;
        if (number == 0 && scale_bytes != 0) {
            const push::Piece whole{0, u32(scale_bytes / sizeof(Quad))};
            push::move<1>(c_.p.scales + u64(token) * scale_bytes, whole, [&] {
                return places(rank, geometry.lane.pushed_scales, token, scale_bytes);
            });
        }
        const u32 ranks = __reduce_or_sync(WHOLE, rank != NONE ? 1u << rank : 0);
        pending_ = u64(ranks) << 32 | (token * geometry.row_pieces + number);
    }

    // A piece of a row to where it lands on each rank.
    __device__ __forceinline__ void put(const push::Targets &to, u32 number,
                                        const stamped::Piece &piece,
                                        const Quad (&quads)[stamped::ROW_QUADS]) const {
        for (u32 left = to.lanes; left != 0; left &= left - 1) {
            const u64 row = u64(to.of(__ffs(left) - 1));
            piece.put(row + number * stamped::PIECE_BYTES, quads, c_.turn);
        }
    }

    // The flags of the last piece.
    __device__ __forceinline__ void flush() {
        if (pending_ != 0) {
            Raiser(Raise{c_}).post(pending_);
            pending_ = 0;
        }
    }

    const Context &c_;
    // The same in every lane.
    u64 pending_ = 0;
};

} // namespace dispatch
