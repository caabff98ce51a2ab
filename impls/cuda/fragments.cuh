// fragments.cuh -- a warp's tiles of K and V without shared memory: 16-byte loads whose registers are operands of the MMA as they
// come. One tile is ahead: its K is loaded to the registers of this one's when scores are done, its V when sums are.
//
// Both come by whole lines of 128 bytes, four rows at a time. Lane l loads, of each line,
//
//   V    chunk l / 4 of tokens 2 (l % 4) + 0, 1, 8, 9. Halves of two tokens' words make a register of operand A: of step 4i + w,
//        rows l / 4 and 8 further on are the two elements of word w of the chunk in line i.
//   K    chunk l % 8 of tokens 2 (l / 8) + 0, 8, and chunk l % 8 ^ 4 of + 1, 9. A chunk's words are a row's elements in two
//        steps: elements of a score may be added in any order, as long as the query's come in the same. Row r is token r in the
//        steps of chunks 0 to 3; in those of chunks 4 to 7, which its lanes hold of the neighbour, it is token r ^ 1. The two
//        are summed apart, and joined across lanes.
//
// Where a row ends inside a line, lanes without a chunk hold zeros.
#pragma once

#include "accumulator.cuh"
#include "loads.cuh"

constexpr int kLines = (kChunks + 7) / 8;            // of a row, the last one perhaps not whole; kSteps is four for each
constexpr int kKeySteps = (kChunks + 3) / 4 * 2;     // of these, those in which K has elements
static_assert(kLoads && !kSwizzled, "PA_LAYOUT must keep the chunks of a row in order");

// Rows of the cursor's tile, from token `token` on.
struct Rows {
    const Cursor& cursor;
    const Scalar* const cache;
    const KvHead head;
    const int token;
    const uint4* row;    // of that token, where one block holds all

    __device__ Rows(const Cursor& cursor, const Scalar* cache, const KvHead& head, int token)
        : cursor(cursor), cache(cache), head(head), token(token) {
        if (kOneBlock) row = at(cursor.block, slot(0)) + token * pitch();
    }
    __device__ const uint4* further(int tokens) const {    // all lanes call it
        if constexpr (kOneBlock) return row + tokens * pitch();
        return at(__shfl_sync(0xffffffffu, cursor.block, token + tokens), slot(token + tokens));
    }

    __device__ int slot(int token) const { return (cursor.tile_token() + token) % kBlockSize; }
    __device__ unsigned pitch() const { return static_cast<unsigned>(head.row_stride()) / (16 / sizeof(Scalar)); }
    __device__ const uint4* at(int block, int slot) const {
        return reinterpret_cast<const uint4*>(cache + head.row(block, slot));
    }
};

// What Ring is to Accumulator, this is to FragmentAccumulator.
struct Fragments : Cursor {
    int tokens;    // of the tile to load; 0 past the end
    unsigned keys[4][kLines][4] = {};
    unsigned values[4][kLines][4] = {};

    // Start the loads of the tile at `position`; every kTeam-th follows, of a share that ends at `end`.
    __device__ Fragments(
        const Caches& caches, const Shares& shares, const Segment& segment, int position, int end, unsigned char*, Barrier*,
        int lane)
        : Cursor(caches, shares, segment, position, end, lane) {
        count();
        load_keys();
        load_values();
    }

    // Whoever reads a register waits for it, and whoever has read it loads the next.
    __device__ Fragments& wait() { return *this; }
    __device__ void refill() {}

    // K as operand A: registers of the token, of the lane's two, whose chunk belongs into the step.
    __device__ void key(unsigned (&a)[4], int step) const {
        const bool is_even = lane / 4 % 2 == score_sum(step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int even = i % 2 * 2, word = step % 2 * 2 + i / 2;
            a[i] = is_even ? keys[even][step / 4][word] : keys[even + 1][step / 4][word];
        }
    }
    __device__ static int score_sum(int step) { return step / 2 % 2; }    // the token's own, or its neighbour's

    // V, transposed, as operand A.
    __device__ void value(unsigned (&a)[4], int step) const {
        constexpr unsigned kLower = 0x5410, kUpper = 0x7632;    // halves of two words
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const unsigned x = values[2 * pair][step / 4][step % 4], y = values[2 * pair + 1][step / 4][step % 4];
            a[2 * pair] = __byte_perm(x, y, kLower), a[2 * pair + 1] = __byte_perm(x, y, kUpper);
        }
    }

    // Load K of the next tile. Rows of tokens that are not there keep what they hold: their scores are not used.
    __device__ void load_keys() {
        const int me = opaque(lane), chunk = me % 8;
        load(keys, caches.key_cache, {caches.key_stride, caches.num_kv_heads, kv_head()}, me / 8 * 2, chunk, chunk ^ 4);
    }

    // Load V of the next tile, and go on to the one after. Tokens that are not there have zeros, since 0 * NaN is NaN.
    __device__ void load_values() {
        if (tokens < kTile) {
#pragma unroll
            for (int i = 0; i < 4 * kLines * 4; ++i) clear(values[i / 4 / kLines][i / 4 % kLines][i % 4]);
        }
        const int me = opaque(lane);
        load(values, caches.value_cache, {caches.value_stride, caches.num_kv_heads, kv_head()}, me % 4 * 2, me / 4, me / 4);
        advance();
        count();
    }

    __device__ void count() { tokens = position < end ? tile_tokens() : 0; }

    // Load chunks `even` of each eight of tokens `token` and token + 8, and chunks `odd` of token + 1 and + 9.
    __device__ void load(
        unsigned (&to)[4][kLines][4], const Scalar* cache, const KvHead& head, int token, int even, int odd) const {
        const Rows rows(*this, cache, head, token);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int further = i % 2 + i / 2 * 8, chunk = i % 2 == 0 ? even : odd;
            const uint4* from = rows.further(further) + chunk;
#pragma unroll
            for (int l = 0; l < kLines; ++l) {
                const bool exists = kChunks % 8 == 0 || l * 8 + chunk < kChunks;
                load_chunk<kCopy == LOAD_ONCE>(to[i][l], from + l * 8, token + further < tokens && exists);
            }
        }
    }
};

// The query's elements, and those of the sums, in the order of the fragments.
struct FragmentAccumulator : Accumulator {
    __device__ FragmentAccumulator(const Scalar* query_rows, int num_heads, float scale, int lane) : Accumulator(scale, lane) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int head = c * 8 + lane / 4;
            const unsigned* row = reinterpret_cast<const unsigned*>(query_rows + head * kHeadDim);
#pragma unroll
            for (int i = 0; i < kKeySteps * 2; ++i) {
                const int step = i / 2, word = (step / 2 * 4 + lane % 4) * 4 + step % 2 * 2 + i % 2;
                query[c][step][i % 2] = head < num_heads && word < kHeadDim / 2 ? __ldg(row + word) : 0;
            }
        }
    }

    // As Accumulator::add; the tile after this one is loaded on the way.
    __device__ void add(Fragments& tile, int, int left) {
        float scores[kColumns][2][4] = {};    // [.][score_sum]
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
            unsigned a[4];
            tile.key(a, step);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) multiply_add(scores[c][Fragments::score_sum(step)], a, query[c][step]);
        }
        tile.load_keys();
        unsigned weights[kColumns][2];    // B of the second product
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[c][0][i] += __shfl_xor_sync(0xffffffffu, scores[c][1][i], 4);
            to_weights(c, scores[c][0], weights[c], left);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            unsigned a[4];
            tile.value(a, step);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) multiply_add(sums[c][step], a, weights[c]);
        }
        tile.load_values();
    }

    // Store the warp's partials.
    __device__ void leave(Partials& to) {
#pragma unroll
        for (int i = 0; i < kColumns * 2; ++i) {
            const int c = i / 2, h = i % 2, head = c * 8 + lane % 4 * 2 + h;
            for (int offset = 4; offset < 32; offset *= 2) total[c][h] += __shfl_xor_sync(0xffffffffu, total[c][h], offset);
            if (head >= kHeads) continue;
            if (lane / 4 == 0) to.stats[head] = make_float2(most[c][h], total[c][h]);
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                const int element = (step / 4 * 8 + lane / 4) * 8 + step % 4 * 2;
                if (element >= kHeadDim) continue;
                *reinterpret_cast<float4*>(&to.sums[head][element]) =
                    make_float4(sums[c][step][h], sums[c][step][2 + h], sums[c][step + 1][h], sums[c][step + 1][2 + h]);
            }
        }
    }
};
