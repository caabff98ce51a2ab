// mma.cuh -- in place of the kernels' own: matrices from shared memory to a warp's registers.
#pragma once

#include "paged.cuh"

template <typename T> constexpr bool kIsF16 = false;
template <> constexpr bool kIsF16<__half> = true;

static float to_float_bits(unsigned bits) {
    Scalar x;
    const uint16_t low = bits;
    memcpy(&x, &low, 2);
    return to_float(x);
}
static unsigned pack(float low, float high) {
    Scalar two[2];
    from_float(two[0], low), from_float(two[1], high);
    unsigned packed;
    memcpy(&packed, two, 4);
    return packed;
}

// No two rows of a matrix may lie in the same banks.
static void load_matrices(unsigned (&to)[4], unsigned address) {
    const unsigned* rows = exchange(address);
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; ++m) {
        unsigned banks = 0;
        for (int row = 0; row < 8; ++row) banks |= 1u << rows[8 * m + row] / 16 % 8;
        REQUIRE(banks == 0xff && rows[8 * m + lane / 4] % 16 == 0);
        memcpy(&to[m], memory + rows[8 * m + lane / 4] + lane % 4 * 4, 4);
    }
}
