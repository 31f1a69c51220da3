// Ordered accesses and the instructions that CUDA C++ has no name for.
//
// Scope: `gpu` orders among the threads of this device, `sys` also with other devices and the host.
// Words that a peer or the host touches are only ever accessed through the functions below, so that
// no access to them is a data race and none goes through the non-coherent path.
#pragma once

#include "types.cuh"

namespace ptx {

__device__ __forceinline__ u32 load_acquire_gpu(const u32 *word) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_acquire_gpu(const u64 *word) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_acquire_sys(const u32 *word) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_acquire_sys(const u64 *word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Atomic, but orders nothing.
__device__ __forceinline__ u32 load_relaxed_gpu(const u32 *word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed_sys(const u32 *word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_relaxed_sys(const u64 *word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_gpu(u64 *word, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(u32 *word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(u64 *word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(u32 *word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(u64 *word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Sixteen bytes at once: never some of them of one store, and some of another.
__device__ __forceinline__ void load_relaxed_sys(const void *from, u64 &low, u64 &high) {
    asm volatile("{\n"
                 ".reg .b128 both;\n"
                 "ld.relaxed.sys.global.b128 both, [%2];\n"
                 "mov.b128 {%0, %1}, both;\n"
                 "}"
                 : "=l"(low), "=l"(high)
                 : "l"(from)
                 : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(void *to, u64 low, u64 high) {
    asm volatile("{\n"
                 ".reg .b128 both;\n"
                 "mov.b128 both, {%1, %2};\n"
                 "st.relaxed.sys.global.b128 [%0], both;\n"
                 "}" ::"l"(to),
                 "l"(low), "l"(high)
                 : "memory");
}

// Returns what the word held before.
__device__ __forceinline__ u32 fetch_add_acq_rel_gpu(u32 *word, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

// Orders what comes before it only.
__device__ __forceinline__ u32 fetch_add_release_gpu(u32 *word, u32 value) {
    u32 before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

// Stores a value; returns what the word held before. For words of shared memory.
__device__ __forceinline__ u32 exchange_acq_rel_cta(u32 *word, u32 value) {
    u32 before;
    asm volatile("atom.exch.acq_rel.cta.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ u64 exchange_acq_rel_cta(u64 *word, u64 value) {
    u64 before;
    asm volatile("atom.exch.acq_rel.cta.b64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(word), "l"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ u32 load_acquire_cta(const u32 *word) {
    u32 value;
    asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_cta(u32 *word, u32 value) {
    asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Stores `desired` if the word holds `expected`; returns what it held before.
__device__ __forceinline__ u64 compare_exchange_sys(u64 *word, u64 expected, u64 desired) {
    u64 before;
    asm volatile("atom.cas.acq_rel.sys.global.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(word), "l"(expected), "l"(desired)
                 : "memory");
    return before;
}

__device__ __forceinline__ void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

#if __CUDA_ARCH__ >= 900
// Orders this thread's ordinary accesses with those of the bulk copy engine, both ways: after an
// acquire and before a bulk read of what was acquired; after bulk stores and before their release.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}
#endif

__device__ __forceinline__ void sleep_ns(u32 nanoseconds) {
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

// Nanoseconds of a clock that all multiprocessors share. It may tick as coarsely as a microsecond.
__device__ __forceinline__ u64 global_time_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

// 16 bytes, the widest access of a thread.
struct alignas(16) Quad {
    u32 word[4];
};

// Bytes that are read once. A peer's are ordered by the acquire of its signal, in this kernel or in one
// before; the non-coherent path is not used.
__device__ __forceinline__ Quad load_once(const Quad *from) {
    Quad quad;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(quad.word[0]), "=r"(quad.word[1]), "=r"(quad.word[2]), "=r"(quad.word[3])
                 : "l"(from)
                 : "memory");
    return quad;
}

// The same for bytes that are read again soon, which L2 keeps before others; and for bytes that nobody wants any
// more, whether they were kept so or not.
__device__ __forceinline__ Quad load_kept(const Quad *from) {
    Quad quad;
    asm volatile("{\n\t"
                 ".reg .b64 policy;\n\t"
                 "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n\t"
                 "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n\t"
                 "}"
                 : "=r"(quad.word[0]), "=r"(quad.word[1]), "=r"(quad.word[2]), "=r"(quad.word[3])
                 : "l"(from)
                 : "memory");
    return quad;
}
__device__ __forceinline__ Quad load_last(const Quad *from) {
    Quad quad;
    asm volatile("{\n\t"
                 ".reg .b64 policy;\n\t"
                 "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
                 "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n\t"
                 "}"
                 : "=r"(quad.word[0]), "=r"(quad.word[1]), "=r"(quad.word[2]), "=r"(quad.word[3])
                 : "l"(from)
                 : "memory");
    return quad;
}

// Where something lies within the block's shared memory: a word to reckon with, in place of a pointer of
// which every access would find that out anew.
__device__ __forceinline__ u32 shared_address(const void *of) {
    return static_cast<u32>(__cvta_generic_to_shared(of));
}

__device__ __forceinline__ Quad load_shared(u32 from) {
    Quad quad;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(quad.word[0]), "=r"(quad.word[1]), "=r"(quad.word[2]), "=r"(quad.word[3])
                 : "r"(from)
                 : "memory");
    return quad;
}

__device__ __forceinline__ void store_shared(u32 to, const Quad &quad) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(quad.word[0]), "r"(quad.word[1]),
                 "r"(quad.word[2]), "r"(quad.word[3])
                 : "memory");
}

// Sixteen bytes into shared memory, past the registers and the L1 cache. They are there for the thread that
// asked once it has waited.
__device__ __forceinline__ void copy_async(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Makes one group of the copies that this thread asked for since the last.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last GROUPS groups are on their way.
template <u32 GROUPS>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// One access; the compiler would split a plain assignment.
__device__ __forceinline__ void store_quad(Quad *to, const Quad &quad) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(quad.word[0]),
                 "r"(quad.word[1]), "r"(quad.word[2]), "r"(quad.word[3])
                 : "memory");
}

// The same for bytes that nobody reads soon, so that they do not drive out of L2 what is read next.
__device__ __forceinline__ void store_streaming(Quad *to, const Quad &quad) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(quad.word[0]),
                 "r"(quad.word[1]), "r"(quad.word[2]), "r"(quad.word[3])
                 : "memory");
}

// Two values, each rounded to the nearest bf16, ties to even: the first in the low half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 halves;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

// The same for fp16, where what is too large becomes infinite.
__device__ __forceinline__ u32 to_fp16x2(float low, float high) {
    u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

// The value of the fp16 number in the low half.
__device__ __forceinline__ float from_fp16(u32 halves) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(halves)));
    return value;
}

#if __CUDA_ARCH__ >= 890
// Two values, each rounded to the nearest e4m3 number, ties to even, at most 448 in magnitude; the
// first in the low byte.
__device__ __forceinline__ u32 to_e4m3x2(float low, float high) {
    u16 bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
    return bytes;
}
#endif

// Bytes of dynamic shared memory that the launch gave this block.
__device__ __forceinline__ u32 dynamic_shared_bytes() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

} // namespace ptx
