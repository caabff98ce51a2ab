// read_blocks.cuh -- the blocks in use as one long row of vectors, which the readers cut into equal shares.
//
//   vector w of the row is vector w % kBlockVectors of the block in entry w / kBlockVectors of `entries`
//
// A block is contiguous in HND (and HND_SWIZZLED), NHD and KV_NHD alike. In a sequence's last block only the slots that hold
// a token are read: in NHD the first bytes of the block, in HND the first bytes of each head's part, called a run here.

#pragma once

// Specialised by jit.py.
constexpr unsigned kTokenVectors = PA_TOKEN_VECTORS;    // 16 bytes each; HND one head's row of a token, NHD all heads'
constexpr unsigned kRuns = PA_RUNS;                     // of a block: HND num_kv_heads, NHD 1
constexpr unsigned kBlockSize = PA_BLOCK_SIZE;          // tokens
constexpr unsigned kWarps = PA_WARPS;                   // of a CTA

constexpr unsigned kRunVectors = kBlockSize * kTokenVectors;
constexpr unsigned kBlockVectors = kRuns * kRunVectors;

struct alignas(8) Entry {    // one load
    int block;
    int num_tokens;    // that the block holds; 0 reads nothing
};

// Whether vector `place` of a block belongs to one of its first num_tokens slots.
__device__ __forceinline__ bool holds_token(unsigned place, int num_tokens) {
    return place % kRunVectors < num_tokens * kTokenVectors;
}

__device__ __forceinline__ unsigned sum_words(uint4 vector) {
    return vector.x + vector.y + vector.z + vector.w;
}
