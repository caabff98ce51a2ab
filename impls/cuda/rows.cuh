// rows.cuh -- how a warp reads rows, a token's key or value each, by 16-byte chunks.
//
//   lane   reads kPerLane chunks of each row, of kRows consecutive tokens, by way of a slot of its own in shared memory
//   team   kLanes lanes, which together read whole rows
//   warp   a tile: kTile consecutive tokens
#pragma once

#include "chunks.cuh"
#include "paged.cuh"

// Specialised by group.py.
constexpr int kWarps = PA_WARPS;  // a CTA
constexpr int kRows = PA_ROWS;    // tokens that a lane reads at a time

constexpr int kThreads = kWarps * 32;
constexpr int kChunk = 16 / sizeof(Scalar);  // elements
constexpr int kChunks = kHeadDim / kChunk;   // a row

__device__ constexpr int lanes_for(int chunks) {
    int lanes = 1;
    while (lanes < chunks && lanes < 32) lanes *= 2;
    return lanes;
}
constexpr int kLanes = lanes_for(kChunks);
constexpr int kPerLane = (kChunks + kLanes - 1) / kLanes;
constexpr int kTile = 32 / kLanes * kRows;
constexpr bool kWhole = kChunks == kLanes * kPerLane;      // no lane idles
constexpr int kIds = kBlockSize % kRows == 0 ? 1 : kRows;  // blocks that a lane's tokens of a tile may lie in

static_assert(kHeadDim % kChunk == 0, "PA_HEAD_DIM must be a multiple of 16 bytes");
static_assert(kLayout != X_PACKED, "PA_LAYOUT must keep a token's row contiguous");
static_assert(kTile <= 32, "PA_ROWS must be at most kLanes: a lane takes one token of a tile through the softmax");

// Quad number `quad` of a chunk, four elements, as floats.
constexpr int kQuads = kChunk / 4;
template <typename T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<__half> = true;
__device__ inline void unpack_pair(unsigned pair, float& low, float& high) {
    if constexpr (kIsHalf<Scalar>) {
        low = __half2float(__ushort_as_half((unsigned short)(pair & 0xffffu)));
        high = __half2float(__ushort_as_half((unsigned short)(pair >> 16)));
    } else {  // bf16 is the upper half of a float
        low = __uint_as_float(pair << 16);
        high = __uint_as_float(pair & 0xffff0000u);
    }
}
__device__ inline void unpack_quad(const uint4& chunk, int quad, float (&x)[4]) {
    if constexpr (kQuads == 1) {
        x[0] = __uint_as_float(chunk.x), x[1] = __uint_as_float(chunk.y);
        x[2] = __uint_as_float(chunk.z), x[3] = __uint_as_float(chunk.w);
    } else {
        unpack_pair(quad == 0 ? chunk.x : chunk.z, x[0], x[1]);
        unpack_pair(quad == 0 ? chunk.y : chunk.w, x[2], x[3]);
    }
}

// Where a thread stands. Both numbers come by a shuffle: the warp, so that branches on it are uniform; the lane, so that what
// follows from it is worked out here, and not before a loop around, from where registers would hold it all through `attend`.
struct Lane {
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    int lane = __shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x) % 32;
    int team = lane / kLanes;
    int member = lane % kLanes;  // of its team
    int thread = warp * 32 + lane;
};

// Look up the blocks of tokens first .. first + kRows - 1, as far as they are below `end`.
__device__ inline void find_blocks(int (&ids)[kIds], const int* table, int first, int end) {
#pragma unroll
    for (int i = 0; i < kIds; ++i) ids[i] = first + i < end ? __ldg(table + (first + i) / kBlockSize) : 0;
}

// A tile of keys or values, where each lane finds its own chunks: [row * kPerLane + c][lane].
using Slot = uint4[kRows * kPerLane][32];

// Start copying the rows of tokens first .. first + kRows - 1. Rows at or past `end` become zero, and are not touched.
__device__ inline void copy_rows(
    Slot& slot, const Scalar* cache, const KvHead& head, const int (&ids)[kIds], int first, int end, const Lane& me) {
    const Scalar* row = cache + head.row(ids[0], first % kBlockSize);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (kIds > 1) row = cache + head.row(ids[r % kIds], (first + r) % kBlockSize);
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) {
            const int chunk = c * kLanes + me.member;
            const bool there = first + r < end && (kWhole || chunk < kChunks);
            copy_chunk(&slot[r * kPerLane + c][me.lane], reinterpret_cast<const uint4*>(row) + chunk, there);
        }
        if (kIds == 1) row += head.row_stride();
    }
    end_batch();
}

// Sum each of kCount values over kSpan lanes. While their number is even, a lane passes half of them on and keeps the
// other half, so that in the end it holds sum number `held` and those after it, instead of every lane all.
template <int kCount, int kSpan>
__device__ inline void sum_over(float* values, int lane, int& held) {
    if constexpr (kSpan > 1) {
        constexpr int kOffset = kSpan / 2;
        constexpr int kKept = kCount % 2 == 0 ? kCount / 2 : kCount;
        const bool upper = lane & kOffset;
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            float kept = values[i], passed = values[i];
            if (kKept < kCount) {
                kept = upper ? values[i + kCount - kKept] : values[i];
                passed = upper ? values[i] : values[i + kCount - kKept];
            }
            values[i] = kept + __shfl_xor_sync(0xffffffffu, passed, kOffset);
        }
        if (kKept < kCount && upper) held += kKept;
        sum_over<kKept, kOffset>(values, lane, held);
    }
}
__device__ constexpr int held_after(int count, int span) {
    for (; span > 1; span /= 2) count = count % 2 == 0 ? count / 2 : count;
    return count;
}
