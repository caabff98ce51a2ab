// prefix.cuh -- a prefix that several sequences share is read once: two launches.
//
//   SHARED    the first takes, in place of sequences, pieces of runs of tokens that several sequences' tables have in common,
//             each for so many of their query tokens as its rows hold. All rows see all of a piece. Its sums are left here, row
//             by row: by prefix.cu, of warpgroup products, or where it cannot by tensor_core_general.cu
//   OWN       the second takes the sequences themselves, from the first token on that no run has, and adds the pieces' sums. It may
//             begin before the first ends (early.cuh)
//
// Runs are found and cut on the host (runs.py), on block ids. One run may continue another, for fewer sequences.
//
//   place     what a piece leaves for one of its query tokens, all heads. Places are counted piece by piece
#pragma once

#include "paged.cuh"

// In global memory, but for the sums written by prefix.py.
struct Prefix {
    const int* firsts;        // [pieces] first token, with OWN [num_seqs] of what is the sequence's own
    const int* table_rows;    // [pieces] whose table has it
    const int* tokens;        // [places] which query token; with SHARED query_start_loc counts these
    const int* lists;         // [num_seqs + 1] with OWN, where a sequence's part of `left` begins
    const int* left;          // of a sequence's pieces, places of its first query token; those of its next ones follow
    float4* sums;             // [places, num_q_heads, kHeadDim / 4]
    float2* stats;            // [places, num_q_heads]    most, total: partials.cuh
};
#ifdef PA_ROLE
#define PREFIX_PARAMETER , const Prefix prefix
#else
#define PREFIX_PARAMETER
constexpr Prefix prefix = {};
#endif
