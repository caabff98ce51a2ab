// mma.cuh -- in place of the kernels' own: matrices from shared memory to a warp's registers, and products of a warp.
#pragma once

#include "widen.cuh"

template <typename T> constexpr bool kIsF16 = kIsSame<T, __half>;

static float to_float_bits(unsigned bits) {
    Factor x;
    const uint16_t low = bits;
    memcpy(&x, &low, 2);
    return to_float(x);
}
static unsigned pack(float low, float high) {
    Factor two[2];
    from_float(two[0], low), from_float(two[1], high);
    unsigned packed;
    memcpy(&packed, two, 4);
    return packed;
}

// Rows of four matrices. No two of a matrix may lie in the same banks.
static const unsigned* matrix_rows(unsigned address) {
    const unsigned* rows = exchange(address);
    for (int m = 0; m < 4; ++m) {
        unsigned banks = 0;
        for (int row = 0; row < 8; ++row) banks |= 1u << rows[8 * m + row] / 16 % 8;
        REQUIRE(banks == 0xff && rows[8 * m + threadIdx.x % 32 / 4] % 16 == 0);
    }
    return rows;
}
static void load_matrices(unsigned (&to)[4], unsigned address) {
    const unsigned* rows = matrix_rows(address);
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; ++m) memcpy(&to[m], memory + rows[8 * m + lane / 4] + lane % 4 * 4, 4);
}
static void load_transposed(unsigned (&to)[4], unsigned address) {
    const unsigned* rows = matrix_rows(address);
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; ++m) {
        for (int half = 0; half < 2; ++half) {
            memcpy(reinterpret_cast<uint16_t*>(&to[m]) + half, memory + rows[8 * m + lane % 4 * 2 + half] + lane / 4 * 2, 2);
        }
    }
}

// A matrix across a warp, row i of it in lanes 4 i to 4 i + 3.
static uint16_t half_of(const unsigned* matrix, int row, int column) {
    return matrix[row * 4 + column / 2] >> column % 2 * 16;
}
static unsigned transpose(unsigned matrix) {
    const unsigned* all = exchange(matrix);
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    return half_of(all, column, row) | unsigned(half_of(all, column + 1, row)) << 16;
}

// c += a * b
static void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    unsigned rows[4][32], columns[2][32];
    for (int i = 0; i < 4; ++i) memcpy(rows[i], exchange(a[i]), sizeof(rows[i]));
    for (int i = 0; i < 2; ++i) memcpy(columns[i], exchange(b[i]), sizeof(columns[i]));
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 16; ++k) {
            c[i] += to_float_bits(half_of(rows[i / 2 + k / 8 * 2], lane / 4, k % 8)) *
                    to_float_bits(half_of(columns[k / 8], lane % 4 * 2 + i % 2, k % 8));
        }
    }
}
