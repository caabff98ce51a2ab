// loads.cuh -- loads to registers that stay where they were issued, and what else the compiler is kept from.
#pragma once

// Load 16 bytes past L1 if `wanted`, or leave `to` alone. Volatile, so that a load stays where it was issued. L2 is asked for
// whole lines of 128 bytes: it would fetch them in halves. kOnce: what was read is the first to leave L2.
template <bool kOnce> __device__ __forceinline__ void load_chunk(unsigned (&to)[4], const uint4* from, bool wanted) {
    if constexpr (kOnce) {
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile(
            "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
            "  @wanted ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %6; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "l"(from), "r"(static_cast<unsigned>(wanted)), "l"(policy));
    } else {
        asm volatile(
            "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
            "  @wanted ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "l"(from), "r"(static_cast<unsigned>(wanted)));
    }
}

// Volatile, so that a branch around it stays one: a tile where no token is missing would else select each register.
__device__ __forceinline__ void clear(unsigned& x) { asm volatile("mov.u32 %0, 0;" : "=r"(x)); }

// A number whose value the compiler cannot know: what follows from it is worked out here, and not before a loop around, from
// where registers would hold it all.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
