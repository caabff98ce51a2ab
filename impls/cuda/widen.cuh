// widen.cuh -- elements of K and V as they are multiplied: those of quantised caches become f16, exactly.
#pragma once

#include "e4m3.cuh"
#include "paged.cuh"

template <typename A, typename B> constexpr bool kIsSame = false;
template <typename A> constexpr bool kIsSame<A, A> = true;
template <bool kFirst, typename A, typename B> struct Either { using Type = A; };
template <typename A, typename B> struct Either<false, A, B> { using Type = B; };

using Factor = typename Either<kQuantised, __half, Scalar>::Type;    // of both products

#ifdef PA_CACHE_SCALAR
constexpr bool kE4m3 = kIsSame<Cache, __nv_fp8_e4m3>;    // else e5m2
#else
constexpr bool kE4m3 = false;
#endif

// e4m3 is converted from sm_89 on. Before, its bits become those of an f16 that is 2^8 times smaller, subnormals included.
constexpr bool kByShift = kE4m3 && __CUDA_ARCH__ < 890;
constexpr float kUnit = kByShift ? 256.0f : 1.0f;    // what a widened element is to be multiplied by

// Two elements, the lower or the upper half of a register, as two f16.
template <int kHalf> __device__ __forceinline__ unsigned widen(unsigned four) {
    if constexpr (!kE4m3) {    // the upper byte of an f16
        return __byte_perm(four, 0, kHalf ? 0x3424 : 0x1404);
    } else if constexpr (kByShift) {
        const unsigned upper = __byte_perm(four, 0, kHalf ? 0x3424 : 0x1404);
        return (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
    } else {
        return widen_e4m3<kHalf>(four);
    }
}
