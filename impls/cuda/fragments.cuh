// fragments.cuh -- a warp's tiles of K and V without shared memory: 16-byte loads whose registers are operands of the MMA as they
// come. The tile after the one in hand is on its way: its K takes the registers of this one's when scores are done, its V those
// of V when sums are.
//
//   K    lane l loads chunks 4s + l % 4 of tokens l / 4 and 8 further on, 64 bytes of eight rows at a time. The MMA's elements
//        2 (l % 4) and the next, and those 8 further on, of steps 2s and 2s + 1, are the chunk's four words: elements of a score may
//        be added in any order, as long as the query's come in the same.
//   V    lane l loads chunks 8i + l / 4 of tokens 2 (l % 4) and the next, and of those 8 further on, 128 bytes of four rows at a
//        time. Halves of two tokens' words make a register; rows l / 4 and l / 4 + 8 of step 4i + w are the elements of word w.
//
// Where a row ends inside such a group of chunks, lanes without one hold zeros.
#pragma once

#include "cursor.cuh"
#include "mma.cuh"

// Specialised by tensor_core.py.
enum Copy { LOAD, LOAD_ONCE };    // ONCE: what was read is the first to leave L2
constexpr Copy kCopy = PA_COPY;

constexpr int kWarpBytes = 0;                              // of shared memory
constexpr int kChunks = kHeadDim * sizeof(Scalar) / 16;    // of a row
constexpr int kKeyLoads = (kChunks + 3) / 4;               // of a token
constexpr int kValueLoads = (kChunks + 7) / 8;
constexpr int kKeySteps = 2 * kKeyLoads, kValueSteps = 4 * kValueLoads;    // MMA tiles of a tile
constexpr int kAtOnce = 8;                       // partials read at a time: registers hold the next tile
static_assert(kLayout != HND_SWIZZLED, "PA_LAYOUT must keep the chunks of a row in order");

// Load 16 bytes past L1 if `wanted`, or leave `to` alone. Volatile, so that a load stays where it was issued. L2 is asked for
// whole lines of 128 bytes: it would fetch them in halves.
__device__ __forceinline__ void load_chunk(unsigned (&to)[4], const uint4* from, bool wanted) {
    if constexpr (kCopy == LOAD_ONCE) {
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile(
            "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
            "  @wanted ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %6; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "l"(from), "r"(static_cast<unsigned>(wanted)), "l"(policy));
    } else {
        asm volatile(
            "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
            "  @wanted ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "l"(from), "r"(static_cast<unsigned>(wanted)));
    }
}

// Volatile, so that a branch around it stays one: a tile where no token is missing would else select each register.
__device__ __forceinline__ void clear(unsigned& x) { asm volatile("mov.u32 %0, 0;" : "=r"(x)); }

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

    __device__ int slot(int token) const { return (cursor.first_token() + token) % kBlockSize; }
    __device__ long long pitch() const { return head.row_stride() / (16 / sizeof(Scalar)); }
    __device__ const uint4* at(int block, int slot) const {
        return reinterpret_cast<const uint4*>(cache + head.row(block, slot));
    }
};

struct Tiles {
    const int lane;

    Cursor next;            // to be loaded
    unsigned keys[2][kKeyLoads][4] = {};
    unsigned values[4][kValueLoads][4] = {};

    __device__ static void prepare(int, int) {}

    // Start the loads of the tile at `position`; every kTeam-th follows, of a share that ends at `end`.
    __device__ Tiles(
        const Caches& caches, const Shares& shares, const Segment& segment, int position, int end, unsigned char*, int, int lane)
        : lane(lane), next(caches, shares, segment, position, end, kOneBlock ? 0 : lane % kTile) {
        keys_are_read();
        values_are_read();
    }

    __device__ void wait(int, int) {}    // whoever reads a register waits

    // K as operand A, and the query's elements that belong to it: word `half` of a lane's two.
    __device__ void key(unsigned (&a)[4], int step) const {
        const int word = step % 2 * 2;
        a[0] = keys[0][step / 2][word], a[1] = keys[1][step / 2][word];
        a[2] = keys[0][step / 2][word + 1], a[3] = keys[1][step / 2][word + 1];
    }
    __device__ static int query_word(int step, int half, int lane) {
        return (step / 2 * 4 + lane % 4) * 4 + step % 2 * 2 + half;
    }

    // V, transposed, as operand A.
    __device__ void value(unsigned (&a)[4], int step) const {
        constexpr unsigned kLower = 0x5410, kUpper = 0x7632;    // halves of two words
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const unsigned x = values[2 * pair][step / 4][step % 4], y = values[2 * pair + 1][step / 4][step % 4];
            a[2 * pair] = __byte_perm(x, y, kLower), a[2 * pair + 1] = __byte_perm(x, y, kUpper);
        }
    }

    // Store a lane's sums of one head, column `h` of its two, in a row of them.
    __device__ static void store(float* row, const float (&sums)[kValueSteps][4], int h, int lane) {
#pragma unroll
        for (int step = 0; step < kValueSteps; step += 2) {
            const int element = (step / 4 * 8 + lane / 4) * 8 + step % 4 * 2;
            if (element >= kHeadDim) continue;
            *reinterpret_cast<float4*>(row + element) =
                make_float4(sums[step][h], sums[step][2 + h], sums[step + 1][h], sums[step + 1][2 + h]);
        }
    }

    // Load K of the next tile. Rows of tokens that are not there keep what they hold: their scores are not used.
    __device__ void keys_are_read() {
        const int token = lane / 4, chunk = lane % 4;
        const Rows rows(next, next.caches.key_cache, next.keys(), token);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4* from = rows.further(i * 8) + chunk;
#pragma unroll
            for (int load = 0; load < kKeyLoads; ++load) {
                const bool exists = kChunks % 4 == 0 || load * 4 + chunk < kChunks;
                load_chunk(keys[i][load], from + load * 4, token + i * 8 < next.tokens && exists);
            }
        }
    }

    // Load V of the next tile, and go on to the one after. Tokens that are not there have zeros, since 0 * NaN is NaN.
    __device__ void values_are_read() {
        const int token = lane % 4 * 2, chunk = lane / 4;
        const Rows rows(next, next.caches.value_cache, next.values(), token);
        if (next.tokens < kTile) clear_values();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int offset = i % 2 + i / 2 * 8;
            const uint4* from = rows.further(offset) + chunk;
#pragma unroll
            for (int load = 0; load < kValueLoads; ++load) {
                const bool exists = kChunks % 8 == 0 || load * 8 + chunk < kChunks;
                load_chunk(values[i][load], from + load * 8, token + offset < next.tokens && exists);
            }
        }
        next.advance();
    }

    __device__ void clear_values() {
#pragma unroll
        for (int i = 0; i < 4 * kValueLoads * 4; ++i) clear(values[i / 4 / kValueLoads][i / 4 % kValueLoads][i % 4]);
    }
};
