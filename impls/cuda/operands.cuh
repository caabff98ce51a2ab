// operands.cuh -- K and V of a tile as A of the two products, from a stage of the ring.
//
// Elements of 8 bits are loaded as if two were one of 16. Of K a lane so gets four adjacent elements of a token, the order that
// query.cuh has, too. Of V, transposed, it gets two adjacent elements of two tokens: rows 0-7 of the MMA are elements 0, 2, 4, ...
// 14, and rows 8-15 elements 1, 3, 5, ... 15.
#pragma once

#include "ring.cuh"
#include "scores.cuh"

constexpr int kPairs = (kSteps + 1) / 2;             // of steps

// Where a lane's row of a tile is, when matrices are loaded.
struct Row {
    unsigned address;    // in shared memory
    int slot;            // of its token, modulo 8: what its chunks are permuted by

    // Chunk 2 * pair + half; the one before where a row ends in between.
    __device__ unsigned chunk(int pair, int half) const {
        if (kChunks % 2 == 1 && 2 * pair + 1 == kChunks) half = 0;
        if constexpr (!kSwizzled) return address + (2 * pair + half) * 16;
        return address + (2 * pair >= kWholeChunks ? 2 * pair + half : (2 * pair + half) ^ slot) * 16;
    }
};

// Which of four tokens, `token`, the next, and 8 further on, have values; what the others' slots hold must not be multiplied,
// since 0 * NaN is NaN. A mask of 16-bit halves, or a selection of bytes that gathers those of an element.
struct Held {
    unsigned low = kQuantised ? 0x3120u : 0xffffffffu, high = low;

    __device__ Held() {}
    __device__ Held(const Scoring& scoring, int token)
        : low(of(scoring.holds(token), scoring.holds(token + 1))),
          high(of(scoring.holds(token + 8), scoring.holds(token + 9))) {}

    __device__ static unsigned of(bool first, bool second) {
        if constexpr (kQuantised) return (first ? 0x0100u : 0x0404u) | (second ? 0x3020u : 0x4040u);
        else return (first ? 0xffffu : 0) | (second ? 0xffff0000u : 0);
    }
};

// Of 16 tokens, and of steps 2 * pair and the next.
__device__ __forceinline__ void load_keys(unsigned (&to)[2][4], const Row& keys, int pair, int half) {
    if constexpr (!kQuantised) {
        load_matrices(to[0], keys.chunk(2 * pair, half));
        if (2 * pair + 1 < kSteps) load_matrices(to[1], keys.chunk(2 * pair + 1, half));
    } else {
        unsigned bytes[4];
        load_matrices(bytes, keys.chunk(pair, half));
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            to[s][0] = widen<0>(bytes[2 * s]), to[s][1] = widen<0>(bytes[2 * s + 1]);
            to[s][2] = widen<1>(bytes[2 * s]), to[s][3] = widen<1>(bytes[2 * s + 1]);
        }
    }
}

__device__ __forceinline__ void load_values(unsigned (&to)[2][4], const Row& values, int pair, int half, const Held& held) {
    if constexpr (!kQuantised) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            if (2 * pair + s == kSteps) break;
            load_transposed(to[s], values.chunk(2 * pair + s, half));
            to[s][0] &= held.low, to[s][1] &= held.low, to[s][2] &= held.high, to[s][3] &= held.high;
        }
    } else {
        unsigned bytes[4];
        load_transposed(bytes, values.chunk(pair, half));
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const unsigned low = __byte_perm(bytes[s], 0, held.low), high = __byte_perm(bytes[2 + s], 0, held.high);
            to[s][0] = widen<0>(low), to[s][1] = widen<1>(low), to[s][2] = widen<0>(high), to[s][3] = widen<1>(high);
        }
    }
}
