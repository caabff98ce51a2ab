// matrices.cuh -- matrices of 16-bit elements in shared memory, as the products of a warpgroup read them.
//
// A matrix lies in rows of 128 bytes, 64 elements; 16-byte chunk c of row r is at chunk c ^ (r % 8). Wider matrices are several such
// columns of rows, one after the other.
#pragma once

#include "paged.cuh"

constexpr int kWidth = 64;                        // elements of a row in shared memory
constexpr int kPitch = kWidth * sizeof(Scalar);   // bytes
static_assert(kPitch == 128, "PA_SCALAR must be of 16 bits");

using Matrix = unsigned long long;    // where a matrix is, as the instruction takes it

// A matrix whose first row is at a multiple of 1024 bytes; its columns of rows, where several are read, are `column_bytes` apart.
__device__ __forceinline__ Matrix matrix_at(unsigned address, unsigned column_bytes) {
    constexpr unsigned long long kSwizzle128 = 1, kEightRows = 8 * kPitch;
    return kSwizzle128 << 62 | (kEightRows >> 4) << 32 | (unsigned long long)(column_bytes >> 4) << 16 | address >> 4;
}

// The same, so many bytes further on.
__device__ __forceinline__ Matrix advance(Matrix matrix, unsigned bytes) { return matrix + (bytes >> 4); }
