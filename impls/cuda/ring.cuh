// ring.cuh -- a warp's tiles of K and V by way of shared memory: it issues the copies of those to come itself.
//
//   BULK     a run at a time, the tokens of a tile that follow one another in memory and end up so in a stage; lanes 0-15 copy
//            the runs of K, 16-31 those of V
//   ASYNC    16 bytes a lane
//
// Rows and columns of the MMA are tokens and elements in their order.
#pragma once

#include "cursor.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"

// Specialised by tensor_core.py.
constexpr int kStages = PA_STAGES;
enum Copy { BULK, ASYNC };
constexpr Copy kCopy = PA_COPY;

__device__ constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// A swizzled cache lands as it lies there. Rows of others are spread over the banks by 16 bytes of padding.
constexpr bool kSwizzled = kLayout == HND_SWIZZLED;
constexpr int kRun = kCopy == BULK && kSwizzled ? greatest_common_divisor(kBlockSize, kTile) : 1;    // tokens
constexpr int kRuns = kTile / kRun;
constexpr int kRowBytes = kHeadDim * sizeof(Scalar);
constexpr int kPitch = kSwizzled ? kRowBytes : kRowBytes + 16;    // bytes from a token's row to the next, in a stage
constexpr int kTileBytes = kTile * kPitch;                        // of K or of V
constexpr int kWarpBytes = kStages * 2 * kTileBytes;              // of shared memory
constexpr int kChunks = kRowBytes / 16;                           // of a row
constexpr int kWholeChunks = kRowBytes / 128 * 8;                 // that are swizzled, in groups of eight
constexpr int kArrivals = kCopy == BULK ? 1 : 32;                 // at a stage's barrier, besides the bytes
constexpr int kKeySteps = kHeadDim / 16, kValueSteps = kKeySteps;    // MMA tiles of a tile
constexpr int kScoreSums = 1;                                     // that make a score
constexpr int kAtOnce = 16;                                       // partials read at a time
static_assert(kRuns <= 16, "a lane copies one run");

__shared__ Barrier all_barriers[kWarps][kStages];

// Where a lane's row of a tile is, when matrices are loaded.
struct Row {
    unsigned address;    // in shared memory
    int slot;            // of its token, modulo 8: what its chunks are permuted by

    __device__ unsigned chunk(int step, int half) const {
        if constexpr (!kSwizzled) return address + (2 * step + half) * 16;
        return address + (2 * step >= kWholeChunks ? 2 * step + half : (2 * step + half) ^ slot) * 16;
    }
};

struct Tiles {
    unsigned char* const stages;    // [kStages, 2, kTileBytes]
    Barrier* const barriers;        // [kStages]
    const int lane;

    Cursor next;            // to be copied
    int stage = 0;          // to be read
    unsigned parity = 0;
    Row keys, values;       // of the tile that is read
    unsigned low, high;     // masks of its tokens

    // Before any other thread goes on: initialise the warp's barriers.
    __device__ static void prepare(int warp, int lane) {
        if (lane != 0) return;
        for (int stage = 0; stage < kStages; ++stage) initialise(&all_barriers[warp][stage], kArrivals);
        publish_barriers();
    }

    // Start the copies of the first kStages tiles from `position` on, every kTeam-th of a share that ends at `end`.
    __device__ Tiles(
        const Caches& caches, const Shares& shares, const Segment& segment, int position, int end, unsigned char* memory,
        int warp, int lane)
        : stages(memory + warp * kWarpBytes), barriers(all_barriers[warp]), lane(lane),
          next(caches, shares, segment, position, end, kOneBlock ? 0 : lane % 16 % kRuns * kRun) {
#pragma unroll 1    // one copy of the code that fills is enough
        for (int i = 0; i < kStages; ++i) fill(i);
    }

    // Wait for the next tile, whose first token is `first_token`; `left` of its tokens exist, at least one.
    __device__ void wait(int first_token, int left) {
        ::wait(barriers + stage, parity);
        const unsigned char* tile = stages + stage * 2 * kTileBytes;
        keys = row(tile, lane % 16, first_token);
        values = row(tile + kTileBytes, lane % 8 + lane / 16 * 8, first_token);
        const int token = lane % 4 * 2;
        low = exist(left - token), high = exist(left - token - 8);
    }

    // K as operand A, and the query's elements that belong to it: word `half` of a lane's two.
    __device__ void key(unsigned (&a)[4], int step) const { load_matrices(a, keys.chunk(step, lane / 16)); }
    __device__ static int query_word(int step, int half, int lane) { return step * 8 + half * 4 + lane % 4; }


    // Which of a score's sums a step adds to, and the score in place of the first.
    __device__ static int score_sum(int) { return 0; }
    __device__ static void join(float (&)[kScoreSums][4]) {}

    // V, transposed, as operand A. Slots without a token may hold anything, and 0 * NaN is NaN.
    __device__ void value(unsigned (&a)[4], int step) const {
        load_transposed(a, values.chunk(step, lane / 8 % 2));
        a[0] &= low, a[1] &= low, a[2] &= high, a[3] &= high;
    }

    // Store a lane's sums of one head, column `h` of its two, in a row of them.
    __device__ static void store(float* row, const float (&sums)[kValueSteps][4], int h, int lane) {
#pragma unroll
        for (int step = 0; step < kValueSteps; ++step) {
            row[step * 16 + lane / 4] = sums[step][h];
            row[step * 16 + 8 + lane / 4] = sums[step][2 + h];
        }
    }

    __device__ void keys_are_read() {}    // the stage holds V, too

    // Give the stage back, which all lanes have read, for a tile to come.
    __device__ void values_are_read() {
        __syncwarp();
        fill(stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
    }

    __device__ static Row row(const unsigned char* tile, int row, int first_token) {
        const int slot = kBlockSize % 8 == 0 ? row : (first_token + row) % kBlockSize;
        return {shared_address(tile + row * kPitch), slot % 8};
    }

    // A mask of two 16-bit halves, the elements of two tokens, where `left` of them and all after them exist.
    __device__ static unsigned exist(int left) { return left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0; }

    __device__ void fill(int to) {
        if (next.tokens == 0) return;
        unsigned char* tile = stages + to * 2 * kTileBytes;
        if constexpr (kCopy == BULK) {
            const bool is_value = lane >= 16;
            copy_run(
                tile + is_value * kTileBytes, is_value ? next.caches.value_cache : next.caches.key_cache,
                is_value ? next.values() : next.keys(), barriers + to);
            __syncwarp();
            if (lane == 0) arrive(barriers + to);    // the phase ends with the last byte, not before all said what they expect
        } else {
            copy_chunks(tile, next.caches.key_cache, next.keys());
            copy_chunks(tile + kTileBytes, next.caches.value_cache, next.values());
            arrive_after_copies(barriers + to);
        }
        next.advance();
    }

    __device__ void copy_run(unsigned char* tile, const Scalar* cache, const KvHead& head, Barrier* barrier) {
        const int run = lane % 16, tokens = run < kRuns ? min(kRun, next.tokens - run * kRun) : 0;
        if (tokens <= 0) return;
        const Scalar* from = cache + head.row(next.block, (next.first_token() + run * kRun) % kBlockSize);
        copy_bulk(tile + run * kRun * kPitch, from, tokens * kRowBytes, barrier);
    }

    __device__ void copy_chunks(unsigned char* tile, const Scalar* cache, const KvHead& head) {
        const int first_slot = next.first_token() % kBlockSize;
        const Scalar* first_row = cache + head.row(next.block, first_slot);    // where one block holds them all
#pragma unroll
        for (int begin = 0; begin < kTile * kChunks; begin += 32) {
            const int i = begin + lane, row = i / kChunks, chunk = i % kChunks;
            const Scalar* from = first_row + row * head.row_stride();
            if constexpr (!kOneBlock) {
                const int its_block = __shfl_sync(0xffffffffu, next.block, row % kTile);
                from = cache + head.row(its_block, (first_slot + row) % kBlockSize);
            }
            if (row < next.tokens) copy_chunk(tile + row * kPitch + chunk * 16, from + chunk * (16 / sizeof(Scalar)));
        }
    }
};
