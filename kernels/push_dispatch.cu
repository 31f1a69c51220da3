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
// another rank.
//
// Compiled for blocks of 512 threads, one on a multiprocessor.

// The two halves may come as two operations, so that something else has room between them: the first has
// the blocks that list and send, the second those that receive.
__device__ __forceinline__ void send(const dispatch::Context &c) {
    if (blockIdx.x < c.p.listers) {
        dispatch::Listing(c).run();
    } else if (c.keeps_books()) {
        dispatch::Placing(c).say_here();
    } else if (blockIdx.x <= c.p.listers + c.p.senders &&
               !StepView(c.p.state).drained()) {
        dispatch::Sending(c).run();
    }
    __syncthreads();
}

__device__ __forceinline__ void receive(const dispatch::Context &c) {
    const dispatch::Placing placing(c);
    if (!placing.run()) {
        if (c.keeps_books()) {
            windows::leave_empty(c.p);
        }
        return;
    }
    const dispatch::Receiving receiving(c);
    receiving.clear_padding();
    // Lists are there when their entries are. That every rank is at this dispatch one block makes sure of.
    if (!c.keeps_books() || placing.ranks_here()) {
        receiving.run();
    }
}

extern "C" __global__ void __launch_bounds__(dispatch::THREADS, 1)
    push_dispatch(const __grid_constant__ PushDispatchParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    LaneState *lane = at<LaneState>(p.lane.state);
    const u32 given = p.num_tokens_word != 0 ? *at<const u32>(p.num_tokens_word) : p.num_tokens;
    const dispatch::Context context{p,
                                    waiter,
                                    blocks,
                                    given,
                                    lane->epoch + 1,
                                    lane->turn + 1,
                                    StepView(p.state).step(),
                                    min(*at<const u32>(p.capacity), p.row_limit)};
    if (faulted(waiter)) {
        if (context.keeps_books()) {
            windows::leave_empty(p);
        }
    } else {
        if (given <= p.num_tokens) {
            if ((p.halves & HALF_SEND) != 0) {
                send(context);
            }
            if ((p.halves & HALF_RECEIVE) != 0) {
                receive(context);
            }
        } else if (context.keeps_books()) {
            if (threadIdx.x == 0) {
                waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Dispatch, p.geometry.rank);
            }
            windows::leave_empty(p);
        }
    }
    const bool receives = (p.halves & HALF_RECEIVE) != 0;
    const bool clears = receives && stamped::is_cleared_after(context.turn);
    const bool last = clears ? last_to_arrive(lane) : last_to_leave(lane);
    if (last && clears) {
        dispatch::Receiving(context).clear_landed();
    }
    if (last && threadIdx.x == 0) {
        if (receives) {
            ++lane->epoch;
            ++lane->turn;
        }
        lane->counted = lane->listed = lane->sent = lane->taken = 0;
    }
}
