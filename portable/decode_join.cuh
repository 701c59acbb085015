// decode_join.cuh: how decode.cu joins partial results: of a chunk's warps, of four chunks, of a row's fours.
#pragma once
#include "portable/decode_chunks.cuh"

namespace minimal_attn {
namespace {

constexpr int kJoinThreads = 128;

// How many groups of D / 4 threads a block of join_kernel has. Each group joins every Groups-th four of chunks.
template <int D>
constexpr int Groups = kJoinThreads / (D / 4);

// Sums of one row over some keys: l, m, and 4 columns of the undivided O. Without a key l is 0 and m is -inf.
struct Part {
    float l = 0.f, m = -INFINITY;
    float o[4] = {};
    __device__ float2 lm() const { return {l, m}; }
    __device__ float4 o4() const { return {o[0], o[1], o[2], o[3]}; }
};

// Where a number of Oi is in shared memory: the same columns of eight rows lie in different banks.
template <int D>
__device__ int place_of(int row, int column) {
    return row * D + (column ^ row % 8 * 8);
}

struct Sum {
    float sum = 0.f, lost = 0.f;
    __device__ void add(float x) {  // Kahan: a row may have thousands of chunks
        const float y = x - lost, next = sum + y;
        lost = fabsf(next) < INFINITY ? (next - sum) - y : 0.f;
        sum = next;
    }
    __device__ void scale(float x) { sum *= x, lost *= x; }
};

// Steps 11 and 12 over Batch parts at a time, from part `first` on, then from first + step on, ..., below count. The
// loads of a batch are under way together. lm(n) and o(n) read a part's (l, m) and o.
template <int Batch, class LM, class O>
__device__ Part join(int first, int step, int count, const LM &lm, const O &o) {
    float m = -INFINITY;
    Sum l, x[4];
#pragma unroll 1
    for (int n0 = first; n0 < count; n0 += step) {
        float2 part[Batch];
        float4 four[Batch];
        float m_new = m, m_safe;
#pragma unroll
        for (int k = 0; k < Batch; ++k) {
            const int n = n0 + k;
            part[k] = n < count ? lm(n) : float2{0.f, -INFINITY};
            four[k] = n < count ? o(n) : float4{};
        }
#pragma unroll
        for (int k = 0; k < Batch; ++k) m_new = fmaxf(m_new, part[k].y);
        const float alpha = update_row_max(m, m_new, m_safe);
        l.scale(alpha), x[0].scale(alpha), x[1].scale(alpha), x[2].scale(alpha), x[3].scale(alpha);
#pragma unroll
        for (int k = 0; k < Batch; ++k) {
            const float weight = exp_fast(part[k].y - m_safe);
            l.add(weight * part[k].x);
            x[0].add(weight * four[k].x), x[1].add(weight * four[k].y);
            x[2].add(weight * four[k].z), x[3].add(weight * four[k].w);
        }
    }
    return {l.sum, m, {x[0].sum, x[1].sum, x[2].sum, x[3].sum}};
}

// The sums of a chunk's warps in shared memory, for row r and columns x to x + 3
template <class Tile>
__device__ Part join_warps(const float2 (*lm)[Tile::Rows], const float *O, int rows_of_O, int r, int x) {
    constexpr int D = Tile::D;
    return join<kWarps>(
        0, kWarps, kWarps, [&](int n) { return lm[n][r]; },
        [&](int n) { return *(const float4 *)(O + n * rows_of_O * D + place_of<D>(r, x)); });
}

// The fields of a row's Block that end_row and store_o read. Others are not set.
template <class T>
__device__ Block<T> block_of(int b, const Band &band, const Row &row) {
    Block<T> block;
    block.b = b, block.h = row.h, block.mask = band;
    return block;
}

// 13. Columns 4 x to 4 x + 3 of a row. D / 4 threads have the row.
template <class Tile, class T>
__device__ void finish_row(const Attention &a, const Decode &p, const Block<T> &block, int i, int x, const Part &sum) {
    const RowEnd end = end_row<T, Band, Tile::is_general>(a, block, i, sum.l, sum.m);
    if (x == 0) store_l_m_lse(a, block.b, block.h, i, end.l, end.m);
    store_o<4>(a, block, i, 4 * x, end, sum.o, p.aligned_o);
}

// 12. - 13. A block joins the chunks of one row. A group of D / 4 threads, 4 columns each, joins every Groups-th four.
// Then the first group joins the groups' sums.
template <class T, class Tile, bool BySequence>
__global__ void __launch_bounds__(kJoinThreads)
    join_kernel(const __grid_constant__ Attention a, const __grid_constant__ Decode p) {
    if (Tile::OnTensorCores != on_tensor_cores<T>()) return;  // decode_kernel has no code for these, either
    constexpr int D = Tile::D, Groups = minimal_attn::Groups<D>;
    __shared__ float2 lm[Groups];
    __shared__ float4 O[Groups][D / 4];
    // fill_sequences has ended: decode_sequences_kernel waits for it, then lets this kernel start. Of whole rows
    // nothing is left to join. Block 0 stays, so that the next kernel can't start before decode_sequences_kernel ends.
    if (BySequence && a.sequences.counts->whole_rows && blockIdx.x > 0) return;
    if (!p.same_chunks) let_next_kernel_start(), wait_for_kernel_before();
    const int head = blockIdx.x / p.rows, r = blockIdx.x - head * p.rows, b = head / (int)a.Hkv;
    const int h_kv = head - b * (int)a.Hkv, x = threadIdx.x % (D / 4), group = threadIdx.x / (D / 4);
    if (BySequence && (b >= a.sequences.counts->few || a.sequences.counts->whole_rows)) return;
    const Interval queries = queries_of<BySequence>(a, b);
    if (BySequence && r / p.group >= queries.end - queries.begin) return;
    const int count = chunks_of<BySequence>(a, p, b).count;
    const int64_t first = ((int64_t)head * p.tiles + r / Tile::Rows) * p.most_chunks * Tile::Rows + r % Tile::Rows;
    const Slots slots = slots_of<Tile, BySequence>(a, p, b, h_kv, r / Tile::Rows, count);
    const Row row = {queries.begin + r / p.group, (int64_t)h_kv * p.group + r % p.group, true};
    const int batch = BySequence ? 0 : b;
    const Block<T> block = block_of<T>(batch, band_of_item<BySequence>(a, b), row);
    if (p.same_chunks) let_next_kernel_start(), wait_for_kernel_before();
    pad_lse(a, batch, row.h, row.i + 1, threadIdx.x);
    // Of batches slots[chunk] gives the same, by more instructions.
    const auto at = [&](int chunk) {
        if constexpr (BySequence)
            return slots[chunk] + r % Tile::Rows;
        else
            return first + (int64_t)chunk * Tile::Rows;
    };
    Part sum = join<kFour>(
        kFour * group, kFour * Groups, count, [&](int chunk) { return __ldcg(&p.lm[at(chunk)]); },
        [&](int chunk) { return __ldcg((const float4 *)(p.Oi + at(chunk) * D) + x); });
    if (x == 0) lm[group] = sum.lm();
    O[group][x] = sum.o4();
    __syncthreads();
    if (group > 0) return;
    sum = join<Groups>(
        0, Groups, min(Groups, (count + kFour - 1) / kFour), [&](int n) { return lm[n]; },
        [&](int n) { return O[n][x]; });
    finish_row<Tile>(a, p, block, row.i, x, sum);
}

}  // namespace
}  // namespace minimal_attn
