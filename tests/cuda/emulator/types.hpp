// types.hpp -- in place of CUDA's own headers: 16-bit numbers, vectors, and the words that say where code runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __shared__ static    // CTAs come one after the other
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDART_INF_F __builtin_inff()

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __half { uint16_t bits; };
inline float __half2float(__half h) {
    const int exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
    const float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                                   : std::ldexp(float(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
    return h.bits >> 15 ? -x : x;
}
inline __half __float2half_rn(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return {0x7fff};
    if (std::fabs(x) >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
    const int exponent = x == 0 ? -14 : std::max(std::ilogb(x), -14);
    const int fraction = std::nearbyint(std::ldexp(std::fabs(x), 10 - exponent));    // 1024 and more where it is normal
    return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + fraction))};
}

struct __nv_fp8_e5m2 {
    uint8_t bits;    // the upper half of an f16
    operator float() const { return __half2float({static_cast<uint16_t>(bits << 8)}); }
};
struct __nv_fp8_e4m3 {
    uint8_t bits;
    operator float() const {
        const int exponent = bits >> 3 & 15, fraction = bits & 7;
        const float x = exponent == 15 && fraction == 7
                            ? NAN : std::ldexp(float(exponent ? fraction + 8 : fraction), (exponent ? exponent : 1) - 10);
        return bits >> 7 ? -x : x;
    }
};

struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 h) {
    const uint32_t bits = static_cast<uint32_t>(h.bits) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (std::isnan(x)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
