// wgmma.cuh -- what a warpgroup, four warps, tells the tensor cores: C += A B, C in registers and B in shared memory. sm_90a.
//
// Of 16 rows of C and A a warp holds: lane l those of numbers l / 4 and l / 4 + 8, and of every 8 columns 2 * (l % 4) and the next
//
//   C  64 x N     N / 2 floats   8 columns after the other: two of the first row, two of the second
//   A  64 x 16    4 registers    8 columns after the other: the first row, the second; or in shared memory
//   B  16 x N     in shared memory; see matrices.cuh
//
// Whether the rows of B run along the sum, as those of keys do, or across it, as those of values do, the instruction is told.
#pragma once

#include "matrices.cuh"
#include "mbarrier.cuh"
#include "meet.cuh"
#include "mma.cuh"

static_assert(__CUDA_ARCH__ == 900, "wgmma is an instruction of sm_90a");

// Before the first of several products, and after anything else has touched their registers.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// End a batch: of the products begun since the last one.
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most the kLater newest batches go on. Their registers, and shared memory, are in use until then.
template <int kLater>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}

// Have `x`, which is never negative, and all that it follows from computed before the next wait. The assembler would wait first, and
// compute then; but it moves no wait to before a store, not even before one that never happens.
__device__ __forceinline__ void finish(float x, unsigned address) {
    asm volatile("{ .reg .pred never; setp.lt.f32 never, %0, 0f00000000;\n @never st.volatile.shared.f32 [%1], %0; }" ::"f"(x),
                 "r"(address) : "memory");
}

// The compiler takes a product to be done when it is begun: keep it from reading C before the wait.
template <int kRegisters>
__device__ __forceinline__ void settle(float (&c)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define PA_NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PA_NAMES_40 PA_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PA_NAMES_64 PA_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PA_NAMES_80 PA_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PA_NAMES_88 PA_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PA_NAMES_96 PA_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define PA_8(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define PA_REGISTERS_32(c) PA_8(c, 0), PA_8(c, 8), PA_8(c, 16), PA_8(c, 24)
#define PA_REGISTERS_40(c) PA_REGISTERS_32(c), PA_8(c, 32)
#define PA_REGISTERS_64(c) PA_REGISTERS_40(c), PA_8(c, 40), PA_8(c, 48), PA_8(c, 56)
#define PA_REGISTERS_80(c) PA_REGISTERS_64(c), PA_8(c, 64), PA_8(c, 72)
#define PA_REGISTERS_88(c) PA_REGISTERS_80(c), PA_8(c, 80)
#define PA_REGISTERS_96(c) PA_REGISTERS_88(c), PA_8(c, 88)

// Products of N columns, R = N / 2 registers a thread, whose operands are numbered behind them: I to M are R to R + 5.
#define PA_FROM_SHARED(N, R, TYPE, I, J, K)                                                                                     \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #K ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                 " {" PA_NAMES_##R "}, %" #I ", %" #J ", add, 1, 1, 0, 0; }"                                                    \
                 : PA_REGISTERS_##R(c) : "l"(a), "l"(b), "r"((int)add) : "memory")
#define PA_FROM_REGISTERS(N, R, TYPE, ACROSS, I, J, K, L, M, O)                                                                 \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #O ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                 " {" PA_NAMES_##R "}, {%" #I ",%" #J ",%" #K ",%" #L "}, %" #M ", add, 1, 1, " ACROSS "; }"                    \
                 : PA_REGISTERS_##R(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory")

// multiply_rows: begin C = A B, or C += A B, over 16 elements; A is queries, B keys, whose rows run along the sum.
// multiply_columns: begin C += A B over 16 tokens; A is weights, B values, whose rows run across the sum.
#define PA_PRODUCTS(N, R, I, J, K, L, M, O)                                                                                     \
    __device__ __forceinline__ void multiply_rows(float (&c)[R], Matrix a, Matrix b, bool add) {                                \
        if constexpr (kIsF16<Scalar>) PA_FROM_SHARED(N, R, "f16", I, J, K);                                                     \
        else PA_FROM_SHARED(N, R, "bf16", I, J, K);                                                                             \
    }                                                                                                                           \
    __device__ __forceinline__ void multiply_rows(float (&c)[R], const unsigned (&a)[4], Matrix b, bool add) {                  \
        if constexpr (kIsF16<Scalar>) PA_FROM_REGISTERS(N, R, "f16", "0", I, J, K, L, M, O);                                    \
        else PA_FROM_REGISTERS(N, R, "bf16", "0", I, J, K, L, M, O);                                                            \
    }                                                                                                                           \
    __device__ __forceinline__ void multiply_columns(float (&c)[R], const unsigned (&a)[4], Matrix b) {                         \
        constexpr bool add = true;                                                                                              \
        if constexpr (kIsF16<Scalar>) PA_FROM_REGISTERS(N, R, "f16", "1", I, J, K, L, M, O);                                    \
        else PA_FROM_REGISTERS(N, R, "bf16", "1", I, J, K, L, M, O);                                                            \
    }
PA_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
PA_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45)
PA_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)
PA_PRODUCTS(160, 80, 80, 81, 82, 83, 84, 85)
PA_PRODUCTS(176, 88, 88, 89, 90, 91, 92, 93)
PA_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101)

// What roles of a CTA need, besides.

// Make what other threads' ordinary copies wrote, and a barrier has told of, visible to products.
__device__ __forceinline__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A warpgroup gives back registers, or takes some that others gave back.
template <int kRegisters>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
