// verify.cu -- as tensor_core_general.cu, for a few query tokens of large groups, by warpgroups that multiply and one that copies. sm_90a.
//
//   out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h / kGroup
//   token i of a sequence with q_len query tokens sees keys t <= seq_len - q_len + i
//
// Tensors      as in tensor_core_general.cu, but for
//   key_cache, value_cache  by kLayout, blocks strided                               Scalar, 16-byte aligned
//   sums, stats, arrived    the workspace of partials.cuh, a counter for each warpgroup
// Work         a CTA an SM, block (kWarpgroups + 1) * 128 threads: its roles are in roles.cuh, its share of the work is in shares.cuh
//   CTA            a segment at a time, in tiles of kTile tokens: kRows query rows of one KV head, K and V read once for them
//   warpgroup      64 of the rows: warpgroup.cuh
// Reads        no table entry past the last block, no slot past seq_lens[s].
// Sums         in float; weights are rounded to Scalar for the second product.

#include "early.cuh"
#include "segments.cuh"
#include "roles.cuh"

static_assert(kWarps * 32 == kCtaThreads, "PA_WARPS must be those that multiply and the four that copy");

// Where rows go.
struct Output {
    Scalar* out;
    float* lse;
    const float* sinks;
    int num_q_heads;
    long long out_stride;
    Prefix prefix;

    // Four elements of packed row `row`; its lse with the first four.
    __device__ void write(const Item& item, int row, int quad, Merged merged) const {
        const int head = head_of(item, row);
        if constexpr (kRole == OWN) item.left.add_to(merged, prefix, row / kGroup, num_q_heads, head, quad);
        if constexpr (kSinks) merged.add_sink(__ldg(sinks + head) * kLog2e);
        write_out(at(item, row, head), lse_at(item, row, head), quad, merged);
    }

    // All that a warpgroup has of a row, by the lanes that have parts of it.
    __device__ void write(const Item& item, int row, const Rows& rows, int r, float total, int lane) const {
        const int head = head_of(item, row);
        Merged merged = {rows.whole_most(r), total, make_float4(1.0f, 0.0f, 0.0f, 0.0f)};    // sums.x: what they are multiplied by
        if constexpr (kSinks) merged.add_sink(__ldg(sinks + head) * kLog2e);
        const bool empty = merged.total == 0.0f;
        rows.write(r, lane, empty ? 0.0f : merged.sums.x / merged.total, at(item, row, head));
        if (lane % 4 == 0) *lse_at(item, row, head) = empty ? -CUDART_INF_F : fmaf(merged.most, kLn2, logf(merged.total));
    }

    __device__ int head_of(const Item& item, int row) const { return item.kv_head * kGroup + row % kGroup; }
    __device__ Scalar* at(const Item& item, int row, int head) const {
        return out + item.token(row / kGroup) * out_stride + head * kHeadDim;
    }
    __device__ float* lse_at(const Item& item, int row, int head) const { return lse + item.token(row / kGroup) * num_q_heads + head; }
};

// Write a warpgroup's rows of a segment, of which a thread has `row` and `row` + 8; or leave them, and if no other share is still to
// come write those of all.
__device__ __forceinline__ void finish(
    const Rows& rows, const Item& item, int row, int warpgroup, int lane, const Workspace& workspace, const Output& output) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = rows.whole_total(r);
        const int packed = row + 8 * r, left = item.place * kRows + packed - item.first_row;
        if (packed >= item.num_rows()) continue;
        if (item.whole) {
            output.write(item, packed, rows, r, total, lane);
            continue;
        }
        rows.store(r, lane, workspace.sums + (long long)left * kQuads);
        if (lane % 4 == 0) workspace.stats[left] = make_float2(rows.whole_most(r), total);
    }
    if (item.whole) return;
    const int thread = threadIdx.x % 128, first = warpgroup * 64, past = min(first + 64, item.num_rows() - item.first_row);
    if constexpr (kRole == OWN) wait_for_launch_before();    // which left the pieces' sums
    if (!arrives_last(workspace.arrived, item.spread.count(), warpgroup + 1, thread == 0)) return;
    for (int i = first * kQuads + thread; i < past * kQuads; i += 128) {
        const int of_part = i / kQuads, quad = i % kQuads;
        output.write(item, item.first_row + of_part, quad, merge_shares(workspace, item.spread, of_part, quad));
    }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, 1) verify(
    Scalar* out, float* lse, const Scalar* query, const Scalar* key_cache, const Scalar* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale LAYER_PARAMETER PREFIX_PARAMETER, float4* sums, float2* stats, unsigned* arrived, int lanes) {
    extern __shared__ __align__(1024) unsigned char memory[];    // Shared, sequences; sized by verify.py
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Sequence* sequences = reinterpret_cast<Sequence*>(memory + sizeof(Shared));
    const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4 - 1;
    if (threadIdx.x == 0) initialise(shared);
    list_sequences(sequences, seq_lens, query_start_loc, num_seqs, prefix.firsts);
    const int num_parts = num_kv_heads * kParts;
    const Shares shares(sequences, num_seqs, lanes, num_parts / lanes, gridDim.x);
    write_empty(out, lse, shares, query_start_loc, num_q_heads, out_stride, layer.sinks);

    if (warpgroup < 0) {
        const Tables tables{
            query, key_cache, value_cache, block_tables, table_stride, query_stride, key_stride, value_stride, num_kv_heads};
        const Segments segments(shares, prefix, query_start_loc, lane);
        copy_items<Segments>(shared, Copier(shared, tables, threadIdx.x, lane), nullptr, warp, segments);
    } else {
        const Output output{out, lse, layer.sinks, num_q_heads, out_stride, prefix};
        multiply_items(shared, scale, warpgroup, warp, lane, [&](const Rows& rows, const Item& item, int row) {
            unsigned* counter = arrived + ((long long)item.seq * num_parts + item.part) * kWarpgroups + warpgroup;
            finish(rows, item, row, warpgroup, lane, {sums, stats, counter}, output);
        });
    }
    if constexpr (kRole == OWN) wait_for_launch_before();
}
