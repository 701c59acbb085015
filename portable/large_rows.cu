// large_rows.cu: rows with a large lse, before a backward pass. A float32 is too coarse for such an lse: P = exp(S -
// lse) is off by up to 2^-24 lse, and by as much where the forward kernel rounds S otherwise. So m, l and D of these
// rows are computed again, from S^T = Kj Qi^T and dP^T = Vj dOi^T with the bits that the backward kernels have: wgmma
// gives those of mma.sync. In float32 S^T is float64 on both sides, where kFastFloat64 is true. docs/numerics.md has
// more.
//
//     role       | warps | does
//     every warp | 8     | reads lse of some tiles of 64 rows. If one is large: loads a part of all operands,
//                |       | computes S^T and dP^T of 32 keys and 16 queries
//
//     shared memory | size    | written                     | read
//     Kj or Vj      | 64 x 64 | for each 64 columns of d    | by all
//     Qi or dOi     | 64 x 64 | likewise                    | by the warps of its rows
//     RowSums       | 64      | in the place of Kj, at last | by the warps of the first 32 keys of each tile
//
//     barrier                      | arrives and waits | then
//     __syncthreads in add_product | the block         | all have read the operands: the next ones may overwrite them
//     wait_for_tiles               | the block         | both operands have arrived
//     __syncthreads, at last       | the block         | twice: all have read the operands; RowSums are there
//
// add_product and HeadRows are rows_tile.cuh's, wait_for_tiles common.cuh's, is_large_for, kLog2OfP and D_of_dS
// gradient_rows.h's, launch_overlapping and wait_for_kernel_before device.h's, changed_in and TermsOfRow scores.h's.
#include "portable/gradient_rows.h"
#include "portable/rows_tile.cuh"

namespace minimal_attn {
namespace {

// m, l and D of a query, of some keys; D is not divided by l. m is of scores times the sign of c.
struct RowSums {
    double m = -INFINITY, l = 0., D = 0.;
    __device__ void join(const RowSums &x, float c) {
        const double m_new = fmax(m, x.m);
        if (m_new == -INFINITY) return;
        const float alpha = exp2_fast(c * (float)(m - m_new)), beta = exp2_fast(c * (float)(x.m - m_new));
        *this = {m_new, alpha * l + beta * x.l, alpha * D + beta * x.D};
    }
};

// Joins a tile of S^T and dP^T. This thread has queries i + 8 n + 0, 1 and keys j + 8 r. Scores are not scaled, or
// changed (scores.h); c > 0.
template <class T, class Sum, class Mask>
__device__ void add_scores(const Attention &a, RowSums (&rows)[RowsTile::Columns],
                           const Sum (&S)[RowsTile::M][RowsTile::N][4], const float (&dP)[RowsTile::M][RowsTile::N][4],
                           float sign, float c, const Mask &mask, int64_t b, int64_t h, int i, int j) {
    const DropoutOfHead dropout(a, b, h);
#pragma unroll
    for (int column = 0; column < RowsTile::Columns; ++column) {
        const int query = i + column / 2 * 8 + column % 2;
        const Keys seen = keys_of_row(mask, query);
        Sum score[RowsTile::Keys], m = -INFINITY;
        RowSums tile;
#pragma unroll
        for (int r = 0; r < RowsTile::Keys; ++r) {
            const bool is_seen = seen.begin <= j + 8 * r && j + 8 * r < seen.end;
            Sum s = S[r / 2][column / 2][r % 2 * 2 + column % 2];
            if (kIsGeneral<Mask> && has_softcap(a)) s = changed_in<T>(a.scores, s);
            if (kIsGeneral<Mask> && has_terms(a)) s = whole(a, s, TermsOfRow(a, b, h, query).of_key<T>(j + 8 * r));
            score[r] = is_seen ? sign * s : -INFINITY;
            m = score[r] > m ? score[r] : m;
        }
        if (m == -INFINITY) continue;
        tile.m = m;
#pragma unroll
        for (int r = 0; r < RowsTile::Keys; ++r) {
            if (score[r] == -INFINITY) continue;  // a hidden dP may be NaN
            const float p = exp2_fast(c * (float)(score[r] - m));
            float of_pair = dP[r / 2][column / 2][r % 2 * 2 + column % 2];
            if (kIsGeneral<Mask> && has_dropout(a)) of_pair *= dropout.Zij(query, j + 8 * r);
            tile.l += p, tile.D += (double)p * of_pair;
        }
        rows[column].join(tile, c);
    }
}

// Stores m, l and D of the large rows among 64 of a head, from i0 on. All threads of the block call it.
template <class T, class Mask>
__device__ void normalize_rows(const Gradient &g, const GradientRows &rows, int head, int i0, bool aligned) {
    const Attention &a = g.a;
    const int b = head / unsigned(a.Hq), h = head % unsigned(a.Hq), h_kv = h / int(a.Hq / a.Hkv);
    const Narrow<Mask> mask = narrow(mask_of<Mask>(a, b));
    const Keys seen = keys_of_any(mask, i0, min(i0 + RowsTile::Br, a.Nq));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_warp = warp / RowsTile::QueryWarps;
    const int query = warp % RowsTile::QueryWarps * 8 * RowsTile::N + lane % 4 * 2;
    const float sign = a.softmax_scale < 0.f ? -1.f : 1.f, c = fabsf(a.softmax_scale * kLog2e);
    const HeadRows<T> Q(a.q, a.q_stride, b, h, i0, a.Nq), dO(g.do_, g.do_stride, b, h, i0, a.Nq);
    RowSums sums[RowsTile::Columns];
#pragma unroll 1
    for (int j0 = seen.begin; j0 < seen.end; j0 += RowsTile::Bc) {
        Score<T> S[RowsTile::M][RowsTile::N][4] = {};
        float dP[RowsTile::M][RowsTile::N][4] = {};
        add_product<T>(S, {a.k, a.k_stride, b, h_kv, j0, mask.keys.end}, Q, a.d, aligned);
        add_product<T>(dP, {a.v, a.v_stride, b, h_kv, j0, mask.keys.end}, dO, a.d_v, aligned);
        add_scores<T>(a, sums, S, dP, sign, c, mask, b, h, i0 + query, j0 + key_warp * 16 * RowsTile::M + lane / 4);
    }
    extern __shared__ __align__(128) unsigned char shared[];
    RowSums *const of_later_keys = (RowSums *)shared;
    __syncthreads();
    const auto for_queries = [&](const auto &use) {
#pragma unroll
        for (int column = 0; column < RowsTile::Columns; ++column)
            use(sums[column], query + column / 2 * 8 + column % 2);
    };
    for_queries([&](RowSums &sum, int row) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
            sum.join({__shfl_xor_sync(~0u, sum.m, other), __shfl_xor_sync(~0u, sum.l, other),
                      __shfl_xor_sync(~0u, sum.D, other)},
                     c);
        if (key_warp == 1 && lane < 4) of_later_keys[row] = sum;
    });
    __syncthreads();
    if (key_warp == 1 || lane >= 4) return;
    for_queries([&](RowSums &sum, int row) {
        const int64_t dense = int64_t(head) * a.Nq + i0 + row, padded = head * rows.head_stride + i0 + row;
        if (i0 + row >= a.Nq || !is_large_for<T>(a, g.lse[dense])) return;
        sum.join(of_later_keys[row], c);
        const double factor = std::is_same_v<T, float> ? kUndoTruncation : 1.f;
        const bool is_empty = sum.l == 0.;  // it sees no key, or scores of -inf alone, whatever its lse: P = 0
        const double m = is_empty ? 0. : sign * sum.m;
        const double D = is_empty ? 0. : factor * (sum.D / sum.l) - (g.dlse ? g.dlse[dense] : 0.f);
        const float log2_l = is_empty ? INFINITY : log2f((float)sum.l);
        if constexpr (std::is_same_v<T, float>)
            rows.large[padded] = {m, log2_l, (float)D, (float)(D - (float)D)}, rows.D[padded] = 0.f;
        else
            rows.m[padded] = (float)m, rows.log2_l[padded] = log2_l - kLog2OfP<T>,
            rows.D[padded] = D_of_dS<T>((float)D);
    });
}

// One block on each multiprocessor of an H100; other GPUs run a few more or fewer at a time. With 32 keys a tile and
// two blocks a multiprocessor it was slower.
constexpr int kMostGrid = 132;

template <class T, class Mask>
__global__ void __launch_bounds__(RowsTile::Threads)
    large_rows_kernel(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, int tiles_of_block,
                      bool aligned) {
    if constexpr (!on_tensor_cores<T>() && !std::is_same_v<T, float>) return;  // bfloat16 before 8.0
    let_next_kernel_start();
    wait_for_kernel_before();
    const Attention &a = g.a;
    const int tiles_of_head = rows.head_stride / RowsTile::Br, tiles = (int)(a.B * a.Hq) * tiles_of_head;
    const int begin = min(blockIdx.x * tiles_of_block, tiles), end = min(begin + tiles_of_block, tiles);
    // The index in lse at which a tile begins. lse has no padding between heads.
    const auto row_of_tile = [&](int tile) {
        return int64_t(tile / tiles_of_head) * a.Nq + min(tile % tiles_of_head * RowsTile::Br, a.Nq);
    };
    // Most launches find no large row. Their time is that of fetching this code, so it is short.
    bool any_large = false;
    const int64_t last = row_of_tile(end);
#pragma unroll 4
    for (int64_t row = row_of_tile(begin) + threadIdx.x; row < last; row += RowsTile::Threads)
        any_large |= is_large_for<T>(a, __ldg(g.lse + row));
    if (!__syncthreads_or(any_large)) return;
    if (threadIdx.x == 0) *rows.any_large = 1;
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        const int head = tile / tiles_of_head, i0 = tile % tiles_of_head * RowsTile::Br;
        const int64_t dense = row_of_tile(tile) + threadIdx.x, padded = head * rows.head_stride + i0 + threadIdx.x;
        const bool exists = threadIdx.x < RowsTile::Br && i0 + threadIdx.x < a.Nq;
        const bool is_large = exists && is_large_for<T>(a, g.lse[dense]);
        if (!__syncthreads_or(is_large)) continue;
        if (g.is_complete) {
            normalize_rows<T, Mask>(g, rows, head, i0, aligned);
        } else if (is_large) {
            // lse may cover other keys, too, so it can't be computed again: P keeps the error of its rounding.
            const double m = (double)g.lse[dense] / a.softmax_scale;
            if constexpr (std::is_same_v<T, float>)
                rows.large[padded] = {m, 0.f, rows.D[padded], 0.f}, rows.D[padded] = 0.f;
            else
                rows.m[padded] = (float)m, rows.log2_l[padded] = -kLog2OfP<T>;
        }
    }
}

template <class T>
cudaError_t launch(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    const Attention &a = g.a;
    const bool aligned = has_aligned_inputs(a) && is_aligned(g.do_, g.do_stride, sizeof(T), a.d_v);
    const int64_t tiles = a.B * a.Hq * (rows.head_stride / RowsTile::Br);
    const int grid = (int)std::min<int64_t>(tiles, kMostGrid), tiles_of_block = (int)((tiles + grid - 1) / grid);
    return with_mask_and_scores(a, [&](auto mask) {
        return launch_overlapping(large_rows_kernel<T, decltype(mask)>, grid, RowsTile::Threads, kRowsBytes<T>, stream,
                                  g, rows, tiles_of_block, aligned);
    });
}

}  // namespace

const char *launch_large_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    if (g.a.dtype == Dtype::float32) return why_not(launch<float>(g, rows, stream));
    if (g.a.dtype == Dtype::float16) return why_not(launch<__half>(g, rows, stream));
    return why_not(launch<__nv_bfloat16>(g, rows, stream));
}

}  // namespace minimal_attn
