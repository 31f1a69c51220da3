// Fixed-width types and layout checks. NVRTC compiles this without the toolkit's headers, so nothing
// is included here and nothing may be.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "widths");
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "widths");
static_assert(sizeof(void *) == 8, "a device address is 64 bits wide");

// Where a field lies, as `std::mem::offset_of!` says on the side of Rust. This is the operator behind
// `offsetof` in the compiler's front end; the macro of that name is in a header.
#define OFFSET_OF(type, field) __INTADDR__(&(static_cast<type *>(nullptr)->field))

// A struct that crosses from Rust as bytes, with its fields in the order of its Rust twin: its size and
// the offset of its last field tell a field that is missing or has another width.
#define SAME_LAYOUT(type, size, last_field, last_offset)                                             \
    static_assert(sizeof(type) == (size), #type " has another size than its Rust twin");             \
    static_assert(OFFSET_OF(type, last_field) == (last_offset), #type " differs from its Rust twin")

// A device address, as parameter blocks carry it, as a pointer.
template <typename T>
__device__ __forceinline__ T *at(u64 address) {
    return reinterpret_cast<T *>(address);
}
