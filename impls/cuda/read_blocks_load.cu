// read_blocks_load.cu -- read K and V of every token once with 16-byte loads, and sum their 32-bit words.
//
// Tensors
//   key_cache, value_cache    blocks of kBlockVectors vectors, `*_block_stride` vectors apart
//   entries                   [num_vectors / kBlockVectors]    block id and tokens held, of all sequences
//   checksum                  [grid * kWarps]                  int32, one sum a warp, modulo 2^32
// Work      persistent CTAs stride over the row of vectors (read_blocks.cuh); neighbours go to neighbouring threads, so all
//           heads of a block are read at about the same time
// Hides     the entries of the next tile are fetched before this tile's 2 * kLoads loads are waited for.

#include "read_blocks.cuh"

constexpr unsigned kLoads = PA_LOADS;                   // vectors of K, and of V, that a thread has in flight
constexpr unsigned kCtasPerSm = PA_CTAS_PER_SM;
constexpr unsigned kThreads = kWarps * 32;
constexpr unsigned kTileVectors = kThreads * kLoads;

// Load past L1, which each byte passes once; the predicate keeps the loads of a tile free of branches between them.
__device__ __forceinline__ uint4 load_if(bool wanted, const uint4* address) {
    uint4 loaded = {0, 0, 0, 0};
    asm volatile(
        "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
        "  @wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(loaded.x), "+r"(loaded.y), "+r"(loaded.z), "+r"(loaded.w)
        : "l"(address), "r"(static_cast<unsigned>(wanted)));
    return loaded;
}

__device__ __forceinline__ void fetch(Entry (&tile)[kLoads], const Entry* entries, unsigned first, unsigned num_vectors) {
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
        const unsigned vector = first + i * kThreads;
        tile[i] = vector < num_vectors ? entries[vector / kBlockVectors] : Entry{0, 0};
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm) read_blocks_load(
    int* __restrict__ checksum, const uint4* __restrict__ key_cache, const uint4* __restrict__ value_cache,
    const Entry* __restrict__ entries, long long key_block_stride, long long value_block_stride, unsigned num_vectors) {
    const unsigned stride = gridDim.x * kTileVectors;
    unsigned sum = 0;

    Entry ahead[kLoads];
    unsigned first = blockIdx.x * kTileVectors + threadIdx.x;
    fetch(ahead, entries, first, num_vectors);
    for (; first < num_vectors; first += stride) {
        uint4 keys[kLoads], values[kLoads];
        const uint4 *key_at[kLoads], *value_at[kLoads];
        bool wanted[kLoads];
#pragma unroll
        for (unsigned i = 0; i < kLoads; ++i) {
            const unsigned place = (first + i * kThreads) % kBlockVectors;
            wanted[i] = holds_token(place, ahead[i].num_tokens);
            key_at[i] = key_cache + ahead[i].block * key_block_stride + place;
            value_at[i] = value_cache + ahead[i].block * value_block_stride + place;
        }
        fetch(ahead, entries, first + stride, num_vectors);
#pragma unroll
        for (unsigned i = 0; i < kLoads; ++i) {
            keys[i] = load_if(wanted[i], key_at[i]);
            values[i] = load_if(wanted[i], value_at[i]);
        }
#pragma unroll
        for (unsigned i = 0; i < kLoads; ++i) sum += sum_words(keys[i]) + sum_words(values[i]);
    }

    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) checksum[blockIdx.x * kWarps + threadIdx.x / 32] = static_cast<int>(sum);
}
