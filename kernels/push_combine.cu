#include "fold.cuh"
#include "push.cuh"

// A whole combine after a dispatch that pushed.
//
// The first blocks push: for each item of another rank the weighted sum of its rows, piece by piece, into
// the owner's landing slot, with a flag behind it. All others, and these once they are done, add up this
// rank's own tokens: the partial sum of its own experts straight from their rows, those of other ranks as
// their flags come. Every rank is told at once how many of its items will be processed, since that has
// been known since the dispatch. Nobody who pushes waits for another rank.
//
// Compiled for blocks of 512 threads, one on a multiprocessor.

constexpr u32 THREADS = 512;
// Quads of a lane for each row in flight, of which there are several.
constexpr u32 DEPTH = 2;
// Rows in flight. For Blackwell the compiler keeps more at hand, and would spill with four.
#if __CUDA_ARCH__ >= 1000
constexpr u32 AHEAD = 2;
#else
constexpr u32 AHEAD = 4;
#endif
using Sum = rows::Sum<DEPTH, AHEAD>;
// Ranks of a group that pushes.
constexpr u32 MOST_RANKS = 32;

// For each rank, how many of this rank's items it processes.
__shared__ u32 prefix[MOST_RANKS];

struct Combine {
    const PushCombineParams &p;
    const wait::Waiter &waiter;
    const Blocks &blocks;
    u64 turn;
    u32 epoch;
    u32 step;
    // Items that the window took, and tokens of this rank.
    u32 end;
    u32 tokens;

    __device__ __forceinline__ const Geometry &g() const { return p.geometry; }
    __device__ __forceinline__ LaneState *lane() const { return at<LaneState>(p.lane.state); }

    // The next number that `counter` gives out, the same in every lane.
    static __device__ __forceinline__ u32 next(u32 *counter) {
        const u32 number = scan::lane() == 0 ? atomicAdd(counter, 1) : 0;
        return __shfl_sync(scan::WHOLE, number, 0);
    }

    // Tells every rank how many of its items will be processed.
    __device__ __forceinline__ void announce() const {
        const Geometry &geometry = g();
        const StepView state(p.state);
        const u32 *source_items = at<const u32>(p.handle.source_items);
        for (u32 n = threadIdx.x; n < geometry.world; n += THREADS) {
            const u32 to = nth_peer(geometry, n);
            const u32 first = source_items[to];
            CombineHeader header{};
            header.step = step;
            header.ordinal = p.ordinal;
            header.prefix = min(max(end, first), source_items[to + 1]) - first;
            header.required = state.required();
            header.first_over = state.first_over();
            blocks.of<CombineHeader>(to, geometry.lane.combine_headers)[geometry.rank] = header;
            waiter.signal(blocks.of<u32>(to, geometry.lane.combine_words) + geometry.rank, epoch);
        }
    }

    // The rows of an item: one in each of the lanes in `lanes`.
    struct Rows {
        u32 row;
        float weight;
        u32 lanes;
    };

    // Those of the pairs from `begin` on. In the flat layout all pairs of an item share one row, which its
    // experts made together.
    __device__ __forceinline__ Rows rows_of(u32 begin, u32 pairs) const {
        const bool mine = scan::lane() < (g().flat == 0 ? pairs : min(pairs, 1u));
        const RowRef pair =
            mine ? at<const RowRef>(p.handle.pairs)[begin + scan::lane()] : RowRef{};
        return Rows{pair.row, pair.weight, __ballot_sync(scan::WHOLE, mine)};
    }

    __device__ __forceinline__ void add_rows(Sum &sum, const Rows &rows) const {
        sum.add(p.expert_rows, rows.row, rows.weight, p.weighted != 0, rows.lanes);
    }

    // One piece of the partial sum of an item of another rank.
    __device__ __forceinline__ void push_piece(u32 arrival, u32 number) const {
        const Geometry &geometry = g();
        const u32 quads = geometry.sum_bytes / sizeof(Quad);
        const WindowItem item = at<const WindowItem>(p.handle.items)[arrival];
        const push::Piece piece = push::piece_of(quads, number, geometry.sum_pieces);
        const u64 landing = u64(blocks.of<u8>(item.source, geometry.lane.landing));
        const Rows rows = rows_of(item.begin, item.rows);
#pragma unroll 1
        for (u32 begin = piece.begin; begin < piece.end; begin += DEPTH * scan::WARP) {
            Sum sum(begin, piece.end, quads);
            add_rows(sum, rows);
            sum.store(rows::row_of(landing, item.slot, quads));
        }
        u64 *flag = push::returned(blocks, geometry, item.source, item.slot, number);
        push::raise(scan::lane() == 0 ? flag : nullptr, turn);
    }

    // Items of other ranks, of each in turn.
    __device__ __forceinline__ void push_all() const {
        const Geometry &geometry = g();
        const u32 *source_items = at<const u32>(p.handle.source_items);
        u32 most = 0;
        for (u32 n = 0; n + 1 < geometry.world; ++n) {
            const u32 source = nth_peer(geometry, n);
            const u32 first = min(source_items[source], end);
            most = max(most, min(source_items[source + 1], end) - first);
        }
        const u32 others = max(geometry.world - 1, 1u);
        const u32 pieces = geometry.sum_pieces;
        const u32 units = most * others * pieces;
        const u32 warps = p.senders * (THREADS / scan::WARP);
        for (u32 unit = threadIdx.x / scan::WARP * p.senders + blockIdx.x; unit < units;
             unit += warps) {
            const u32 source = nth_peer(geometry, unit / pieces % others);
            const u32 arrival = source_items[source] + unit / pieces / others;
            if (arrival < min(source_items[source + 1], end)) {
                push_piece(arrival, unit % pieces);
            }
        }
    }

    // Waits for every rank's word, and learns how far each will go. Every thread of the block calls it.
    __device__ __forceinline__ bool acquire() const {
        using wait::Phase;
        const Geometry &geometry = g();
        const u32 *words = blocks.own<u32>(geometry.lane.combine_words);
        const CombineHeader *headers = blocks.own<CombineHeader>(geometry.lane.combine_headers);
        bool failed = false;
        bool elsewhere = false;
        for (u32 peer = threadIdx.x; peer < geometry.world; peer += THREADS) {
            failed |= waiter.wait(Phase::Combine, peer, words + peer, epoch) != 0;
            const CombineHeader header = headers[peer];
            elsewhere |= header.step != step || header.ordinal != p.ordinal;
            prefix[peer] = header.prefix;
            if (blockIdx.x == 0 && !failed && !elsewhere) {
                fold_header(p.peer_required, StepView(p.state), peer, header);
            }
        }
        return !__syncthreads_or(failed) &&
               (!__syncthreads_or(elsewhere) || all_here(waiter, Phase::Combine, headers,
                                                         geometry.world, step, p.ordinal, NONE));
    }

    // One piece of the sum of a token; whether that could be done.
    __device__ __forceinline__ bool add_up(u32 token, u32 number) const {
        const Geometry &geometry = g();
        const u32 quads = geometry.sum_bytes / sizeof(Quad);
        // Behind the last rank that the token went to there is none.
        Destination from{NONE, NONE};
        if (scan::lane() < geometry.fanout) {
            from = at<const Destination>(
                p.handle.destinations)[u64(token) * geometry.fanout + scan::lane()];
        }
        const bool comes = from.rank != NONE && from.position < prefix[from.rank];
        const u32 lanes = __ballot_sync(scan::WHOLE, comes);
        const u32 own = __ballot_sync(scan::WHOLE, comes && from.rank == geometry.rank);
        WindowItem item{};
        if (own != 0) {
            const u32 position = __shfl_sync(scan::WHOLE, from.position, __ffs(own) - 1);
            const u32 first = at<const u32>(p.handle.source_items)[geometry.rank];
            item = at<const WindowItem>(p.handle.items)[first + position];
        }
        const u32 slot = token * geometry.fanout + scan::lane();
        const bool awaits = comes && from.rank != geometry.rank;
        const push::Piece piece = push::piece_of(quads, number, geometry.sum_pieces);
        const u64 landing = u64(blocks.own<u8>(geometry.lane.landing));
        const Rows rows = rows_of(item.begin, item.rows);
#pragma unroll 1
        for (u32 begin = piece.begin; begin < piece.end; begin += DEPTH * scan::WARP) {
            Sum partial(begin, piece.end, quads);
            add_rows(partial, rows);
            const auto own_part = partial.rounded();
            // Those of other ranks have a flag each, which a lane each waits for.
            if (begin == piece.begin && !all_returned(awaits, from.rank, slot, number)) {
                return false;
            }
            // Ranks below this one, this one, those above.
            Sum sum(begin, piece.end, quads);
            sum.add(landing, slot, 1.0f, false, own == 0 ? lanes : lanes & (own - 1));
            if (own != 0) {
                sum.add(own_part);
                sum.add(landing, slot, 1.0f, false, lanes & ~(own - 1) & ~own);
            }
            sum.store(rows::row_of(p.output, token, quads));
        }
        return true;
    }

    // Waits for the flags of a token's landing slots, of which each lane that `awaits` has one.
    __device__ __forceinline__ bool all_returned(bool awaits, u32 from, u32 slot, u32 number) const {
        bool failed = false;
        if (awaits) {
            const u64 *flag = push::returned(blocks, g(), g().rank, slot, number);
            failed = waiter.wait_flag(wait::Phase::Combine, from, flag, turn) != 0;
        }
        failed = __any_sync(scan::WHOLE, failed);
        __syncwarp();
        return !failed;
    }

    __device__ __forceinline__ void add_all() const {
        const u32 pieces = g().sum_pieces;
        const u32 units = tokens * pieces;
        const u32 warps = gridDim.x * (THREADS / scan::WARP);
        const bool shares = units > warps;
        u32 unit = threadIdx.x / scan::WARP * gridDim.x + (gridDim.x - 1 - blockIdx.x);
        for (;;) {
            unit = shares ? next(&lane()->reduced) : unit;
            if (unit >= units || !add_up(unit / pieces, unit % pieces) || !shares) {
                return;
            }
        }
    }

    __device__ __forceinline__ void run() const {
        if (blockIdx.x == 0) {
            announce();
        }
        if (blockIdx.x < p.senders) {
            push_all();
        }
        if (acquire()) {
            add_all();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    push_combine(const __grid_constant__ PushCombineParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    LaneState *lane = at<LaneState>(p.lane.state);
    const WindowState *window = at<const WindowState>(p.handle.window);
    const Combine combine{p,           waiter,      blocks, lane->turn, lane->epoch,
                          StepView(p.state).step(), window->end, window->tokens};
    if (!faulted(waiter)) {
        combine.run();
    }
    if (last_to_leave(lane) && threadIdx.x == 0) {
        lane->reduced = 0;
    }
}
