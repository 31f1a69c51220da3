// Sums of rows that are streamed through shared memory.
#pragma once

#include "combine_units.cuh"
#include "feed.cuh"

namespace combine {

// Quads of a lane in each part of a row that is on its way.
constexpr u32 DEPTH = 4;
using Sum = rows::Sum<DEPTH>;
using Feed = rows::Feed<DEPTH>;

// Which part of a unit is asked for next: all rows and landing slots of as many quads as a part
// has, then those of the quads behind them. Landing slots are asked for once their flags were seen;
// if no unit LANDS, there are none.
template <bool LANDS>
class Cursor {
  public:
    __device__ __forceinline__ explicit Cursor(const Context &c)
        : c_(c), landing_(LANDS ? c.landing(c.g().rank) : 0) {}

    __device__ __forceinline__ void enter(const Unit &unit) {
        row_ = unit.row;
        slot_ = unit.slot;
        piece_ = unit.piece;
        offset_ = (unit.begin + scan::lane()) * u32(sizeof(Quad));
        left_ = i32(unit.end - unit.begin);
        all_rows_ = unit.rows;
        all_landed_ = LANDS ? unit.landed : 0;
        open_ = all_landed_ == 0;
        begin();
    }

    __device__ __forceinline__ bool at_end() const { return (rows_ | landed_) == 0; }
    __device__ __forceinline__ bool at_gate() const { return LANDS && rows_ == 0 && !open_; }
    __device__ __forceinline__ void open() { open_ = true; }
    template <typename Work>
    __device__ __forceinline__ bool ready(const Work &work) const {
        return work.ready(slot_, all_landed_, piece_);
    }

    __device__ __forceinline__ void ask(Feed &feed) {
        u64 from;
        if (!LANDS || rows_ != 0) {
            const u32 number = __shfl_sync(WHOLE, row_, __ffs(rows_) - 1);
            from = c_.p.expert_rows + u64(number) * c_.g().sum_bytes;
            rows_ &= rows_ - 1;
        } else {
            from = landing_ + u64(slot_ + __ffs(landed_) - 1) * c_.g().sum_bytes;
            landed_ &= landed_ - 1;
        }
        feed.ask(from + offset_, left_ - i32(scan::lane()));
        if (at_end()) {
            offset_ += Feed::PART_BYTES;
            left_ -= i32(DEPTH * WARP);
            begin();
        }
    }

  private:
    __device__ __forceinline__ void begin() {
        rows_ = left_ > 0 ? all_rows_ : 0;
        landed_ = left_ > 0 ? all_landed_ : 0;
    }

    const Context &c_;
    u64 landing_;
    u32 row_ = 0;
    u32 slot_ = 0;
    u32 piece_ = 0;
    // From the first byte of a row to this lane's next quad, and how many quads are left of the unit.
    u32 offset_ = 0;
    i32 left_ = 0;
    u32 all_rows_ = 0;
    u32 all_landed_ = 0;
    // What is left of those for the next quads.
    u32 rows_ = 0;
    u32 landed_ = 0;
    bool open_ = true;
};

struct Stream {
    const Context &c;
    // The block's dynamic shared memory.
    Quad *memory;

    // Does every unit that `work` has for this warp. While one is added up, parts of the next are on
    // their way.
    template <typename Work>
    __device__ __forceinline__ void run(Work work) const {
        Feed feed(memory);
        Unit now = work.next();
        Cursor<Work::ADDS_RANKS> cursor(c);
        bool entered = false;
        while (now.out != nullptr) {
            if (!entered) {
                cursor.enter(now);
            }
            // Whether the cursor is in the next unit already.
            entered = false;
            Unit then{};
            // At most one look at flags for each part, since it takes long.
            bool looks = true;
            const auto fill = [&] {
                while (!feed.full()) {
                    if (cursor.at_end()) {
                        if (entered || then.out == nullptr) {
                            return;
                        }
                        entered = true;
                        cursor.enter(then);
                    } else if (cursor.at_gate()) {
                        const bool there = looks && cursor.ready(work);
                        looks = false;
                        if (!there) {
                            return;
                        }
                        cursor.open();
                    } else {
                        cursor.ask(feed);
                    }
                }
            };
            fill();
            work.flush();
            then = work.next();
#pragma unroll 1
            for (u32 begin = now.begin; begin < now.end; begin += DEPTH * WARP) {
                looks = true;
                Sum sum = add_rows(feed, now, begin, fill);
                if (now.landed != 0) {
                    if (!entered && cursor.at_gate()) {
                        if (!work.await(now)) {
                            return;
                        }
                        cursor.open();
                    }
                    add_landed(feed, now, begin, sum, fill);
                } else if (Work::ADDS_RANKS) {
                    const auto own = sum.rounded();
                    sum = Sum(begin, now.end, c.quads());
                    sum.add(own);
                }
                sum.store(now.out);
            }
            work.finish(now);
            now = then;
        }
        work.end();
    }

  private:
    // The sum of the rows of a unit: DEPTH quads of each lane, from `begin` on.
    template <typename Fill>
    __device__ __forceinline__ Sum add_rows(Feed &feed, const Unit &unit, u32 begin,
                                            Fill fill) const {
        Sum sum(begin, unit.end, c.quads());
        for (u32 left = unit.rows; left != 0; left &= left - 1) {
            fill();
            Quad quads[DEPTH];
            feed.take(quads);
            const float weight = __shfl_sync(WHOLE, unit.weight, __ffs(left) - 1);
            sum.add(quads, weight);
        }
        return sum;
    }

    // Makes of this rank's sum that of all ranks: those below this one, this one, those above.
    template <typename Fill>
    __device__ __forceinline__ void add_landed(Feed &feed, const Unit &unit, u32 begin, Sum &sum,
                                               Fill fill) const {
        Quad quads[DEPTH];
        bool pending = unit.rows != 0;
        if (pending) {
            feed.keep(sum.rounded().quad);
        }
        sum = Sum(begin, unit.end, c.quads());
        for (u32 left = unit.landed; left != 0; left &= left - 1) {
            if (pending && (left & unit.below) == 0) {
                feed.kept(quads);
                sum.add(quads);
                pending = false;
            }
            fill();
            feed.take(quads);
            sum.add(quads);
        }
        if (pending) {
            feed.kept(quads);
            sum.add(quads);
        }
    }
};

} // namespace combine
