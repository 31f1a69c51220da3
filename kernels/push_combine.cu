#include "combine_few.cuh"
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

// For each rank, how many of this rank's items it processes.
__shared__ u32 prefix[turns::MOST_RANKS];

extern __shared__ Quad parts[];

struct Combine {
    const combine::Context &c;
    combine::Share share;

    __device__ __forceinline__ const Geometry &g() const { return c.g(); }

    __device__ __forceinline__ u32 epoch() const { return at<const LaneState>(c.p.lane.state)->epoch; }
    __device__ __forceinline__ u32 step() const { return StepView(c.p.state).step(); }

    // What this rank says of itself, asked for before it is known whether there is a fault.
    struct Said {
        u32 epoch;
        u32 step;
        u32 required;
        u32 first_over;
    };

    // Tells every rank how many of its items will be processed. One warp calls this: no more ranks push than it has
    // lanes.
    __device__ __forceinline__ void announce(const Said &said) const {
        if (scan::lane() >= g().world) {
            return;
        }
        const u32 to = nth_peer(g(), scan::lane());
        CombineHeader header{};
        header.step = said.step;
        header.ordinal = c.p.ordinal;
        header.prefix = min(max(c.end, share.begin), share.end) - share.begin;
        header.required = said.required;
        header.first_over = said.first_over;
        stamped::store(c.prefix_of(to, g().rank),
                       stamped::Word{c.turn << stamped::TAG_BITS, header.prefix});
        c.blocks.of<CombineHeader>(to, g().lane.combine_headers)[g().rank] = header;
        c.waiter.signal(c.blocks.of<u32>(to, g().lane.combine_words) + g().rank, said.epoch);
    }

    // Learns how far every rank will go; whether all said so. Every thread of the block calls it. A rank that is
    // elsewhere says nothing here, which is for the block that looks at headers to find.
    __device__ __forceinline__ bool acquire() const {
        if (blockIdx.x == 0 && !fold_headers()) {
            return false;
        }
        bool failed = false;
        for (u32 peer = threadIdx.x; peer < g().world; peer += THREADS) {
            const stamped::Word *from = c.prefix_of(g().rank, peer);
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
        const u32 epoch = this->epoch();
        const u32 step = this->step();
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

    __device__ __forceinline__ void run(const Said &said) const {
        // The two halves may come as two operations.
        const bool sends = (c.p.halves & HALF_SEND) != 0;
        const bool receives = (c.p.halves & HALF_RECEIVE) != 0;
        if (sends && blockIdx.x == 0 && threadIdx.x < scan::WARP) {
            announce(said);
        }
        if constexpr (stamped::ROWS) {
            const combine::Few few(c, share);
            if (sends && few.works()) {
                few.push();
            }
            if (receives && few.works()) {
                few.add();
            }
            if (receives && blockIdx.x == 0) {
                fold_headers();
            }
        } else {
            if (sends && blockIdx.x < c.p.senders) {
                combine::Partials::prepare(c, share);
                combine::Stream{c, parts}.run(combine::Partials(c));
            }
            if (receives && acquire()) {
                combine::Stream{c, parts}.run(combine::Sums(c));
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    push_combine(const __grid_constant__ PushCombineParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p);
    LaneState *lane = at<LaneState>(p.lane.state);
    const WindowState *window = at<const WindowState>(p.handle.window);
    const combine::Context context{p, waiter, blocks, lane->turn, window->end, window->tokens, prefix};
    // On its way, as these are, while it is found out whether there is a fault.
    const u32 total = u32(*at<const i32>(p.handle.total));
    const combine::Share share = combine::Share::of_lane(p.geometry, p.handle.source_items);
    const StepView state(p.state);
    const Combine::Said said{lane->epoch, state.step(), state.required(), state.first_over()};
    if (!faulted(waiter)) {
        // Which dispatch filled the handle last, replays decide.
        if (context.tokens <= p.num_tokens && total <= p.row_limit) {
            Combine{context, share}.run(said);
        } else if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Combine, p.geometry.rank);
        }
    }
    if ((p.halves & HALF_RECEIVE) != 0 && stamped::is_cleared_after(context.turn) && last_to_arrive(lane)) {
        stamped::clear(blocks.own<u8>(p.geometry.lane.returned), p.geometry.max_tokens * p.geometry.fanout,
                       p.geometry.sum_pieces);
    }
}
