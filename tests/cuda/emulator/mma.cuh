// mma.cuh -- in place of the kernels' own: matrices in a warp's registers, and their products.
#pragma once

#include "widen.cuh"

template <typename T> constexpr bool kIsF16 = kIsSame<T, __half>;

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

// Rows may lie in any banks: of V few do where a row is short.
static void load_transposed(unsigned (&to)[4], unsigned address) {
    const unsigned* rows = exchange(address);
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; ++m) {
        uint16_t two[2];
        for (int i = 0; i < 2; ++i) memcpy(&two[i], memory + rows[8 * m + lane % 4 * 2 + i] + lane / 4 * 2, 2);
        memcpy(&to[m], two, 4);
    }
}
static unsigned transpose(unsigned matrix) {
    const unsigned* all = exchange(matrix);
    const int lane = threadIdx.x % 32, column = lane / 4;
    unsigned transposed = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned row = all[(lane % 4 * 2 + i) * 4 + column / 2];
        transposed |= (row >> column % 2 * 16 & 0xffff) << i * 16;
    }
    return transposed;
}
static void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    unsigned words[6][32];
    for (int i = 0; i < 6; ++i) memcpy(words[i], exchange(i < 4 ? a[i] : b[i - 4]), sizeof(words[i]));
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const int from = k % 8 / 2, bits = k % 2 * 16;
            sum += static_cast<double>(to_float_bits(words[half + k / 8 * 2][row * 4 + from] >> bits))
                * to_float_bits(words[4 + k / 8][column * 4 + from] >> bits);
        }
        c[i] = sum;
    }
}
