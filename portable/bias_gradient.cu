// bias_gradient.cu: the gradient of a bias (scores.h) on a GPU, where no kernel of the other gradients stores dS
// (docs/scores.md). It is dS, summed over all pairs that share one of the bias's numbers, which are many where it is
// broadcast. A block owns a tile of 64 x 64 of these numbers. It walks the batches, heads and tiles of scores that
// share them, in a fixed order, keeps the sums in registers and writes them once: no atomics, and the same bits on
// every run.
//
//     role       | warps | does
//     every warp | 8     | loads a part of all operands; computes S^T, dP^T and dS^T of 32 keys and 16 queries
//
//     shared memory   | size    | written                    | read
//     Kj or Vj        | 64 x 64 | for each 64 columns of d   | by all
//     Qi or dOi       | 64 x 64 | likewise                   | by the warps of its rows
//     sums            | 64 x 65 | once, at last              | by all: what is broadcast in the tile is added up
//
// The barriers are those of add_product (rows_tile.cuh), and one before the sums are read. m, log2_l and D of the rows
// are those of the other gradients: gradient_rows.cu and large_rows.cu compute them first. Uses rows_tile.cuh:
// add_product; bias_sums.cuh: Part, Sum, store_sums; scores.h: TermsOfRow, changed_in; gradient_rows.h: GradientRows;
// device.h: launch_all, launch_overlapping.
#include "portable/bias_sums.cuh"
#include "portable/gradient_rows.h"
#include "portable/rows_tile.cuh"

namespace minimal_attn {
namespace {

constexpr int kTile = RowsTile::Br;
static_assert(RowsTile::Br == RowsTile::Bc);
MINIMAL_ATTN_HOST_DEVICE inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

// What P and dS of a query need (gradient_rows.h).
template <class T>
struct RowOfGradient {
    float log2_l, D, m = 0.f;
    const LargeRow *large = nullptr;
    __device__ RowOfGradient(const GradientRows &rows, int64_t row, bool may_be_large)
        : log2_l(__ldcg(rows.log2_l + row)), D(__ldcg(rows.D + row)) {
        if (!may_be_large) return;
        if constexpr (!std::is_same_v<T, float>)
            m = __ldcg(rows.m + row);
        else if (log2_l == kLarge)
            large = rows.large + row;
    }
    // dS, from a whole score, in large rows of float32 the exact one, and dP.
    __device__ float dS(float S, Score<T> exact, float dP, float c) const {
        if constexpr (!std::is_same_v<T, float>)
            return exp2_fast(fmaf(m != 0.f ? less_m<T>(S, m, log2_l, c) : S, c, -log2_l)) * subtract_D<T>(dP, D);
        dP *= kUndoTruncation;
        if (!large) return exp2_fast(fmaf(S, c, -log2_l)) * (dP - D);
        const float exponent = fmaf((float)(exact - (Score<T>)__ldcg(&large->m)), c, -__ldcg(&large->log2_l));
        return exp2_fast(fminf(exponent, 0.f)) * ((dP - __ldcg(&large->D)) - __ldcg(&large->D_low));
    }
};

// Adds dS^T of the keys from j0 on and the queries from i0 on. This thread has queries i0 + 8 n + 0, 1 and keys j0 + 8
// r.
template <class T>
__device__ void add_dS(const Gradient &g, const GradientRows &rows, const General &mask, int64_t b, int64_t h, int i0,
                       int j0, bool may_be_large, const float (&S)[RowsTile::M][RowsTile::N][4],
                       const Score<T> (&exact)[RowsTile::M][RowsTile::N][4],
                       const float (&dP)[RowsTile::M][RowsTile::N][4], Sum (&sums)[RowsTile::M][RowsTile::N][4]) {
    const Attention &a = g.a;
    const float c = a.softmax_scale * kLog2e;
    const DropoutOfHead dropout(a, b, h);
#pragma unroll
    for (int column = 0; column < RowsTile::Columns; ++column) {
        const int query = i0 + column / 2 * 8 + column % 2;
        const Keys seen = keys_of_row(mask, query);
        const TermsOfRow terms(a, b, h, query);
        const RowOfGradient<T> row(rows, (b * a.Hq + h) * rows.head_stride + query, may_be_large);
#pragma unroll
        for (int r = 0; r < RowsTile::Keys; ++r) {
            const int m = r / 2, n = column / 2, e = r % 2 * 2 + column % 2, key = j0 + 8 * r;
            const float term = terms.of_key<T>(key);
            const auto score = [&](auto QK) {
                return whole(a, has_softcap(a) ? changed_in<T>(a.scores, QK) : QK, term);
            };
            const bool is_seen = seen.begin <= key && key < seen.end && term != -INFINITY;
            const float Z = has_dropout(a) ? dropout.Zij(query, key) : 1.f;
            const float dS = row.dS(score(S[m][n][e]), score(exact[m][n][e]), Z * dP[m][n][e], c);
            sums[m][n][e].add(is_seen ? dS : 0.f);  // a hidden one may be NaN
        }
    }
}

template <class T>
__global__ void __launch_bounds__(RowsTile::Threads)
    bias_gradient_kernel(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, bool aligned,
                         int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    __shared__ float all_sums[kTile][kTile + 1];
    const Attention &a = g.a;
    const PairStrides &stride = g.dbias_stride;
    int64_t index = first_block + blockIdx.x;
    const Part key_tiles(index, stride.key, tiles_of(a.Nk)), query_tiles(index, stride.row, tiles_of(a.Nq));
    const Part heads(index, stride.head, a.Hq), batches(index, stride.batch, a.B);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int query = warp % RowsTile::QueryWarps * 8 * RowsTile::N + lane % 4 * 2;
    const int key = warp / RowsTile::QueryWarps * 16 * RowsTile::M + lane / 4;
    const bool may_be_large = __ldcg(rows.any_large);
    Sum sums[RowsTile::M][RowsTile::N][4];
    for (int b = batches.begin; b < batches.end; ++b) {
        const General mask = mask_of<General>(a, b);
        for (int h = heads.begin; h < heads.end; ++h)
            for (int i0 = query_tiles.begin * kTile; i0 < query_tiles.end * kTile; i0 += kTile)
                for (int j0 = key_tiles.begin * kTile; j0 < key_tiles.end * kTile; j0 += kTile) {
                    if (!meet(keys_of_any(mask, i0, min(i0 + kTile, a.Nq)), {j0, j0 + kTile})) continue;
                    const int h_kv = h / (int)(a.Hq / a.Hkv);
                    const HeadRows<T> Q(a.q, a.q_stride, b, h, i0, a.Nq), dO(g.do_, g.do_stride, b, h, i0, a.Nq);
                    const HeadRows<T> K(a.k, a.k_stride, b, h_kv, j0, mask.keys.end);
                    const HeadRows<T> V(a.v, a.v_stride, b, h_kv, j0, mask.keys.end);
                    float S[RowsTile::M][RowsTile::N][4] = {}, dP[RowsTile::M][RowsTile::N][4] = {};
                    add_product<T>(S, K, Q, a.d, aligned);
                    add_product<T>(dP, V, dO, a.d_v, aligned);
                    const auto add = [&](const auto &exact) {
                        add_dS<T>(g, rows, mask, b, h, i0 + query, j0 + key, may_be_large, S, exact, dP, sums);
                    };
                    if constexpr (std::is_same_v<Score<T>, double>) {
                        double exact[RowsTile::M][RowsTile::N][4] = {};
                        if (may_be_large) add_product<T>(exact, K, Q, a.d, aligned);
                        add(exact);
                    } else {
                        add(S);
                    }
                }
    }
#pragma unroll
    for (int x = 0; x < RowsTile::M * RowsTile::N * 4; ++x) {
        const int m = x / 4 / RowsTile::N, n = x / 4 % RowsTile::N, e = x % 4;
        all_sums[query + 8 * n + e % 2][key + 16 * m + e / 2 * 8] = sums[m][n][e].sum;
    }
    __syncthreads();
    store_sums<T>(g, all_sums, batches.begin, heads.begin, query_tiles.begin * kTile, key_tiles.begin * kTile);
}

template <class T>
const char *launch(const Gradient &g, const Plan &plan, const GradientRows &rows, CUstream_st *stream) {
    const Attention &a = g.a;
    const bool aligned = has_aligned_inputs(a) && is_aligned(g.do_, g.do_stride, sizeof(T), a.d_v);
    return why_not(launch_all(plan.grid, kMostBlocks, [&](int64_t first, int grid) {
        return launch_overlapping(bias_gradient_kernel<T>, grid, plan.threads, plan.shared_memory, stream, g, rows,
                                  aligned, first);
    }));
}

}  // namespace

Plan plan_bias_cuda(const Gradient &g, const Device &) {
    const Attention &a = g.a;
    const PairStrides &stride = g.dbias_stride;
    const int64_t grid = (stride.batch ? a.B : 1) * (stride.head ? a.Hq : 1) * (stride.row ? tiles_of(a.Nq) : 1) *
                         (stride.key ? tiles_of(a.Nk) : 1);
    const int bytes = a.dtype == Dtype::float32 ? kRowsBytes<float> : kRowsBytes<__half>;
    return {"bias gradient", 0, kTile, kTile, RowsTile::D, grid, RowsTile::Threads, bytes, gradient_rows_bytes(g)};
}

const char *launch_bias_cuda(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const GradientRows rows = gradient_rows_in(g, workspace);
    const char *error = launch_gradient_rows(g, rows, stream);
    if (!error) error = launch_large_rows(g, rows, stream);
    if (error) return error;
    if (g.a.dtype == Dtype::float32) return launch<float>(g, plan, rows, stream);
    if (g.a.dtype == Dtype::float16) return launch<__half>(g, plan, rows, stream);
    return launch<__nv_bfloat16>(g, plan, rows, stream);
}

}  // namespace minimal_attn
