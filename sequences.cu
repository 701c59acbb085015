// sequences.cu: fills the tables of sequences.h. One block walks all documents.
//
//     role          | does
//     every thread  | one document of up to 1024, then the one behind these: its queries and keys, its entries, their items
//
//     barrier in scan        | then
//     __syncthreads, first   | the sum of each warp is in shared memory
//     __syncthreads, second  | warp 0 has scanned these sums
//     __syncthreads, third   | all have read them: the next scan may overwrite them
//
// Uses sequences.h: Sequence, SequencePlan, band_of; flash.h: keys_of_any; ranges.h: used_keys, first_keys;
// portable/chunks.h: chunks_of, items_of, kMostOfRow, kLeastFull; device.h: launch_overlapping, let_next_kernel_start,
// wait_for_kernel_before, why_not.
#include "sequences.h"

#include "device.h"
#include "portable/chunks.h"
#include "ranges.h"

namespace minimal_attn {
namespace {

constexpr int kMostThreads = 1024, kMostWarps = kMostThreads / 32;

// What is scanned, and how two of them combine.
struct Ends {  // of queries and keys
    int q, k;
    __device__ Ends operator+(Ends x) const { return {max(q, x.q), max(k, x.k)}; }
};
struct Counts {
    int few, tiles, items;
    __device__ Counts operator+(Counts x) const { return {few + x.few, tiles + x.tiles, items + x.items}; }
};
struct Work {  // of decode.cu: entries, their keys, the most keys and chunks of one
    int few, most_keys, most_chunks;
    float keys;
    __device__ Work operator+(Work x) const {
        return {few + x.few, max(most_keys, x.most_keys), max(most_chunks, x.most_chunks), keys + x.keys};
    }
};

template <class T>
__device__ T shuffle_up(T x, int n) {
    int (&words)[sizeof(T) / sizeof(int)] = (int (&)[sizeof(T) / sizeof(int)]) x;
#pragma unroll
    for (int &word : words) word = __shfl_up_sync(~0u, word, n);
    return x;
}

// Of a warp's lanes up to this one.
template <class T>
__device__ T scan_warp(T x) {
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
        const T lower = shuffle_up(x, n);
        if (threadIdx.x % 32 >= n) x = lower + x;
    }
    return x;
}

// The sum of `before` and x of all threads up to this one. `before` becomes that of all threads.
template <class T>
__device__ T scan(T x, T &before) {
    __shared__ T of_warps[kMostWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = scan_warp(x);
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
    if (warp == 0) {
        const T sum = scan_warp(lane < warps ? of_warps[lane] : T());
        if (lane < warps) of_warps[lane] = sum;
    }
    __syncthreads();
    if (warp > 0) x = of_warps[warp - 1] + x;
    x = before + x;
    before = before + of_warps[warps - 1];
    __syncthreads();
    return x;
}

// Where span n ends.
__device__ Ends end_of_span(const Attention &a, int n) {
    if (n < 0) return {0, 0};
    if (n > a.documents) return {a.Nq, a.Nk};
    return {clamp(a.cu_seqlens_q[n], 0, a.Nq), clamp(a.cu_seqlens_k[n], 0, a.Nk)};
}

// share_for's rule (decode.cu), for rows of different lengths: all blocks take about as long as the one with the
// longest.
__device__ bool rows_fill(const Attention &a, const SequencePlan &plan, const Work &work) {
    if (plan.resident == 0 || work.few == 0 || work.most_chunks > kMostOfRow) return false;
    const int64_t rows_of_entry = a.Hkv * plan.row_tiles, rows = work.few * rows_of_entry;
    const int64_t waves = (rows + plan.resident - 1) / plan.resident;
    return rows_of_entry * work.keys >= (float)kLeastFull * (waves * plan.resident) * work.most_keys;
}

// Documents are spans 1 to D. Span 0 has the queries before them, span D + 1 those behind. A span begins where the
// furthest one before it ends: so spans are disjoint, whatever cu_seqlens holds.
__global__ void __launch_bounds__(kMostThreads)
    fill_sequences(const __grid_constant__ Attention a, const __grid_constant__ SequencePlan plan) {
    let_next_kernel_start();
    wait_for_kernel_before();
    Ends ends = {};
    Counts counts = {};  // of all spans so far
    Work work = {};      // of this thread's spans
    for (int n0 = 0; n0 < a.documents + 2; n0 += blockDim.x) {
        const int n = n0 + threadIdx.x;
        const Ends begin = scan(end_of_span(a, n - 1), ends), end = begin + end_of_span(a, n);
        const bool is_document = n >= 1 && n <= a.documents;
        Sequence span = {{begin.q, end.q}, {end.k, end.k}};
        if (is_document) {
            const Keys keys = used_keys(a, n - 1, {begin.k, end.k});
            span.keys = first_keys(a, n - 1, keys), span.position = keys.end - end.q;
        }
        const int queries = end.q - begin.q;
        const bool is_few = plan.each_query || (is_document && queries <= plan.most_queries);
        const int step = plan.each_query ? 1 : is_few ? max(queries, 1) : plan.Br;
        span.entries = (queries + step - 1) / step;
        // Entry x of the span. The last queries come first: if causal, they see the most keys.
        const auto entry_at = [&](int x) {
            Sequence entry = span;
            entry.queries = {max(end.q - (x + 1) * step, begin.q), end.q - x * step};
            return entry;
        };
        const auto chunks = [&](const Sequence &entry) {
            const Keys seen = keys_of_any(band_of(a, entry), entry.queries.begin, entry.queries.end);
            return chunks_of(a, seen, entry.entries);
        };
        Counts own = {is_few ? span.entries : 0, is_few ? 0 : span.entries, 0};
        for (int x = 0; x < own.few; ++x) {
            const Chunks c = chunks(entry_at(x));
            const int keys = c.seen.end - c.seen.begin;
            own.items += items_of(a, c.count, plan.row_tiles), work = work + Work{1, keys, c.count, (float)keys};
        }
        const Counts next = scan(own, counts);
        int item = next.items - own.items;
        for (int x = 0; x < own.few; ++x) {
            Sequence entry = entry_at(x);
            entry.first_item = item, item += items_of(a, chunks(entry).count, plan.row_tiles);
            a.sequences.few[next.few - own.few + x] = entry;
        }
        for (int x = 0; x < own.tiles; ++x) a.sequences.tiles[next.tiles - own.tiles + x] = entry_at(x);
    }
    Work all = {};
    scan(work, all);
    if (threadIdx.x == 0) *a.sequences.counts = {counts.few, counts.tiles, rows_fill(a, plan, all), 0};
}

}  // namespace

const char *fill_sequences_cuda(const Attention &a, const SequencePlan &plan, CUstream_st *stream) {
    const int threads = std::min((a.documents + 2 + 31) / 32 * 32, kMostThreads);
    return why_not(launch_overlapping(fill_sequences, 1, threads, 0, stream, a, plan));
}

}  // namespace minimal_attn
