// How one rank waits for a word of another: the device's twin of the host's `signal::wait`.
//
// A wait looks at four things, in the order that decides when several hold: the fault that its rank
// holds or that a peer has left it, the awaited word, the host's wish to end, and the deadline. It
// never sleeps on a doorbell as the host does, and rings none: every rank of a group runs on the same
// backend, and a spinning thread needs no waking.
#pragma once

#include "ptx.cuh"

namespace wait {

constexpr u32 PHASES = 8;

enum class Phase : u32 {
    Setup = 0,
    Dispatch = 1,
    Combine = 2,
    Acknowledge = 3,
    Agreement = 4,
    Growth = 5,
    Record = 6,
    Shutdown = 7,
};

enum class FaultKind : u32 {
    Timeout = 1,
    Aborted = 2,
    OutOfStep = 3,
    TooManyTokens = 4,
    Failed = 5,
    NoProgress = 6,
    Gone = 7,
};

// The abort word says that a rank is gone by this and its number.
constexpr u32 GONE = 2;

struct WaitParams {
    u64 control;
    u64 attention;
    u64 own;
    u32 rank;
    u32 world;
};
SAME_LAYOUT(WaitParams, 32, world, 28);

struct ControlBlock {
    u32 abort;
    u32 suspended;
    u64 fault;
    u32 deadline_ms[PHASES];
};
SAME_LAYOUT(ControlBlock, 48, deadline_ms, 16);

struct AttentionBlock {
    u64 poison;
    u32 doorbell;
    u32 sleepers;
};
SAME_LAYOUT(AttentionBlock, 16, sleepers, 12);

// The word of a fault; never zero, since zero says that there is none.
__device__ __forceinline__ u64 fault_word(FaultKind kind, Phase phase, u32 culprit) {
    return (u64(kind) << 40) | (u64(phase) << 32) | culprit;
}

// The control block lies in host memory: a look at it crosses the bus, so that a spinning wait
// affords one only every so often, and one that finds its word at once affords none. The awaited word
// and the poison lie on this device; a fault of this rank's own is therefore left in its own poison
// word too, where its later waits find it.
// Thousands of warps may wait at once, so that these looks must be rare: some hundred microseconds apart.
constexpr u32 LOOKS_BETWEEN_CONTROL = 512;
// The same for waits of which there are very many, for what comes together with something for which another
// thread of the block waits.
constexpr u32 LOOKS_OF_MANY = 64 * LOOKS_BETWEEN_CONTROL;
// A fault that is there on this device is found sooner.
constexpr u32 LOOKS_BETWEEN_POISON = 32;

// How long a wait pauses after so many looks: a peer that is there soon is not slept through, and one that
// is not is not waited for at the cost of those who have something to do.
__device__ __forceinline__ void pause(u32 looks) {
    if (looks > 16) {
        ptx::sleep_ns(looks < 64 ? 32 : 500);
    }
}

class Waiter {
  public:
    __device__ __forceinline__ explicit Waiter(const WaitParams &params) : params_(params) {}

    // The fault that this rank must respect, or zero: the one it holds, the poison of a peer (which
    // it holds from then on), or what its host wants of it, which becomes a fault in `phase`: an end, or
    // that a peer is gone.
    __device__ __forceinline__ u64 fault(Phase phase) const {
        if (const u64 word = held()) {
            return word;
        }
        const u64 word = ptx::load_acquire_sys(&control()->fault);
        if (word == 0) {
            return aborted(phase);
        }
        // Where the threads of this device look.
        set_once(&own()->poison, word);
        return word;
    }

    // The fault that this rank holds as far as its device knows: zero if only its host knows of one,
    // which the next wait that is not satisfied at once, or `fault`, finds out. Costs no look across
    // the bus unless there is one.
    __device__ __forceinline__ u64 held() const {
        const u64 poison = ptx::load_acquire_sys(&own()->poison);
        return poison == 0 ? 0 : set_once(&control()->fault, poison);
    }

    // Whether `held` will say that there is a fault. Orders nothing, so that it delays nothing.
    __device__ __forceinline__ bool poisoned() const {
        return ptx::load_relaxed_sys(&own()->poison) != 0;
    }

    // The same word, for the beginning of an operation, of which nothing goes on before it is known: by an address
    // that is not looked up, and that elsewhere would be in the way.
    __device__ __forceinline__ u64 own_poison() const {
        return ptx::load_relaxed_sys(&at<const AttentionBlock>(params_.own)->poison);
    }

    // Waits until `word` holds `expected`, which `culprit` will store. Returns zero, or the fault
    // that ended the wait and that this rank and its peers hold from then on. The word may hold
    // `expected - 1` while it is waited for; any other value is a peer out of step. What the peer
    // wrote before it signalled is visible to this thread after the wait, and to its block after a
    // barrier that follows it.
    __device__ __forceinline__ u64 wait(Phase phase, u32 culprit, const u32 *word, u32 expected) const {
        u64 spent_ns = 0;
        return wait(phase, culprit, word, expected, spent_ns);
    }

    // The same on a clock that several waits of one phase share.
    __device__ __forceinline__ u64 wait(Phase phase, u32 culprit, const u32 *word, u32 expected,
                                        u64 &spent_ns) const {
        u64 last_ns = ptx::global_time_ns();
        bool counted = true;
        for (u32 look = 1;; ++look) {
            // As on the host, a fault that is there already wins over a signal that is there too.
            const bool fault_is_there = poisoned();
            const u32 found = ptx::load_acquire_sys(word);
            if (fault_is_there) {
                return held();
            }
            if (found == expected) {
                return 0;
            }
            if (look % LOOKS_BETWEEN_CONTROL == 0) {
                if (const u64 fault_held = fault(phase)) {
                    return fault_held;
                }
                // Epochs wrap, so there is no before and after: a peer is here or one round behind.
                if (found != expected - 1) {
                    return fail(FaultKind::OutOfStep, phase, culprit);
                }
                if (expired(phase, last_ns, counted, spent_ns)) {
                    return fail(FaultKind::Timeout, phase, culprit);
                }
            }
            pause(look);
        }
    }

    // Waits until `flag` holds `expected`, whatever it held before. Returns zero, or the fault that ended
    // the wait. Visibility is as for a word. Whoever waits for many flags looks at each first, and for a
    // fault only where it has to wait.
    __device__ __forceinline__ u64 wait_flag(Phase phase, u32 culprit, const u64 *flag,
                                             u64 expected) const {
        return wait_until(phase, culprit,
                          [&] { return ptx::load_acquire_sys(flag) == expected; });
    }

    // The same for a word that other blocks of this device store to.
    template <typename Word>
    __device__ __forceinline__ u64 wait_here(Phase phase, const Word *word, Word expected) const {
        return wait_until(phase, params_.rank,
                          [&] { return ptx::load_acquire_gpu(word) == expected; });
    }

    // Looks until `is_there` says so. Returns zero, or the fault that ended the wait. Deadline and host are
    // looked at every `between` looks.
    template <typename IsThere>
    __device__ __forceinline__ u64 wait_until(Phase phase, u32 culprit, IsThere is_there,
                                              u32 between = LOOKS_BETWEEN_CONTROL) const {
        if (is_there()) {
            return 0;
        }
        u64 spent_ns = 0;
        u64 last_ns = ptx::global_time_ns();
        bool counted = true;
        for (u32 look = 1;; ++look) {
            if (look % between == 0) {
                if (const u64 fault_held = fault(phase)) {
                    return fault_held;
                }
                if (expired(phase, last_ns, counted, spent_ns)) {
                    return fail(FaultKind::Timeout, phase, culprit);
                }
            } else if (look % LOOKS_BETWEEN_POISON == 0 && poisoned()) {
                return held();
            }
            pause(look);
            if (is_there()) {
                return 0;
            }
        }
    }

    // Stores `value` to a word in memory of a peer, or of this rank. Whoever finds it by a wait sees
    // all that this thread wrote or observed before; a block that signals for its other threads, or
    // for other blocks, has synchronised with them first.
    __device__ __forceinline__ void signal(u32 *word, u32 value) const {
        ptx::store_release_sys(word, value);
    }

    // Makes a fault that of this rank and of every peer that has none. Returns the fault that this
    // rank holds from now on, which is an earlier one if there was one.
    __device__ __forceinline__ u64 fail(FaultKind kind, Phase phase, u32 culprit) const {
        return spread(params_, fault_word(kind, phase, culprit));
    }

  private:
    __device__ __forceinline__ ControlBlock *control() const {
        return at<ControlBlock>(params_.control);
    }

    __device__ __forceinline__ static AttentionBlock *attention(const WaitParams &params, u32 rank) {
        return at<AttentionBlock>(at<const u64>(params.attention)[rank]);
    }

    __device__ __forceinline__ AttentionBlock *own() const {
        return attention(params_, params_.rank);
    }

    __device__ __forceinline__ u64 aborted(Phase phase) const {
        const u32 word = ptx::load_acquire_sys(&control()->abort);
        if (word == 0) {
            return 0;
        }
        return word < GONE ? fail(FaultKind::Aborted, phase, params_.rank)
                           : fail(FaultKind::Gone, phase, word - GONE);
    }

    // Counts the time since the last look unless deadlines were suspended at either end of it.
    __device__ __forceinline__ bool expired(Phase phase, u64 &last_ns, bool &counted,
                                            u64 &spent_ns) const {
        const u64 now_ns = ptx::global_time_ns();
        const bool counts = ptx::load_relaxed_sys(&control()->suspended) == 0;
        if (counted && counts) {
            spent_ns += now_ns - last_ns;
        }
        last_ns = now_ns;
        counted = counts;
        const u64 deadline_ms = ptx::load_relaxed_sys(&control()->deadline_ms[u32(phase)]);
        return counts && spent_ns >= deadline_ms * 1000000;
    }

    // Apart, since it runs at most once in the life of a group and every wait has several calls of it.
    // Its parameters go by value: a kernel whose waiter has no address needs no stack for it.
    __device__ __noinline__ static u64 spread(const WaitParams params, u64 word) {
        const u64 first = set_once(&at<ControlBlock>(params.control)->fault, word);
        // Also when another fault came first: whoever stored it may have adopted it from a peer that
        // reached only some of the ranks before it died.
        for (u32 rank = 0; rank < params.world; ++rank) {
            set_once(&attention(params, rank)->poison, first);
        }
        return first;
    }

    // Stores a value in a word that holds zero; returns what the word holds afterwards. The word may
    // lie in host memory, so this is a compare-exchange of system scope.
    __device__ __forceinline__ static u64 set_once(u64 *word, u64 value) {
        const u64 before = ptx::compare_exchange_sys(word, 0, value);
        return before == 0 ? value : before;
    }

    WaitParams params_;
};

} // namespace wait
