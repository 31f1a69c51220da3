#include "push_few.cuh"
#include "push_lists.cuh"
#include "push_places.cuh"
#include "push_receive.cuh"
#include "push_send.cuh"

// A whole dispatch whose rows are pushed.
//
// The first blocks build the lists, tell every rank how much there is for it, and write each list to the
// rank that it is for; the next block keeps the books. Those behind it send: every token goes once to each
// other rank of its experts, to a place that follows from its number. All others, and these once they are
// done, find from what every rank tells where each row belongs, and bring the rows there: their own tokens
// from where the caller left them, those of other ranks as they come. Nobody who sends waits for
// another rank. Of few tokens all blocks but the first send and receive, and those do nothing else.
//
// Compiled for blocks of 512 threads, one on a multiprocessor.

namespace dispatch {

// Whether there is anything to be done: no fault, and no more tokens than there is memory for. Every thread of the
// block calls it.
__device__ __forceinline__ bool may_run(const Context &c, u64 poison) {
    if (faulted(c.waiter, poison)) {
        return false;
    }
    if (c.tokens > c.p.num_tokens) {
        if (c.keeps_books() && threadIdx.x == 0) {
            c.waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Dispatch, c.g().rank);
        }
        return false;
    }
    return true;
}

// What a block does that does not list, or is done with it. The two halves of a dispatch may come as two operations,
// so that something else has room between them: the first has the blocks that list and send, the second those that
// receive.
__device__ __forceinline__ void run(const Context &c, bool sends, bool receives) {
    const bool books = c.keeps_books();
    if (sends && books) {
        Placing(c).say_here();
    }
    if constexpr (stamped::ROWS) {
        const Few few(c);
        if (sends && !books && !c.drained) {
            few.send();
        }
        if (receives) {
            few.receive();
        }
    } else {
        const bool is_sender = blockIdx.x > c.p.listers && blockIdx.x <= c.p.listers + c.p.senders;
        if (sends && is_sender && !c.drained) {
            Sending(c).run();
        }
        __syncthreads();
        const Placing placing(c);
        if (receives && placing.run([] {})) {
            placing.clear_padding(items::Team::of_blocks(0, gridDim.x));
            Receiving(c).run();
        }
    }
}

// Clears where stamped rows land. One block calls this, when all have received.
__device__ __forceinline__ void clear_landed(const Context &c) {
    const Geometry &g = c.g();
    const u32 rows = (g.world - 1) * g.max_tokens;
    stamped::clear(c.blocks.own<u8>(g.lane.pushed_rows), rows, g.row_pieces);
    stamped::clear(c.blocks.own<u8>(g.lane.pushed_scales), rows,
                   stamped::pieces_of(g.scale_bytes / sizeof(Quad)));
}

} // namespace dispatch

extern "C" __global__ void __launch_bounds__(dispatch::THREADS, 1)
    push_dispatch(const __grid_constant__ PushDispatchParams p) {
    const wait::Waiter waiter(p.wait);
    const u64 poison = waiter.own_poison();
    const Blocks blocks(p);
    LaneState *lane = at<LaneState>(p.lane.state);
    const StepView state(p.state);
    const dispatch::Context c{p,
                              waiter,
                              blocks,
                              p.num_tokens_word != 0 ? *at<const u32>(p.num_tokens_word) : p.num_tokens,
                              lane->epoch + 1,
                              lane->turn + 1,
                              state.step(),
                              state.drained(),
                              min(*at<const u32>(p.capacity), p.row_limit)};
    const bool sends = (p.halves & HALF_SEND) != 0;
    const bool receives = (p.halves & HALF_RECEIVE) != 0;
    const bool lists = sends && blockIdx.x < p.listers;
    Beginning beginning;
    dispatch::Placing::begin();
    bool runs;
    if (lists) {
        const dispatch::Listing listing(c);
        runs = dispatch::may_run(c, poison);
        if (runs) {
            listing.run();
        }
        // Others wait for what it lists.
        beginning.count(&lane->begun);
    } else {
        runs = dispatch::may_run(c, poison);
        beginning.count(&lane->begun);
    }
    if (runs && !(stamped::ROWS && lists)) {
        dispatch::run(c, sends, receives);
    } else if (!runs && receives && c.keeps_books()) {
        windows::leave_empty(p);
    }
    if (receives && stamped::is_cleared_after(c.turn) && last_to_arrive(lane)) {
        dispatch::clear_landed(c);
    }
    if (beginning.is_last()) {
        lane->begun = 0;
        if (receives) {
            lane->epoch = c.epoch;
            lane->turn = c.turn;
            // Of the turn before, which was the last to use them.
            lane->counters[(c.turn + 1) % 2] = TurnCounters{};
        }
    }
}
