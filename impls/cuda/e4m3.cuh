// e4m3.cuh -- an instruction of sm_89 and newer; nothing older compiles it, since nothing older calls it.
#pragma once

// Two e4m3, the lower or the upper half of a register, as two f16.
template <int kHalf> __device__ __forceinline__ unsigned widen_e4m3(unsigned four) {
    unsigned pair;
    if constexpr (kHalf == 0) asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }" : "=r"(pair) : "r"(four));
    else asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(pair) : "r"(four));
    return pair;
}
