// runs.cuh -- a warp's tiles of K and V of a plain cache, by bulk copies of whole runs, as they lie there; and from there as
// fragments.cuh loads them.
//
// Matrices cannot be loaded from such a stage: rows of 256 bytes begin in the same bank. But a lane of fragments.cuh reads 16
// bytes, of K eight lanes one line of 128, which are all banks once. Of V they read two chunks of four tokens, two apart: tokens
// of different runs lie in different banks, those of one run in the same. So short runs are read faster and copied slower.
#pragma once

#include "fragments.cuh"

static_assert(kCopy == RUNS && kLayout == HND, "PA_COPY=RUNS must have the rows of a block and head one after the other");

// What Fragments is to registers, this is to a ring.
struct StagedFragments : Ring, Operands {
    using Ring::Ring;

    // K of the next tile, once it has landed.
    __device__ StagedFragments& wait() {
        read(keys, Ring::wait(), lane / 8 * 2, lane % 8, lane % 8 ^ 4);
        return *this;
    }

    // V of the tile, `left` of whose tokens exist; the others have zeros, since 0 * NaN is NaN.
    __device__ void after_scores(int left) {
        const int token = lane % 4 * 2;
        read(values, stages + stage * 2 * kTileBytes + kTileBytes, token, lane / 4, lane / 4);
        if (left >= kTile) return;
#pragma unroll
        for (int i = 0; i < 4 * kLines * 4; ++i) {
            if (token + further(i / 4 / kLines) >= left) values[i / 4 / kLines][i / 4 % kLines][i % 4] = 0;
        }
    }
    __device__ void after_sums() {}

    // Chunks `even` of each eight of tokens `token` and token + 8, and chunks `odd` of token + 1 and + 9.
    __device__ static void read(unsigned (&to)[4][kLines][4], const unsigned char* tile, int token, int even, int odd) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int its = token + further(i), chunk = i % 2 == 0 ? even : odd;
            const unsigned char* from = tile + its / kRun * kRunPitch + its % kRun * kRowBytes + chunk * 16;
#pragma unroll
            for (int l = 0; l < kLines; ++l) {
                const bool exists = kChunks % 8 == 0 || l * 8 + chunk < kChunks;
                const uint4 x = exists ? *reinterpret_cast<const uint4*>(from + l * 128) : make_uint4(0, 0, 0, 0);
                to[i][l][0] = x.x, to[i][l][1] = x.y, to[i][l][2] = x.z, to[i][l][3] = x.w;
            }
        }
    }
};
