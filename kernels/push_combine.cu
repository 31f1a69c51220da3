#include "combine_stream.cuh"
#include "fold.cuh"

// A whole combine after a dispatch that pushed.
//
// The first blocks push: for each item of another rank the weighted sum of its rows, piece by piece, to the
// owner, stamped or with a flag behind it. All others, and these once they are done, add up this rank's own
// tokens: the partial sum of its own experts straight from their rows, those of other ranks as they come. Every
// rank is told at once how many of its items will be processed, since that has been known since the dispatch.
// Nobody who pushes waits for another rank.
//
// Compiled for blocks of 512 threads, one on a multiprocessor.

constexpr u32 THREADS = 512;
using combine::Unit;

// For each rank, how many of this rank's items it processes.
__shared__ u32 prefix[turns::MOST_RANKS];

extern __shared__ Quad parts[];

// Stamped pieces go through registers, several rows at a time: four where they are pushed, for which others
// wait. Where they are added up, and for Blackwell, for which the compiler keeps more at hand, four would not fit.
template <u32 AHEAD> using StampedSum = rows::Sum<stamped::ROW_QUADS, AHEAD>;
#if __CUDA_ARCH__ >= 1000
using PushedSum = StampedSum<2>;
#else
using PushedSum = StampedSum<4>;
#endif
using TokenSum = StampedSum<2>;

struct Combine {
    const combine::Context &c;
    u32 epoch;
    u32 step;
    combine::Share share;

    __device__ __forceinline__ const Geometry &g() const { return c.g(); }

    // Tells every rank how many of its items will be processed.
    __device__ __forceinline__ void announce() const {
        const StepView state(c.p.state);
        const u32 *source_items = at<const u32>(c.p.handle.source_items);
        for (u32 n = threadIdx.x; n < g().world; n += THREADS) {
            const u32 to = nth_peer(g(), n);
            const u32 first = source_items[to];
            CombineHeader header{};
            header.step = step;
            header.ordinal = c.p.ordinal;
            header.prefix = min(max(c.end, first), source_items[to + 1]) - first;
            header.required = state.required();
            header.first_over = state.first_over();
            c.blocks.of<CombineHeader>(to, g().lane.combine_headers)[g().rank] = header;
            stamped::store(prefix_of(to, g().rank),
                           stamped::Word{c.turn << stamped::TAG_BITS, header.prefix});
            c.waiter.signal(c.blocks.of<u32>(to, g().lane.combine_words) + g().rank, epoch);
        }
    }

    // What `source` says to `to`: how many of its items it processes.
    __device__ __forceinline__ stamped::Word *prefix_of(u32 to, u32 source) const {
        return c.blocks.of<stamped::Word>(to, g().lane.prefixes) + source;
    }

    // Learns how far every rank will go; whether all said so. Every thread of the block calls it. A rank that is
    // elsewhere says nothing here, which is for the block that looks at headers to find.
    __device__ __forceinline__ bool acquire() const {
        if (blockIdx.x == 0 && !fold_headers()) {
            return false;
        }
        bool failed = false;
        for (u32 peer = threadIdx.x; peer < g().world; peer += THREADS) {
            const stamped::Word *from = prefix_of(g().rank, peer);
            stamped::Word word;
            failed |= c.waiter.wait_until(wait::Phase::Combine, peer, [&] {
                word = stamped::load(from);
                return word.is_of(c.turn);
            }) != 0;
            prefix[peer] = u32(word.high);
        }
        return !__syncthreads_or(failed);
    }

    // Makes sure that every rank is at this combine, and adds what each says to the counters of the step.
    // One block does this for all, and every thread of it calls it.
    __device__ __forceinline__ bool fold_headers() const {
        using wait::Phase;
        const u32 *words = c.blocks.own<u32>(g().lane.combine_words);
        const CombineHeader *headers = c.blocks.own<CombineHeader>(g().lane.combine_headers);
        bool failed = false;
        bool elsewhere = false;
        for (u32 peer = threadIdx.x; peer < g().world; peer += THREADS) {
            failed |= c.waiter.wait(Phase::Combine, peer, words + peer, epoch) != 0;
            const CombineHeader header = headers[peer];
            elsewhere |= header.step != step || header.ordinal != c.p.ordinal;
            if (!failed && !elsewhere) {
                fold_header(c.p.peer_required, StepView(c.p.state), peer, header);
            }
        }
        return !__syncthreads_or(failed) &&
               (!__syncthreads_or(elsewhere) || all_here(c.waiter, Phase::Combine, headers,
                                                         g().world, step, c.p.ordinal, NONE));
    }

    // The sum of the rows of a unit that is a stamped piece.
    template <typename Sum>
    __device__ __forceinline__ Sum add_rows(const Unit &unit) const {
        Sum sum(unit.begin, unit.end, c.quads());
        sum.add(c.p.expert_rows, unit.row, unit.weight, true, unit.rows);
        return sum;
    }

    __device__ __forceinline__ void push_stamped() const {
        combine::Partials work(c);
        for (Unit unit = work.next(); unit.out != nullptr; unit = work.next()) {
            const stamped::Piece piece(unit.end - unit.begin);
            piece.put(c.stamped_sum(unit.rank, unit.slot, unit.piece), add_rows<PushedSum>(unit).rounded().quad,
                      c.turn);
        }
    }

    // Adds what lands in the slots of the lanes in `lanes`, which name the ranks that it comes from; whether it came.
    __device__ __forceinline__ bool add_landed(TokenSum &sum, const Unit &unit, const Destination &to,
                                               u32 lanes) const {
        const stamped::Piece piece(unit.end - unit.begin);
        for (; lanes != 0; lanes &= lanes - 1) {
            const u32 lane = __ffs(lanes) - 1;
            const u64 place = c.stamped_sum(g().rank, unit.slot + lane, unit.piece);
            const u32 from = __shfl_sync(scan::WHOLE, to.rank, lane);
            stamped::Piece::Found found = piece.look(place);
            if (!push::await_stamped(c.waiter, wait::Phase::Combine, from, piece, place, c.turn, found)) {
                return false;
            }
            Quad quads[stamped::ROW_QUADS];
            stamped::Piece::take(found, quads);
            sum.add(quads);
        }
        return true;
    }

    // This rank's own part of a warp's first sum is added up while what it has pushed, and the headers of other
    // ranks, are on their way.
    __device__ __forceinline__ void sum_stamped() const {
        combine::Sums work(c);
        Destination to;
        Unit unit = work.next_own(to);
        auto own = add_rows<TokenSum>(unit).rounded();
        if (!acquire()) {
            return;
        }
        while (unit.out != nullptr) {
            work.take_landed(unit, to);
            // Ranks below this one, this one, those above.
            TokenSum sum(unit.begin, unit.end, c.quads());
            if (!add_landed(sum, unit, to, unit.landed & unit.below)) {
                return;
            }
            if (unit.rows != 0) {
                sum.add(own);
            }
            if (!add_landed(sum, unit, to, unit.landed & ~unit.below)) {
                return;
            }
            sum.store(unit.out);
            unit = work.next_own(to);
            own = add_rows<TokenSum>(unit).rounded();
        }
    }

    __device__ __forceinline__ void run() const {
        // The two halves may come as two operations.
        const bool sends = (c.p.halves & HALF_SEND) != 0;
        const bool receives = (c.p.halves & HALF_RECEIVE) != 0;
        const bool pushes = sends && blockIdx.x < c.p.senders;
        if (sends && blockIdx.x == 0) {
            announce();
        }
        if (pushes) {
            combine::Partials::prepare(c, share);
        }
        if (stamped::ROWS) {
            if (pushes) {
                push_stamped();
            }
            if (receives) {
                sum_stamped();
            }
            return;
        }
        if (pushes) {
            combine::Stream{c, parts}.run(combine::Partials(c));
        }
        if (receives && acquire()) {
            combine::Stream{c, parts}.run(combine::Sums(c));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    push_combine(const __grid_constant__ PushCombineParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    LaneState *lane = at<LaneState>(p.lane.state);
    const WindowState *window = at<const WindowState>(p.handle.window);
    const combine::Context context{p, waiter, blocks, lane->turn, window->end, window->tokens, prefix};
    // On its way, as these are, while it is found out whether there is a fault.
    const u32 total = u32(*at<const i32>(p.handle.total));
    const combine::Share share = combine::Share::of_lane(p.geometry, p.handle.source_items);
    if (!faulted(waiter)) {
        // Which dispatch filled the handle last, replays decide.
        if (context.tokens <= p.num_tokens && total <= p.row_limit) {
            Combine{context, lane->epoch, StepView(p.state).step(), share}.run();
        } else if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Combine, p.geometry.rank);
        }
    }
    const bool clears = (p.halves & HALF_RECEIVE) != 0 && stamped::is_cleared_after(context.turn);
    const bool last = clears ? last_to_arrive(lane) : last_to_leave(lane);
    if (last && clears) {
        stamped::clear(blocks.own<u8>(p.geometry.lane.returned), p.geometry.max_tokens * p.geometry.fanout,
                       p.geometry.sum_pieces);
    }
    if (last && threadIdx.x == 0) {
        lane->pushed = lane->reduced = 0;
    }
}
