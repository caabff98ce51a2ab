// pieces.cuh -- which rows a CTA takes next where prefixes are shared: pieces of runs, as the host lists them.
//
// A piece is a range of a run's tokens, for kRows / kGroup query tokens of its sequences. An item is a piece for one KV head. Those
// of all heads come one after the other, and so do pieces of the same tokens: they read the same blocks at about the same time.
#pragma once

#include "paged.cuh"
#include "prefix.cuh"

// Specialised by prefix.py.
constexpr int kRows = PA_ROWS;     // of an item
constexpr unsigned kAll = 0xffffffffu;
static_assert(kGroup <= kRows, "PA_ROWS must hold the heads of a query token");

// What a CTA works on; as it lies in shared memory.
struct Item {
    const int* tokens;              // of the piece's query tokens, which they are
    int seq;                        // whose table has the run
    int begin, num_tokens;          // the piece, and the tokens up to its end
    int first_place, num_queries;
    int kv_head;
    int first_row;                  // 0; -1: there is nothing more to do

    __device__ int first_token() const { return begin; }
    __device__ long long token(int query) const { return __ldg(tokens + query); }
    __device__ int num_rows() const { return num_queries * kGroup; }
    __device__ int num_keys() const { return num_tokens - begin; }
    __device__ int num_keys(int) const { return num_keys(); }    // all rows see all of a run
};

struct Pieces {
    static constexpr bool kDrawn = true;
    const int *places, *ends;       // [num_pieces + 1] where the piece's query tokens begin, [num_pieces] its tokens end
    const int num_pieces, num_kv_heads, lane;
    const Prefix& prefix;

    // Write the item of this number to `to`, by one lane. Pieces without query tokens are the last.
    __device__ void find(int number, Item* to) const {
        if (lane != 0) return;
        const int piece = number / num_kv_heads;
        const bool there = piece < num_pieces;
        const int first = there ? __ldg(places + piece) : 0, past = there ? __ldg(places + piece + 1) : 0;
        if (first == past) {
            to->first_row = -1;
            return;
        }
        *to = {prefix.tokens + first, __ldg(prefix.table_rows + piece), __ldg(prefix.firsts + piece), __ldg(ends + piece),
               first, past - first, number % num_kv_heads, 0};
    }
};
