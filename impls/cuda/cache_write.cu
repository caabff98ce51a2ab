// cache_write.cu -- scatter new keys and values to their slots, 16 bytes a thread.
//
//   key_cache[block(slot[i]), offset(slot[i])] = key[i], the same for value;   slot = block * kBlockSize + offset
//
// and where the cache is quantised key[i] / k_scale, divided and rounded to nearest, what is too large as the largest number.
//
// Tensors      innermost dimension last; only the width of an element matters, so f16 and bf16 share a cubin
//   key, value      [num_tokens, kNumHeads, kHeadDim]    tokens `*_stride` vectors apart: views of a fused QKV will do
//   key_cache, value_cache                               blocks `*_block_stride` vectors apart, inside a block by kLayout:
//     HND           [kNumHeads, kBlockSize, kHeadDim]
//     NHD           [kBlockSize, kNumHeads, kHeadDim]    KV_NHD too: its blocks lie twice as far apart
//     HND_SWIZZLED  as HND, chunk c of token t at chunk c ^ (t % 8)
//     X_PACKED      K [kNumHeads, kHeadDim/x, kBlockSize, x], x = one vector; V [kNumHeads, kHeadDim, kBlockSize]
//   slot_mapping    [num_tokens]                         int64; negative is padding and writes nothing
//   k_scale, v_scale [kNumHeads] or [1]                  float, of a quantised cache
// Work         one thread a vector of a token's row, in K and in V; threads of a warp take neighbours
// Offsets      64-bit from the block id on.

// Specialised by jit.py. These are the only macros in the file.
enum class Layout { HND, NHD, HND_SWIZZLED, X_PACKED };
constexpr Layout kLayout = Layout::PA_LAYOUT;
constexpr unsigned kItemBytes = PA_ITEM_BYTES;    // of an element of the cache: 1, 2 or 4
constexpr unsigned kNumHeads = PA_NUM_HEADS;      // KV heads
constexpr unsigned kHeadDim = PA_HEAD_DIM;        // elements
constexpr unsigned kBlockSize = PA_BLOCK_SIZE;    // tokens
constexpr unsigned kThreads = PA_THREADS;

using Vector = uint4;                             // what one thread moves at a time
static_assert(kHeadDim * kItemBytes % sizeof(Vector) == 0, "a head's row must be whole vectors of 16 bytes");
constexpr unsigned kRowVectors = kHeadDim * kItemBytes / sizeof(Vector);
constexpr unsigned kTokenVectors = kNumHeads * kRowVectors;

#ifdef PA_SOURCE
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using Source = PA_SOURCE;                         // of key and value
constexpr bool kHeadScales = PA_HEAD_SCALES;      // one scale a KV head, else one for all
#define SCALES_PARAMETER , const float* __restrict__ k_scale, const float* __restrict__ v_scale

// Vector `vector` of a token's row in the cache, from the kParts vectors of new elements that go into it.
__device__ __forceinline__ Vector load_new(const Vector* row, unsigned vector, unsigned head, const float* scales) {
    constexpr unsigned kParts = sizeof(Source), kItems = sizeof(Vector) / sizeof(Source);
    const float scale = scales[kHeadScales ? head : 0];
    unsigned words[4] = {};
#pragma unroll
    for (unsigned part = 0; part < kParts; ++part) {
        const Vector loaded = row[vector * kParts + part];
        const Source* items = reinterpret_cast<const Source*>(&loaded);
#pragma unroll
        for (unsigned i = 0; i < kItems; ++i) {
            const unsigned at = part * kItems + i;
            const unsigned stored = __nv_cvt_float_to_fp8(float(items[i]) / scale, __NV_SATFINITE, PA_FORMAT);
            words[at / 4] |= stored << at % 4 * 8;
        }
    }
    return {words[0], words[1], words[2], words[3]};
}
#define LOAD_NEW(tensor, scale) load_new(tensor + token * tensor##_stride, vector, head, scale)
#else
#define SCALES_PARAMETER
#define LOAD_NEW(tensor, scale) tensor[token * tensor##_stride + vector]
#endif

// Where vector `chunk` of a head's row stands inside its block, in vectors. Not for V of X_PACKED, whose rows are scattered.
__device__ __forceinline__ unsigned place_in_block(unsigned head, unsigned offset, unsigned chunk) {
    if constexpr (kLayout == Layout::NHD) return (offset * kNumHeads + head) * kRowVectors + chunk;
    if constexpr (kLayout == Layout::X_PACKED) return (head * kRowVectors + chunk) * kBlockSize + offset;
    if constexpr (kLayout == Layout::HND_SWIZZLED) {
        if (chunk < kRowVectors / 8 * 8) chunk ^= offset % 8;    // a last group of fewer than eight stays as it is
    }
    return (head * kBlockSize + offset) * kRowVectors + chunk;
}

// V of X_PACKED: the elements of a vector lie kBlockSize elements apart.
template <typename Item>
__device__ __forceinline__ void store_elements(Item* block, Vector vector, unsigned head, unsigned offset, unsigned chunk) {
    constexpr unsigned kItems = sizeof(Vector) / sizeof(Item);
    constexpr unsigned kItemsPerWord = sizeof(unsigned) / sizeof(Item);
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    Item* first = block + (head * kHeadDim + chunk * kItems) * kBlockSize + offset;
#pragma unroll
    for (unsigned i = 0; i < kItems; ++i) {
        const unsigned word = words[i / kItemsPerWord];
        first[i * kBlockSize] = static_cast<Item>(word >> (i % kItemsPerWord * 8 * sizeof(Item)));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) cache_write(
    Vector* __restrict__ key_cache, Vector* __restrict__ value_cache,
    const Vector* __restrict__ key, const Vector* __restrict__ value, const long long* __restrict__ slot_mapping,
    long long key_block_stride, long long value_block_stride, long long key_stride, long long value_stride, unsigned num_vectors
    SCALES_PARAMETER) {
    const unsigned index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= num_vectors) return;

    const unsigned token = index / kTokenVectors, vector = index % kTokenVectors;
    const unsigned head = vector / kRowVectors, chunk = vector % kRowVectors;
    const long long slot = slot_mapping[token];
    if (slot < 0) return;

    const unsigned long long block = static_cast<unsigned long long>(slot) / kBlockSize;
    const unsigned offset = static_cast<unsigned>(slot - block * kBlockSize);
    const unsigned place = place_in_block(head, offset, chunk);
    const Vector new_key = LOAD_NEW(key, k_scale);
    const Vector new_value = LOAD_NEW(value, v_scale);

    key_cache[block * key_block_stride + place] = new_key;
    Vector* value_block = value_cache + block * value_block_stride;
    if constexpr (kLayout != Layout::X_PACKED) {
        value_block[place] = new_value;
    } else if constexpr (kItemBytes == 1) {
        store_elements(reinterpret_cast<unsigned char*>(value_block), new_value, head, offset, chunk);
    } else if constexpr (kItemBytes == 2) {
        store_elements(reinterpret_cast<unsigned short*>(value_block), new_value, head, offset, chunk);
    } else {
        store_elements(reinterpret_cast<unsigned*>(value_block), new_value, head, offset, chunk);
    }
}
