// stages.cuh -- what the warpgroup that copies leaves in shared memory: queries, and rings of key and value tiles.
//
// A thread copies 16-byte chunk `thread % 8` of every 16th row, from wherever the row's block is: any layout and block size will
// do. Rows that are not there are zeros, since 0 * NaN is NaN.
//
// `Item`, what a CTA works on, is that of deal.cuh, of pieces.cuh or of segments.cuh, whichever was included.
#pragma once

#include "tile.cuh"
#include "wgmma.cuh"

// Specialised by prefill.py, as the tile is.
constexpr int kStages = PA_STAGES;    // of either ring

constexpr int kWarpgroups = kRows / 64;             // that multiply, 64 rows each
constexpr int kCopiers = 128;                       // threads
constexpr int kColumns = kHeadDim / kWidth;         // columns of rows that a matrix is cut into
constexpr int kTileBytes = kTile * kHeadDim * sizeof(Scalar);
constexpr int kQueryBytes = kRows * kHeadDim * sizeof(Scalar);
constexpr int kStride = kCopiers / 8;               // rows from one to the next of a thread
static_assert(kHeadDim % kWidth == 0, "PA_HEAD_DIM must be a multiple of 64");
static_assert(kRows % 64 == 0, "PA_ROWS must be a multiple of 64");
static_assert(kTile % kStride == 0, "PA_TILE must be a multiple of 16");

// The whole of the CTA's dynamic shared memory.
struct Shared {
    alignas(1024) unsigned char query[kQueryBytes];
    alignas(1024) unsigned char keys[kStages][kTileBytes];
    alignas(1024) unsigned char values[kStages][kTileBytes];
    Barrier query_full, query_empty, keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
    Item items[2];    // taken in turn; one is written again only after its queries have been given back
};
static_assert(sizeof(Shared) == PA_SHARED, "PA_SHARED must be the bytes of Shared, which the launch gives");

// By one thread, before all others begin.
__device__ inline void initialise(Shared& shared) {
    initialise(&shared.query_full, kCopiers + 1);
    initialise(&shared.query_empty, 4 * kWarpgroups);    // a lane of every warp
    for (int stage = 0; stage < kStages; ++stage) {
        initialise(&shared.keys_full[stage], kCopiers);
        initialise(&shared.values_full[stage], kCopiers);
        initialise(&shared.keys_empty[stage], 4 * kWarpgroups);
        initialise(&shared.values_empty[stage], 4 * kWarpgroups);
    }
    publish_barriers();
}

// A place in a ring.
struct Place {
    int stage = 0;
    unsigned parity = 0;
    __device__ void step() { if (++stage == kStages) stage = 0, parity ^= 1; }
};

struct Tables {
    const Scalar *query, *key_cache, *value_cache;
    const int* block_tables;
    long long table_stride, query_stride, key_stride, value_stride;
    int num_kv_heads;
};

// A thread that copies. Its warp's rows of a tile are four of every sixteen; lane l holds the block of the l-th of them, and of
// every 32nd from there on.
struct Copier {
    static constexpr int kSteps = kTile / kStride;          // rows of a tile that a thread copies a chunk of
    static constexpr int kHeld = (kSteps * 4 + 31) / 32;    // blocks that it holds
    static_assert(kHeld <= 2, "PA_TILE must be at most 256");
    using Blocks = int[kHeld];
    Shared& shared;
    const Tables& tables;
    const int thread, lane;
    Place keys, values;
    unsigned query_parity = 1;    // all is empty at first

    __device__ Copier(Shared& shared, const Tables& tables, int thread, int lane)
        : shared(shared), tables(tables), thread(thread), lane(lane) {
        keys.parity = values.parity = 1;
    }
    __device__ int row() const { return thread / 8; }    // its first one
    __device__ int chunk() const { return thread % 8; }
    __device__ int place() const { return row() * kPitch + (chunk() ^ row() % 8) * 16; }    // of that chunk, in bytes

    // All tiles of an item, in the order in which they are used.
    __device__ void copy(const Item& item) {
        const int num_tiles = (item.num_keys() + kTile - 1) / kTile;
        Blocks now, next;
        fetch(now, item, 0);
        if (num_tiles > 0) copy_keys(item, 0, now);
        wait(&shared.query_empty, query_parity);
        if (num_tiles > 0) copy_query(item);
        publish();
        query_parity ^= 1;
#pragma unroll 1
        for (int tile = 0; tile < num_tiles; ++tile) {
            fetch(next, item, tile + 1);
            if (tile + 1 < num_tiles) copy_keys(item, tile + 1, next);
            copy_values(item, tile, now);
#pragma unroll
            for (int h = 0; h < kHeld; ++h) now[h] = next[h];
        }
    }

    // Queries are full once they have landed; that this thread comes by says that the item may be read, too.
    __device__ void publish() const {
        arrive_after_copies(&shared.query_full);
        if (thread == 0) arrive(&shared.query_full);
    }

    // No table entry past the last token's is read.
    __device__ void fetch(Blocks& blocks, const Item& item, int tile) const {
        const int* table = tables.block_tables + item.seq * tables.table_stride;
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const int token = item.first_token() + tile * kTile + (h * 8 + lane / 4) * kStride + thread / 32 * 4 + lane % 4;
            blocks[h] = token < item.num_tokens ? __ldg(table + token / kBlockSize) : 0;
        }
    }

    __device__ void copy_keys(const Item& item, int tile, const Blocks& blocks) {
        wait(&shared.keys_empty[keys.stage], keys.parity);
        copy_tile(shared.keys[keys.stage], tables.key_cache, tables.key_stride, item, tile, blocks);
        arrive_after_copies(&shared.keys_full[keys.stage]);
        keys.step();
    }
    __device__ void copy_values(const Item& item, int tile, const Blocks& blocks) {
        wait(&shared.values_empty[values.stage], values.parity);
        copy_tile(shared.values[values.stage], tables.value_cache, tables.value_stride, item, tile, blocks);
        arrive_after_copies(&shared.values_full[values.stage]);
        values.step();
    }

    // Offsets are in chunks; of blocks in 64 bits, within a block in 32.
    __device__ void copy_tile(
        unsigned char* stage, const Scalar* cache, long long stride, const Item& item, int tile, const Blocks& blocks) const {
        const KvHead head{stride, tables.num_kv_heads, item.kv_head};
        const unsigned block_chunks = stride / 8, row_chunks = head.row_stride() / 8;
        const uint4* rows = reinterpret_cast<const uint4*>(cache + head.row(0, 0));
        const int token = item.first_token() + tile * kTile + row();
#pragma unroll(kBlockSize % kStride == 0 ? kSteps : 2)    // other slots take registers
        for (int i = 0; i < kSteps; ++i) {
            const unsigned block = __shfl_sync(kAll, i < 8 ? blocks[0] : blocks[kHeld - 1], i % 8 * 4 + lane / 8);
            const unsigned slot = (unsigned)(token + i * kStride) % kBlockSize;
            const unsigned lies = kLayout == HND_SWIZZLED ? chunk() ^ slot % 8 : chunk();
            const uint4* from = rows + (unsigned long long)block * block_chunks + (slot * row_chunks + lies);
            const bool there = token + i * kStride < item.num_tokens;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                copy_chunk(stage + (c * kTile + i * kStride) * kPitch + place(), from + c * 8, there);
            }
        }
    }

    __device__ void copy_query(const Item& item) const {
        const Scalar* rows = tables.query + item.kv_head * (kGroup * kHeadDim) + chunk() * 8;
#pragma unroll 2
        for (int i = 0; i < kRows / kStride; ++i) {
            const int packed = item.first_row + row() + i * kStride;
            const bool there = packed < item.num_rows();
            const Scalar* from = there ? rows + item.token(packed / kGroup) * tables.query_stride + packed % kGroup * kHeadDim : rows;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                copy_chunk(shared.query + (c * kRows + i * kStride) * kPitch + place(), from + c * kWidth, there);
            }
        }
    }
};
