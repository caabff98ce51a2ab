// mma.cuh -- what a warp tells the tensor cores, on matrices of 16-bit elements. sm_80 and newer.
//
// An 8 x 8 matrix lies in a warp as a register a lane: lane l holds row l / 4, columns 2 * (l % 4) and the next, the first in
// the lower half. Larger tiles are several such matrices:
//
//   A  16 x 16    4 registers    rows 0-7 and 8-15 of columns 0-7, then of columns 8-15
//   B  16 x 8     2 registers    rows 0-7 and 8-15, each as its transpose
//   C  16 x 8     4 floats       rows 0-7 (two columns a lane), then rows 8-15
#pragma once

#include "widen.cuh"

template <typename T> constexpr bool kIsF16 = kIsSame<T, __half>;

// Four matrices from shared memory: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes of it.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// A matrix in registers, transposed across the warp.
__device__ __forceinline__ unsigned transpose(unsigned matrix) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

// c += a * b
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (kIsF16<Factor>) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// Two floats as a register's lower and upper half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    if constexpr (kIsF16<Factor>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
}
