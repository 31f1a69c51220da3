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

__device__ __forceinline__ void store_release_gpu(u32 *word, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
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

// Returns what the word held before.
__device__ __forceinline__ u32 fetch_add_acq_rel_gpu(u32 *word, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
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

} // namespace ptx
