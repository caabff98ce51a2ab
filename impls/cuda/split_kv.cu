// split_kv.cu -- paged attention, the sequence cut over CTAs: one CTA per (query token, KV head, split).
//
//   out[i,h,:] = sum_t softmax_t(scale * query[i,h,:] . key[t,g,:]) * value[t,g,:],   g = h / kGroup
//
// Tensors      innermost dimension last
//   query, out              [num_tokens, num_q_heads, kHeadDim], tokens strided      Scalar, 16-byte aligned
//   lse                     [num_tokens, num_q_heads]                                float, natural logarithm
//   key_cache, value_cache  by kLayout, blocks strided                               Scalar, 16-byte aligned
//   block_tables            [num_seqs, table_stride]                                 int32 block ids
//   query_start_loc         [num_seqs + 1]                                           int32
//   seq_lens                [num_seqs]                                               int32 tokens; 0 gives out = 0, lse = -inf
//   split_sums              [num_tokens, num_q_heads, splits, kHeadDim]              float, of exp2(score - most) * value
//   split_stats             [num_tokens, num_q_heads, splits]                        (most, total) of a split
// Work         grid (items * num_kv_heads * kParts), block kWarps * 32 threads; see group.cuh, rows.cuh
//              An item is a split of a row. Only those that hold tokens are counted, so that a long row among short ones
//              costs no CTA that finds nothing to do; CTAs take further items where there are more than the grid has.
//              A row of one split is finished here; of more, by merge_splits.
// Reads        no table entry past the last block, no slot past the visible tokens; K and V once for kHeads query heads.
// Sums         in float.

#include "group.cuh"
#include "splits.cuh"

static_assert(kCut == kStep, "splits must begin where a CTA's tiles do");

// What a CTA has found to do. It lies in shared memory, so that no register holds it while the CTA attends.
struct Item {
    int row;                 // query token; the number of rows where there is nothing left
    int seq, begin, end;     // its tokens
    int split, num_splits;   // of the row
    int kv_head, part;
};

__device__ inline int first_head(const Item& item) { return item.kv_head * kGroup + item.part * kHeads; }
__device__ inline int heads_of(const Item& item) { return min(kHeads, kGroup - item.part * kHeads); }

// Find split number `i` of all, counted row by row. For all threads of a CTA; `item` is for all to read.
__device__ inline void find_item(
    Item& item, int i, int num_rows, int most, int least, const int* query_start_loc, const int* seq_lens, int num_seqs) {
    __shared__ int by_warp[kWarps];
    const Lane me;
    const auto take = [&](int row, const Visible& visible, const Splits& splits, int split) {
        const int begin = split * splits.length, end = min(begin + splits.length, visible.num_tokens);
        item.row = row, item.seq = visible.seq, item.begin = begin, item.end = end;
        item.split = split, item.num_splits = splits.count;
    };
    if (threadIdx.x == 0) item.row = num_rows;
    if (most == 1) {  // items are rows
        if (threadIdx.x == 0 && i < num_rows) {
            const Visible visible = find_visible(i, query_start_loc, seq_lens, num_seqs);
            take(i, visible, {max(visible.num_tokens, 1), 1}, 0);
        }
        __syncthreads();
        return;
    }
    for (int first = 0, before = 0; first < num_rows && before <= i; first += kThreads) {
        const int row = first + me.thread;
        Visible visible = {0, 0};
        Splits splits = {0, 0};
        if (row < num_rows) {
            visible = find_visible(row, query_start_loc, seq_lens, num_seqs);
            splits = cut(visible.num_tokens, most, least);
        }
        int past = splits.count;  // the row's last item is the one before it
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, past, offset);
            if (me.lane >= offset) past += other;
        }
        if (me.lane == 31) by_warp[me.warp] = past;
        __syncthreads();
        past += before;
        for (int w = 0; w < kWarps; ++w) {
            if (w < me.warp) past += by_warp[w];
            before += by_warp[w];
        }
        const int split = i - (past - splits.count);
        if (0 <= split && split < splits.count) take(row, visible, splits, split);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) split_kv(
    Scalar* out, float* lse, const Scalar* query, const Scalar* key_cache, const Scalar* value_cache,
    const int* block_tables, const int* query_start_loc, const int* seq_lens,
    int num_seqs, int num_q_heads, int num_kv_heads,
    long long table_stride, long long query_stride, long long out_stride, long long key_stride, long long value_stride,
    float scale, float* split_sums, float2* split_stats, int num_rows, int num_splits, int min_split) {
    Shared& shared = shared_memory();
    __shared__ Item item;
    __shared__ int next;
    if (threadIdx.x == 0) {
        const int kv_part = blockIdx.x % (num_kv_heads * kParts);
        item.kv_head = kv_part / kParts, item.part = kv_part % kParts;
        next = blockIdx.x / (num_kv_heads * kParts);
    }
    __syncthreads();

    for (;;) {
        find_item(item, next, num_rows, num_splits, min_split, query_start_loc, seq_lens, num_seqs);
        if (item.row == num_rows) return;
        attend(
            shared, query + item.row * query_stride + first_head(item) * kHeadDim, heads_of(item), key_cache, value_cache,
            {key_stride, num_kv_heads, item.kv_head}, {value_stride, num_kv_heads, item.kv_head},
            block_tables + item.seq * table_stride, item.begin, item.end, scale);

        const int q_head = first_head(item), num_heads = heads_of(item);
        const long long row = (long long)item.row * num_q_heads + q_head;
        if (item.num_splits == 1) {
            write_out(out + item.row * out_stride + q_head * kHeadDim, lse + row, shared, num_heads);
        } else {
            for (int i = Lane().thread; i < num_heads * kHeadDim; i += kThreads) {
                const int h = i / kHeadDim, dim = i % kHeadDim;
                const Merged merged = merge_warps(shared, h, dim);
                const long long place = (row + h) * num_splits + item.split;
                split_sums[place * kHeadDim + dim] = merged.sum;
                if (dim == 0) split_stats[place] = make_float2(merged.most, merged.total);
            }
        }
        if (threadIdx.x == 0) next += gridDim.x / (num_kv_heads * kParts);
        __syncthreads();  // all is read, before the next item takes its place
    }
}
