#include "account.cuh"
#include "lists.cuh"
#include "push.cuh"
#include "window.cuh"

// A whole dispatch whose rows are pushed.
//
// The first blocks build the lists and write each to the rank that it is for, the last keeps the books. The next send: every token
// goes once to each other rank of its experts, to a place that follows from its number, so that nothing
// has to be known before. All others, and these once they are done, wait for the lists of every rank,
// find from the counts where each row belongs, and bring the rows there: their own tokens from where the
// caller left them, those of other ranks as their flags come. Nobody who sends waits for another rank.
//
// Compiled for blocks of 512 threads, one on a multiprocessor.

constexpr u32 THREADS = 512;
// Quads of a lane in flight.
constexpr u32 DEPTH = 7;
// Ranks of a group that pushes.
constexpr u32 MOST_RANKS = 32;

using scan::WARP;
using scan::WHOLE;

// Tables of the lists, and afterwards the first row of each source's pairs for each expert, and behind
// them the end of each expert's rows.
extern __shared__ u32 tables[];

struct Shared {
    u32 items[MOST_RANKS + 1];
    u32 pairs[MOST_RANKS + 1];
    // Items that the window takes.
    u32 end;
    bool silent;
    bool last;
};
__shared__ Shared shared;

// The lists of a dispatch, each in the block of the rank that it is for.
class PeerLists {
  public:
    __device__ __forceinline__ PeerLists(const Geometry &g, const Blocks &blocks)
        : g_(g), blocks_(blocks) {}

    __device__ __forceinline__ Item *item(u32 rank, u32 position) const {
        return items::Lists::pushed_items(g_, blocks_, rank, g_.rank) + position;
    }
    __device__ __forceinline__ Pair *pair(u32 rank, u32 position, u32, u32 place) const {
        return items::Lists::pushed_pairs(g_, blocks_, rank, g_.rank) +
               u64(position) * items::pair_width(g_) + place;
    }

  private:
    const Geometry &g_;
    const Blocks &blocks_;
};

struct Dispatch {
    const PushDispatchParams &p;
    const wait::Waiter &waiter;
    const Blocks &blocks;
    u32 tokens;
    u32 epoch;
    u64 turn;
    u32 step;
    u32 capacity;

    __device__ __forceinline__ const Geometry &g() const { return p.geometry; }
    __device__ __forceinline__ LaneState *lane() const { return at<LaneState>(p.lane.state); }

    // Waits until `word`, which blocks of this device count up, has `value`; whether it got there.
    // Every thread of the block calls it.
    __device__ __forceinline__ bool await_blocks(const u32 *word, u32 value) const {
        const bool failed =
            threadIdx.x == 0 && waiter.wait_here(wait::Phase::Dispatch, word, value) != 0;
        return !__syncthreads_or(failed);
    }

    // Adds this block to those that `word` counts, behind all that it wrote. Every thread calls it;
    // whether it was the last of those that list.
    __device__ __forceinline__ bool arrive(u32 *word) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::fence_acq_rel_sys();
            shared.last = ptx::fetch_add_acq_rel_gpu(word, 1) + 1 == p.listers;
        }
        __syncthreads();
        return shared.last;
    }

    // Whether this dispatch sends nothing. The first block decides, since it may become so at any time.
    __device__ __forceinline__ void decide() const {
        // The last warp has no tokens of its own where there are few.
        if (blockIdx.x == 0 && threadIdx.x == THREADS - 1) {
            const StepView state(p.state);
            state.note_dispatch(p.ordinal);
            shared.silent = state.is_silent(p.ordinal, p.dependent != 0);
            if (p.listers > 1) {
                lane()->silent = shared.silent;
            }
            WindowState window{};
            window.tokens = tokens;
            *at<WindowState>(p.handle.window) = window;
        }
    }

    // This block's part of the lists.
    __device__ __forceinline__ void list() const {
        const Geometry &geometry = g();
        const u32 columns = geometry.world * (geometry.slots + 2);
        u32 *totals = tables;
        const lists::Tables counted(geometry, tables + columns,
                                    ptx::dynamic_shared_bytes() / sizeof(u32) - columns);
        const u32 warp = threadIdx.x / WARP;
        const bool mine = warp < counted.warps();
        const lists::Stretch stretch =
            lists::stretch_of(mine ? tokens : 0, blockIdx.x * counted.warps() + warp,
                              p.listers * counted.warps());
        const lists::Counts counts = counted.of_warp(lists::own_warp(counted));
        lists::Kept kept;
        decide();
        counted.clear();
        lists::count_all(p, stretch, counts, kept);
        __syncthreads();
        counted.sum([&](u32 column, u32 sum) { totals[column] = sum; });
        if (p.listers > 1 && !add_blocks(counted, totals)) {
            return;
        }
        if (!shared.silent) {
            lists::write_all(p, PeerLists(geometry, blocks), stretch, counts, kept);
        } else {
            for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < tokens; i += p.listers * THREADS) {
                at<u32>(p.handle.fanouts)[i] = 0;
            }
        }
        if (p.listers == 1 || arrive(&lane()->listed)) {
            announce(totals);
        }
    }

    // Exchanges the counts of this block for those of all blocks that list: what comes before it, and
    // the totals.
    __device__ __forceinline__ bool add_blocks(const lists::Tables &counted, u32 *totals) const {
        u32 *of_blocks = at<u32>(p.block_counts);
        const u32 columns = counted.columns();
        for (u32 i = threadIdx.x; i < columns; i += THREADS) {
            of_blocks[blockIdx.x * columns + i] = totals[i];
        }
        arrive(&lane()->counted);
        if (!await_blocks(&lane()->counted, p.listers)) {
            return false;
        }
        if (threadIdx.x == 0) {
            shared.silent = ptx::load_relaxed_sys(&lane()->silent) != 0;
        }
        counted.shift([&](u32 column) {
            u32 before = 0;
            u32 sum = 0;
#pragma unroll 4
            for (u32 block = 0; block < p.listers; ++block) {
                const u32 part = ptx::load_relaxed_sys(of_blocks + block * columns + column);
                before += block < blockIdx.x ? part : 0;
                sum += part;
            }
            totals[column] = sum;
            return before;
        });
        return true;
    }

    // Tells every rank, this one included, what is for it.
    __device__ __forceinline__ void announce(const u32 *totals) const {
        const Geometry &geometry = g();
        const u32 experts = geometry.world * geometry.slots;
        const u32 sends = shared.silent ? 0 : 1;
        __syncthreads();
        for (u32 to = threadIdx.x; to < geometry.world; to += THREADS) {
            DispatchHeader header{};
            header.step = step;
            header.ordinal = p.ordinal;
            header.items = sends * totals[experts + 2 * to];
            header.pairs = sends * totals[experts + 2 * to + 1];
            header.transfer = TRANSFER_PUSH;
            blocks.of<DispatchHeader>(to, geometry.lane.dispatch_headers)[geometry.rank] = header;
        }
        for (u32 i = threadIdx.x; i < experts; i += THREADS) {
            u32 *counts = blocks.of<u32>(i / geometry.slots, geometry.lane.counts) +
                          u64(geometry.rank) * geometry.slots;
            counts[i % geometry.slots] = sends * totals[i];
        }
        __syncthreads();
        for (u32 n = threadIdx.x; n < geometry.world; n += THREADS) {
            const u32 to = nth_peer(geometry, n);
            waiter.signal(blocks.of<u32>(to, geometry.lane.dispatch_words) + geometry.rank, epoch);
        }
    }

    // The rank that the lane's choice of a token takes it to, in the first lane for each other rank.
    __device__ __forceinline__ u32 goes_to(u32 token) const {
        const Geometry &geometry = g();
        const u32 choice = scan::lane();
        u32 rank = NONE;
        if (choice < geometry.top_k) {
            const u64 entry = u64(token) * geometry.top_k + choice;
            const i64 id = p.id_bytes == 8 ? at<const i64>(p.topk_ids)[entry]
                                           : i64(at<const i32>(p.topk_ids)[entry]);
            if (id >= 0 && id < i64(geometry.experts)) {
                rank = at<const ExpertHomeEntry>(p.homes)[id].rank;
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
            to.row = push::rows_in(blocks, g(), region, rank, g().rank, row_bytes) +
                     u64(token) * row_bytes;
        }
        return to;
    }

    // One piece of a token to every other rank of its experts.
    __device__ __forceinline__ void send(u32 token, u32 number) const {
        const Geometry &geometry = g();
        const u32 row_bytes = geometry.row_bytes;
        const push::Piece piece = push::piece_of(row_bytes / sizeof(Quad), number, geometry.row_pieces);
        u32 rank = NONE;
        const bool sent =
            push::move<DEPTH>(p.tokens + u64(token) * row_bytes, piece, [&] {
                rank = goes_to(token);
                return places(rank, geometry.lane.pushed_rows, token, row_bytes);
            });
        if (!sent) {
            return;
        }
        const u32 scale_bytes = geometry.scale_bytes;
        if (number == 0 && scale_bytes != 0) {
            const push::Piece whole{0, u32(scale_bytes / sizeof(Quad))};
            push::move<1>(p.scales + u64(token) * scale_bytes, whole, [&] {
                return places(rank, geometry.lane.pushed_scales, token, scale_bytes);
            });
        }
        u64 *flag = rank != NONE
                        ? push::arrived(blocks, geometry, rank, geometry.rank, token, number)
                        : nullptr;
        push::raise(flag, turn);
    }

    // This block's part of the tokens: the first of them before the last, over all blocks that send.
    __device__ __forceinline__ void send_all() const {
        const u32 block = blockIdx.x - p.listers;
        const u32 pieces = g().row_pieces;
        const u64 units = u64(tokens) * pieces;
        const u32 stride = p.senders * (THREADS / WARP);
        for (u64 unit = threadIdx.x / WARP * p.senders + block; unit < units; unit += stride) {
            send(u32(unit / pieces), u32(unit % pieces));
        }
    }

    // The block that fills the handle and the counters of the step. It neither lists nor, if it can be
    // helped, sends.
    __device__ __forceinline__ bool keeps_books() const { return blockIdx.x + 1 == gridDim.x; }

    // Waits for the lists of every rank, and finds where each row belongs; whether all came. Every
    // thread of the block calls it.
    __device__ __forceinline__ bool place() const {
        using wait::Phase;
        const Geometry &geometry = g();
        const DispatchHeader *headers = blocks.own<DispatchHeader>(geometry.lane.dispatch_headers);
        const u32 *words = blocks.own<u32>(geometry.lane.dispatch_words);
        const u32 *counts = blocks.own<u32>(geometry.lane.counts);
        const u32 columns = geometry.world * geometry.slots;
        // Every thread waits for those whose words it reads, so that nobody waits for another thread; one
        // for each source watches the deadline.
        bool failed = false;
        bool elsewhere = false;
        for (u32 i = threadIdx.x; i < max(columns, geometry.world); i += THREADS) {
            if (i < geometry.world) {
                failed |= waiter.wait(Phase::Dispatch, i, words + i, epoch) != 0;
                const DispatchHeader header = headers[i];
                shared.items[i] = header.items;
                shared.pairs[i] = header.pairs;
                elsewhere |= header.step != step || header.ordinal != p.ordinal ||
                             header.transfer != TRANSFER_PUSH;
            }
            if (i < columns) {
                const u32 source = i / geometry.slots;
                failed |= !waiter.follow(words + source, epoch);
                tables[i] = counts[i];
            }
        }
        if (__syncthreads_or(failed) || (__syncthreads_or(elsewhere) &&
                                         !all_here(waiter, Phase::Dispatch, headers, geometry.world,
                                                   step, p.ordinal, TRANSFER_PUSH))) {
            return false;
        }
        if (threadIdx.x == THREADS - 1) {
            u32 items = 0;
            u32 pairs = 0;
            for (u32 source = 0; source < geometry.world; ++source) {
                const u32 more_items = shared.items[source];
                const u32 more_pairs = shared.pairs[source];
                shared.items[source] = items;
                shared.pairs[source] = pairs;
                items += more_items;
                pairs += more_pairs;
            }
            shared.items[geometry.world] = items;
            shared.pairs[geometry.world] = pairs;
            shared.end = items;
        }
        u32 end = 0;
        for (u32 first = 0; first < geometry.slots; first += THREADS) {
            const u32 slot = first + threadIdx.x;
            u32 rows = 0;
            for (u32 source = 0; slot < geometry.slots && source < geometry.world; ++source) {
                u32 &entry = tables[source * geometry.slots + slot];
                const u32 more = entry;
                entry = rows;
                rows += more;
            }
            u32 more;
            const u32 before =
                end + scan::block_exclusive(round_up(rows, geometry.alignment), more);
            if (keeps_books() && slot < geometry.slots) {
                note_expert(slot, rows, before);
            }
            for (u32 source = 0; slot < geometry.slots && source < geometry.world; ++source) {
                tables[source * geometry.slots + slot] += before;
            }
            if (slot < geometry.slots) {
                tables[columns + slot] = before + rows;
            }
            end += more;
        }
        __syncthreads();
        const u32 required = geometry.flat != 0
                                 ? round_up(shared.items[geometry.world], geometry.alignment)
                                 : end;
        const bool fits = required <= capacity;
        if (keeps_books()) {
            keep_books(fits, required, end);
        }
        return fits || place_some();
    }

    // What the handle says of an expert whose `rows` rows lie from `first` on, where all fits. In the
    // flat layout rows do not lie by expert.
    __device__ __forceinline__ void note_expert(u32 slot, u32 rows, u32 first) const {
        const Geometry &geometry = g();
        for (u32 source = 0; source < geometry.world; ++source) {
            const u32 entry = source * geometry.slots + slot;
            at<u32>(p.handle.bases)[entry] = tables[entry];
        }
        at<u32>(p.handle.taken)[slot] = 0;
        if (slot < geometry.local_experts) {
            at<i32>(p.handle.tokens_per_expert)[slot] = i32(rows);
            at<i32>(p.handle.expert_offsets)[slot] = geometry.flat != 0 ? 0 : i32(first);
        }
    }

    // Fills the handle and the counters of the step. Where all fits there is little left to say; else,
    // or where an earlier dispatch turned out to be over budget, it is found out as for rows that are
    // pulled.
    __device__ __forceinline__ void keep_books(bool fits, u32 required, u32 end) const {
        const Geometry &geometry = g();
        const StepView state(p.state);
        if (threadIdx.x == 0) {
            shared.silent = state.is_silent(p.ordinal, p.dependent != 0);
        }
        __syncthreads();
        if (fits && !shared.silent) {
            for (u32 source = threadIdx.x; source <= geometry.world; source += THREADS) {
                at<u32>(p.handle.source_items)[source] = shared.items[source];
                at<u32>(p.handle.source_pairs)[source] = shared.pairs[source];
            }
            if (threadIdx.x == 0) {
                const u32 total = geometry.flat != 0 ? shared.items[geometry.world] : end;
                WindowState window{};
                window.tokens = tokens;
                window.items = window.end = shared.items[geometry.world];
                window.pairs = window.window_pairs = shared.pairs[geometry.world];
                window.required = required;
                window.capacity = capacity;
                window.windows = 1;
                *at<WindowState>(p.handle.window) = window;
                at<i32>(p.handle.expert_offsets)[geometry.local_experts] = i32(total);
                *at<i32>(p.handle.total) = i32(total);
                state.note_required(required);
                state.note_window(1, capacity);
                state.add_delivered(window.pairs);
                if (p.ordinal < p.max_dispatches) {
                    at<u32>(p.required_by_dispatch)[p.ordinal] = required;
                }
            }
        } else {
            account::take_stock(p, blocks);
            windows::advance(p, waiter, blocks);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::store_release_gpu(&lane()->placed, epoch);
        }
    }

    // The same where not all fits: the block that keeps the books finds out what does.
    __device__ __forceinline__ bool place_some() const {
        const Geometry &geometry = g();
        if (!await_blocks(&lane()->placed, epoch)) {
            return false;
        }
        if (threadIdx.x == 0) {
            shared.end = at<const WindowState>(p.handle.window)->end;
        }
        for (u32 i = threadIdx.x; i < geometry.world * geometry.slots; i += THREADS) {
            const u32 slot = i % geometry.slots;
            tables[i] = at<const u32>(p.handle.bases)[i] +
                        (slot < geometry.local_experts
                             ? u32(at<const i32>(p.handle.expert_offsets)[slot])
                             : 0);
        }
        __syncthreads();
        return true;
    }

    // Brings one piece of an item to the rows of its experts; whether that could be done.
    __device__ __forceinline__ bool receive(u32 source, u32 position, u32 number) const {
        const Geometry &geometry = g();
        const u32 arrival = shared.items[source] + position;
        const Item item =
            items::load(items::Lists::pushed_items(geometry, blocks, geometry.rank, source) + position);
        const u32 begin = shared.pairs[source] + item.pair_begin;
        const bool first_piece = number == 0;
        RowRef reference{};
        push::Targets rows{0, 0};
        // Read before the item says how many of them there are.
        Pair pair{};
        if (scan::lane() < items::pair_width(geometry)) {
            pair = items::load(items::Lists::pushed_pairs(geometry, blocks, geometry.rank, source) +
                               u64(position) * items::pair_width(geometry) + scan::lane());
        }
        if (scan::lane() < item.pairs) {
            const u32 row = geometry.flat != 0
                                ? arrival
                                : tables[source * geometry.slots + pair.slot] + pair.index;
            reference = RowRef{row, pair.weight, pair.choice, pair.slot};
            rows.row = p.rows + u64(row) * geometry.row_bytes;
            if (first_piece) {
                at<RowRef>(p.handle.pairs)[begin + scan::lane()] = reference;
                if (p.handle.row_weights != 0) {
                    items::annotate(geometry, p.handle, reference, scan::lane());
                }
            }
        }
        // In the flat layout all pairs of an item share one row.
        rows.lanes = geometry.flat != 0 ? 1 : __ballot_sync(WHOLE, scan::lane() < item.pairs);
        if (first_piece && scan::lane() == 0) {
            at<WindowItem>(p.handle.items)[arrival] =
                WindowItem{source, item.slot, begin, item.pairs};
        }
        const bool own = source == geometry.rank;
        if (!own) {
            const u64 *flag =
                push::arrived(blocks, geometry, geometry.rank, source, item.token, number);
            if (!push::await(waiter, wait::Phase::Dispatch, source, flag, turn)) {
                return false;
            }
        }
        const u32 row_bytes = geometry.row_bytes;
        const u64 from = own ? p.tokens
                             : push::rows_in(blocks, geometry, geometry.lane.pushed_rows,
                                             geometry.rank, source, row_bytes);
        const push::Piece piece =
            push::piece_of(row_bytes / sizeof(Quad), number, geometry.row_pieces);
        push::move<DEPTH>(from + u64(item.token) * row_bytes, piece, [&] { return rows; });
        const u32 scale_bytes = geometry.scale_bytes;
        if (first_piece && scale_bytes != 0) {
            const u64 scales = own ? p.scales
                                   : push::rows_in(blocks, geometry, geometry.lane.pushed_scales,
                                                   geometry.rank, source, scale_bytes);
            rows.row = p.received_scales + u64(reference.row) * scale_bytes;
            const push::Piece whole{0, u32(scale_bytes / sizeof(Quad))};
            push::move<1>(scales + u64(item.token) * scale_bytes, whole, [&] { return rows; });
        }
        if (first_piece && geometry.flat != 0 && p.handle.row_weights != 0) {
            items::annotate_rest(geometry, p.handle, arrival, item.pairs);
        }
        return true;
    }

    // Pieces of the window's items as warps come free: of every source in turn, in the order in which
    // each sends them.
    __device__ __forceinline__ void receive_all() const {
        const Geometry &geometry = g();
        u32 most = 0;
        for (u32 source = 0; source < geometry.world; ++source) {
            const u32 first = min(shared.items[source], shared.end);
            const u32 items = min(shared.items[source + 1], shared.end) - first;
            most = max(most, items);
        }
        const u32 pieces = geometry.row_pieces;
        const u32 units = most * geometry.world * pieces;
        // Where there is at most one for each warp there is nothing to share out. The block that keeps
        // the books gets none then, if there is another.
        const u32 workers = max(gridDim.x - 1, 1u);
        const bool shares = units > workers * (THREADS / WARP);
        u32 unit = keeps_books() && gridDim.x > 1
                       ? units
                       : threadIdx.x / WARP * workers + blockIdx.x;
        for (;;) {
            if (shares) {
                unit = scan::lane() == 0 ? atomicAdd(&lane()->taken, 1) : 0;
                unit = __shfl_sync(WHOLE, unit, 0);
            }
            if (unit >= units) {
                return;
            }
            const u32 source = nth_peer(geometry, unit / pieces % geometry.world);
            const u32 position = unit / pieces / geometry.world;
            const u32 end = min(shared.items[source + 1], shared.end);
            if (shared.items[source] + position < end &&
                !receive(source, position, unit % pieces)) {
                return;
            }
            if (!shares) {
                return;
            }
        }
    }

    __device__ __forceinline__ void clear_padding() const {
        const Geometry &geometry = g();
        if (geometry.flat != 0) {
            return;
        }
        const bool all = shared.end == shared.items[geometry.world];
        items::clear_padding(geometry, p.handle, p.rows, p.received_scales, [&](u32 expert) {
            if (!all) {
                return items::padding_of(p.handle, expert);
            }
            const u32 begin = tables[geometry.world * geometry.slots + expert];
            const u32 rows = begin - tables[expert];
            return items::Padding{begin, tables[expert] + round_up(rows, geometry.alignment)};
        });
    }

    __device__ __forceinline__ void run() const {
        if (blockIdx.x < p.listers) {
            list();
        } else if (blockIdx.x < p.listers + p.senders && !StepView(p.state).drained()) {
            send_all();
        }
        __syncthreads();
        if (!place()) {
            return;
        }
        // While rows of other ranks are on their way.
        clear_padding();
        receive_all();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    push_dispatch(const __grid_constant__ PushDispatchParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    LaneState *lane = at<LaneState>(p.lane.state);
    const u32 given = p.num_tokens_word != 0 ? *at<const u32>(p.num_tokens_word) : p.num_tokens;
    const u32 epoch = lane->epoch + 1;
    const u64 turn = lane->turn + 1;
    const u32 step = StepView(p.state).step();
    const u32 capacity = min(*at<const u32>(p.capacity), p.row_limit);
    if (!faulted(waiter)) {
        if (given <= p.num_tokens) {
            Dispatch{p, waiter, blocks, given, epoch, turn, step, capacity}.run();
        } else if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Dispatch, p.geometry.rank);
        }
    }
    if (last_to_leave(lane) && threadIdx.x == 0) {
        lane->epoch = epoch;
        lane->turn = turn;
        lane->counted = lane->listed = lane->taken = 0;
    }
}
