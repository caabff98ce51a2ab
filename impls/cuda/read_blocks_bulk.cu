// read_blocks_bulk.cu -- read K and V of every token once with bulk copies to shared memory, and sum their 32-bit words.
//
// Tensors
//   key_cache, value_cache    blocks of kBlockVectors vectors, `*_block_stride` vectors apart
//   entries                   [num_vectors / kBlockVectors]    block id and tokens held, of all sequences
//   checksum                  [grid * kWarps]                  int32, one sum a warp, modulo 2^32
// Work      each warp strides over chunks of kChunkVectors of the row (read_blocks.cuh), neighbouring chunks go to neighbouring
//           warps; it fills its own ring of kStages stages, each a chunk of K and one of V, and waits for nobody else
//   lane      issues the copies of one block of the chunk: one each for a full block, one a run for a sequence's last
// Hides     a stage's entries are fetched one fill ahead.

#include "mbarrier.cuh"
#include "read_blocks.cuh"

constexpr unsigned kStages = PA_STAGES;
constexpr unsigned kChunkVectors = PA_CHUNK_BYTES / sizeof(uint4);
constexpr unsigned kEveryLane = 0xffffffffu;
static_assert(kHasBulkCopies, "cp.async.bulk needs sm_90 or newer");
static_assert(kChunkVectors % 32 == 0, "PA_CHUNK_BYTES must be a multiple of 512, a vector for each lane");
static_assert(kStages <= 32, "a warp's stages are bits of one word");

struct Row {
    const uint4* key_cache;
    const uint4* value_cache;
    const Entry* entries;
    long long key_block_stride, value_block_stride;
    unsigned num_vectors;

    __device__ unsigned num_chunks() const { return (num_vectors + kChunkVectors - 1) / kChunkVectors; }

    // The entry of this lane's block of `chunk`.
    __device__ Entry fetch(unsigned chunk, unsigned lane) const {
        if (chunk >= num_chunks()) return {0, 0};
        const unsigned block = chunk * kChunkVectors / kBlockVectors + lane;
        return block < num_vectors / kBlockVectors ? entries[block] : Entry{0, 0};
    }
};

// Copy what lies in vectors [begin, end) of one block and holds tokens to `keys` and `values`, places kept.
__device__ __forceinline__ void copy_block(
    const Row& row, Entry entry, unsigned begin, unsigned end, uint4* keys, uint4* values, Barrier* barrier) {
    const bool full = entry.num_tokens == kBlockSize;
    const unsigned run = full ? kBlockVectors : kRunVectors, used = full ? kBlockVectors : entry.num_tokens * kTokenVectors;
    const uint4* key_block = row.key_cache + entry.block * row.key_block_stride;
    const uint4* value_block = row.value_cache + entry.block * row.value_block_stride;
    for (unsigned run_begin = begin / run * run; run_begin < end; run_begin += run) {
        const unsigned from = max(begin, run_begin), to = min(end, run_begin + used);
        if (from >= to) continue;
        const unsigned bytes = (to - from) * sizeof(uint4);
        copy_bulk(keys + (from - begin), key_block + from, bytes, barrier);
        copy_bulk(values + (from - begin), value_block + from, bytes, barrier);
    }
}

// Start the copies of `chunk` into `stage`; return whether it has vectors that stay unread.
__device__ __forceinline__ bool fill(
    const Row& row, unsigned chunk, unsigned lane, Entry entry, uint4* stage, Barrier* barrier) {
    const unsigned begin = chunk * kChunkVectors, end = min(begin + kChunkVectors, row.num_vectors);
    const unsigned first_block = begin / kBlockVectors;
    bool has_gaps = end - begin < kChunkVectors;
    for (unsigned block = first_block + lane; block * kBlockVectors < end; block += 32) {
        if (block != first_block + lane) entry = row.entries[block];
        const unsigned origin = block * kBlockVectors, from = max(begin, origin), to = min(end, origin + kBlockVectors);
        uint4* keys = stage + (from - begin);
        copy_block(row, entry, from - origin, to - origin, keys, keys + kChunkVectors, barrier);
        has_gaps |= entry.num_tokens < kBlockSize;
    }
    __syncwarp();
    if (lane == 0) arrive(barrier);    // the phase ends with the last byte, not before all lanes have said what they expect
    return __any_sync(kEveryLane, has_gaps);
}

__device__ __forceinline__ unsigned sum_stage(const Row& row, unsigned chunk, unsigned lane, bool has_gaps, const uint4* stage) {
    unsigned sum = 0;
#pragma unroll 4
    for (unsigned i = lane; i < kChunkVectors; i += 32) {
        const unsigned vector = chunk * kChunkVectors + i;
        if (has_gaps) {    // the same for all lanes
            if (vector >= row.num_vectors) break;
            if (!holds_token(vector % kBlockVectors, row.entries[vector / kBlockVectors].num_tokens)) continue;
        }
        sum += sum_words(stage[i]) + sum_words(stage[i + kChunkVectors]);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) read_blocks_bulk(
    int* __restrict__ checksum, const uint4* __restrict__ key_cache, const uint4* __restrict__ value_cache,
    const Entry* __restrict__ entries, long long key_block_stride, long long value_block_stride, unsigned num_vectors) {
    extern __shared__ __align__(128) uint4 stages[];    // [kWarps, kStages, 2, kChunkVectors]
    __shared__ Barrier barriers[kWarps][kStages];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4* ring = stages + warp * kStages * 2 * kChunkVectors;
    if (lane == 0) {
        for (unsigned stage = 0; stage < kStages; ++stage) initialise(&barriers[warp][stage], 1);
        publish_barriers();
    }
    __syncwarp();

    const Row row = {key_cache, value_cache, entries, key_block_stride, value_block_stride, num_vectors};
    const unsigned num_chunks = row.num_chunks(), stride = gridDim.x * kWarps;
    unsigned to_read = blockIdx.x * kWarps + warp, to_fill = to_read;
    unsigned gaps = 0;    // a bit a stage
    Entry ahead = row.fetch(to_fill, lane);
    auto fill_next = [&](unsigned stage) {
        if (to_fill >= num_chunks) return;
        const Entry entry = ahead;
        ahead = row.fetch(to_fill + stride, lane);
        const bool has_gaps = fill(row, to_fill, lane, entry, ring + stage * 2 * kChunkVectors, &barriers[warp][stage]);
        gaps = has_gaps ? gaps | 1u << stage : gaps & ~(1u << stage);
        to_fill += stride;
    };

#pragma unroll 1    // one copy of the code that fills is enough
    for (unsigned stage = 0; stage < kStages; ++stage) fill_next(stage);
    unsigned sum = 0, stage = 0, parity = 0;
    for (; to_read < num_chunks; to_read += stride) {
        wait(&barriers[warp][stage], parity);
        sum += sum_stage(row, to_read, lane, gaps >> stage & 1, ring + stage * 2 * kChunkVectors);
        __syncwarp();    // all lanes have read the stage before it is filled again
        fill_next(stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
    }

    sum = __reduce_add_sync(kEveryLane, sum);
    if (lane == 0) checksum[blockIdx.x * kWarps + warp] = static_cast<int>(sum);
}
