// block_copy.cu -- copy whole blocks inside the caches of many layers at once.
//
//   for source, destination in pairs: cache[destination] = cache[source],   for each cache of `caches`
//
// Tensors
//   caches    pointers to K and V of up to kMaxCaches / 2 layers, by value, in constant memory: no table to upload first
//             a block is kBlockVectors contiguous vectors in every layout; blocks lie `block_stride` vectors apart
//   pairs     [num_pairs, 2]    int32 block ids (source, destination); no pair touches a block that another one writes
// Work      grid (num_pairs * kTiles, caches); a CTA copies one tile of one block, kLoads vectors a thread in flight
// Offsets   64-bit.

// Specialised by jit.py. These are the only macros in the file.
constexpr unsigned kBlockVectors = PA_BLOCK_VECTORS;    // 16 bytes each, of one block of K or of V
constexpr unsigned kThreads = PA_THREADS;
constexpr unsigned kLoads = PA_LOADS;
constexpr unsigned kMaxCaches = PA_MAX_CACHES;

constexpr unsigned kTileVectors = kThreads * kLoads;
constexpr unsigned kTiles = (kBlockVectors + kTileVectors - 1) / kTileVectors;

struct Caches {
    uint4* base[kMaxCaches];
};
static_assert(sizeof(Caches) <= 4000, "kernel parameters are 4 KB in all");

extern "C" __global__ void __launch_bounds__(kThreads) block_copy(
    const __grid_constant__ Caches caches, const int2* __restrict__ pairs, long long block_stride) {
    const int2 pair = pairs[blockIdx.x / kTiles];
    uint4* cache = caches.base[blockIdx.y];
    const uint4* source = cache + pair.x * block_stride;
    uint4* destination = cache + pair.y * block_stride;
    const unsigned first = blockIdx.x % kTiles * kTileVectors + threadIdx.x;

    uint4 vectors[kLoads];
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
        const unsigned vector = first + i * kThreads;
        if (vector < kBlockVectors) vectors[i] = source[vector];
    }
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
        const unsigned vector = first + i * kThreads;
        if (vector < kBlockVectors) destination[vector] = vectors[i];
    }
}
