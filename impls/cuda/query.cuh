// query.cuh -- a warp's query rows, B of the first product: in registers, up to 16 of 128 elements, else in shared memory, once
// a team.
//
// A lane of four holds a quarter of a row: of each MMA tile of 16 elements two words of two, in the order in which the caches'
// elements come from shared memory. 8-bit elements come four adjacent ones a lane, 16-bit ones two here and two 8 further on.
#pragma once

#include "mbarrier.cuh"
#include "mma.cuh"
#include "partials.cuh"

constexpr int kColumns = (kWarpRows + 7) / 8;         // MMA tiles of 8 rows
constexpr int kSteps = kHeadDim / 16;                 // MMA tiles of 16 elements
constexpr bool kInRegisters = kColumns * kSteps <= 16;
constexpr bool kRescaled = !kIsSame<Factor, Scalar>;  // bf16, to be multiplied as f16
static_assert(kHeadDim % 16 == 0, "PA_HEAD_DIM must be a multiple of 16, the rows of an MMA tile");
static_assert(sizeof(Scalar) == 2, "PA_SCALAR must be of 16 bits");
static_assert(kCrew == 1 || kWarpRows % 8 == 0, "PA_ROWS must be a multiple of 8 for each warp of a crew");

// The query tokens of a sequence, or of a run of prefix.cuh.
struct Tokens {
    long long first;
    const int* list;    // with SHARED: which they are

    __device__ long long operator[](int i) const { return kRole == SHARED ? (long long)__ldg(list + i) : first + i; }
};

// Where a row lies; the rows of one query token are adjacent.
__device__ __forceinline__ long long row_offset(const Tokens& tokens, int row, long long token_stride) {
    return tokens[row / kGroup] * token_stride + row % kGroup * kHeadDim;
}

// A lane's quarter of a query row.
struct Quarter {
    unsigned words[kSteps][2];
    float unit = 1.0f;    // by which its scores are to be multiplied

    // Of a row that exists, times the sign of `scale`; else zeros.
    __device__ Quarter(const Scalar* row, bool exists, float scale, int lane) {
        constexpr int kFirst = kQuantised ? 2 : 1, kSecond = kQuantised ? 1 : 4;    // words from lane to lane, and to the second word
        const unsigned signs = scale < 0 ? 0x80008000u : 0;
        const unsigned* from = reinterpret_cast<const unsigned*>(row) + lane % 4 * kFirst;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            words[step][0] = exists ? __ldg(from + step * 8) ^ signs : 0;
            words[step][1] = exists ? __ldg(from + step * 8 + kSecond) ^ signs : 0;
        }
        if constexpr (kRescaled) to_f16();
    }

    // bf16 to f16, times the power of two that brings the row's largest element to 2^14 or more: nothing overflows, and
    // what loses bits is 2^-28 of the largest.
    __device__ void to_f16() {
        unsigned largest = 0;    // bits of it, without its sign
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                largest = max(largest, max(words[step][w] & 0x7fffu, words[step][w] >> 16 & 0x7fffu));
            }
        }
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const unsigned exponent = min(268 - (largest >> 7), 253u);    // biased, of the power; its inverse's is 254 less
        const float power = __uint_as_float(exponent << 23);
        unit = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const unsigned pair = words[step][w];
                words[step][w] = pack(__uint_as_float(pair << 16) * power, __uint_as_float(pair & 0xffff0000u) * power);
            }
        }
    }
};

// The rows of a part in shared memory, where registers do not hold them: fragments as `load_matrices` finds them.
struct Queries {
    static constexpr int kRowPitch = kHeadDim * 2 + 16;    // bytes; the padding spreads rows over the banks

    alignas(16) unsigned char rows[kRows][kRowPitch];
    float units[kRows];

    // All threads of the team call it, and synchronise before the rows are read.
    __device__ void fill(
        const Scalar* query, const Tokens& tokens, int first_row, int num_rows, long long query_stride, float scale, int thread) {
        for (int row = thread / 4; row < kRows; row += kTeam * 8) {    // kRows is a multiple of 8: whole warps
            const bool exists = row < num_rows;
            const Quarter quarter(query + row_offset(tokens, exists ? first_row + row : 0, query_stride), exists, scale, thread);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    *reinterpret_cast<unsigned*>(rows[row] + (step * 2 + w) * 16 + thread % 4 * 4) = quarter.words[step][w];
                }
            }
            if (thread % 4 == 0) units[row] = quarter.unit;
        }
    }

    // Of eight rows from `row` on: fragments of MMA tiles 2 * pair and the next.
    __device__ void load(unsigned (&to)[4], int row, int pair, int lane) const {
        const int last = kSteps * 2 - 1, chunk = pair * 4 + lane / 8;
        load_matrices(to, shared_address(rows[row + lane % 8]) + min(chunk, last) * 16);
    }
};
constexpr int kQueriesBytes = kInRegisters ? 0 : (int)sizeof(Queries);    // of a team
