// A dispatch of few tokens, whose pieces carry their turn.
//
// With few tokens most of a dispatch is waiting: for counts, then for entries, then for rows, which have all come
// meanwhile. So each warp of the blocks that neither list nor keep the books knows from its number alone which pieces
// it sends and which it brings to their rows: piece by piece the first item of every source, then the second, and so
// on. It looks for the entries of the first while counts are on their way, of which it needs whether there is such an
// item, and where its rows are. Where one source has fewer items than another, some numbers are nobody's.
#pragma once

#include "push_incoming.cuh"
#include "push_places.cuh"
#include "push_send.cuh"

namespace dispatch {

class Few {
  public:
    __device__ __forceinline__ explicit Few(const Context &c)
        : c_(c), team_(items::Team::of_blocks(c.p.listers + 1, gridDim.x - c.p.listers - 1)) {}

    __device__ __forceinline__ void send() const {
        const Sending sending(c_);
        const u32 pieces = c_.g().row_pieces;
        for (u32 unit = team_.warp; unit < c_.tokens * pieces; unit += team_.warps) {
            sending.send_stamped(unit / pieces, unit % pieces);
        }
    }

    __device__ __forceinline__ void receive() const {
        const bool books = c_.keeps_books();
        const Placing placing(c_);
        Numbers numbers(c_.g(), team_);
        Incoming incoming(c_, numbers.place(c_.g()));
        if (c_.g().flat != 0 && !books) {
            if (!receive_flat(numbers, incoming)) {
                return;
            }
            // Nobody looks any more at what this changes.
            __syncthreads();
        }
        if (!placing.run([&] { incoming.look(); }) || books) {
            return;
        }
        // Padding is cleared while the first piece is on its way.
        const bool comes = exists(incoming.place());
        if (comes && !incoming.find()) {
            return;
        }
        placing.clear_padding(team_);
        receive_from(comes, numbers, incoming);
    }

  private:
    // The numbers of a warp as places of pieces: number by number a piece, a source, a position.
    class Numbers {
      public:
        __device__ __forceinline__ Numbers(const Geometry &g, const items::Team &team)
            : width_(g.world * g.row_pieces), position_(team.warp / width_), within_(team.warp % width_),
              step_position_(team.warps / width_), step_within_(team.warps % width_) {}

        __device__ __forceinline__ Incoming::Place place(const Geometry &g) const {
            return Incoming::Place{nth_peer(g, within_ / g.row_pieces), position_, within_ % g.row_pieces};
        }
        __device__ __forceinline__ u32 position() const { return position_; }
        __device__ __forceinline__ void step() {
            position_ += step_position_;
            within_ += step_within_;
            if (within_ >= width_) {
                within_ -= width_;
                ++position_;
            }
        }

      private:
        u32 width_;
        u32 position_;
        u32 within_;
        u32 step_position_;
        u32 step_within_;
    };

    // In the flat layout a row has the place of its item among those of all sources, for which two numbers of each
    // source are enough. Where all rows fit, warps receive by themselves: one of each block waits for those numbers,
    // so that not all look at the same words, and the others for entries meanwhile. Whether something is left.
    __device__ __forceinline__ bool receive_flat(Numbers &numbers, Incoming &incoming) const {
        const Placing placing(c_);
        if (threadIdx.x >= THREADS - WARP) {
            placing.tell_block();
        }
        bool failed = false;
        if (!incoming.is_listed()) {
            const auto is_known = [&] {
                incoming.look();
                return incoming.is_listed() || Placing::told_block() != Told::NOTHING;
            };
            failed = c_.waiter.wait_until(wait::Phase::Dispatch, incoming.place().source, is_known,
                                          wait::LOOKS_OF_MANY) != 0;
        }
        // There is an item where there is an entry of this turn.
        const bool found = __all_sync(WHOLE, !failed && incoming.is_listed()) && incoming.find();
        if (__any_sync(WHOLE, failed) || Placing::await_told() == Told::FAILED) {
            return false;
        }
        if (round_up(shared.items[c_.g().world], c_.g().alignment) > c_.capacity) {
            return true;
        }
        const bool comes = exists(incoming.place());
        if (!comes || found || incoming.find()) {
            receive_from(comes, numbers, incoming);
        }
        return false;
    }

    // Whether the window takes the item. From here on counts are known.
    __device__ __forceinline__ bool exists(const Incoming::Place &place) const {
        return place.position < Placing::items_of(place.source);
    }

    __device__ __forceinline__ bool store(Incoming &incoming) const {
        const u32 source = incoming.place().source;
        return incoming.store(shared.items[source], shared.pairs[source],
                              [&](u32 slot) { return Places(c_.g()).first(source, slot); });
    }

    // The pieces from this one on, which was found if it `comes`. The entries of the next are on their way while one
    // is waited for.
    __device__ __forceinline__ void receive_from(bool comes, Numbers &numbers, Incoming &incoming) const {
        const u32 items = scan::lane() < c_.g().world ? Placing::items_of(scan::lane()) : 0;
        const u32 most = __reduce_max_sync(WHOLE, items);
        for (;;) {
            numbers.step();
            const bool more = numbers.position() < most;
            Incoming::Entries next{numbers.place(c_.g()), {}, {}};
            const bool next_comes = more && exists(next.place);
            if (next_comes) {
                next.look(c_);
            }
            if ((comes && !store(incoming)) || !more) {
                return;
            }
            comes = next_comes;
            incoming.turn_to(next);
            if (comes && !incoming.find()) {
                return;
            }
        }
    }

    const Context &c_;
    items::Team team_;
};

} // namespace dispatch
