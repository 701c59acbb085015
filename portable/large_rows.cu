// large_rows.cu: m and log2(l) of rows with a large lse, before a backward pass. There a float32 is too coarse for lse:
// P = exp(S - lse) would be off by 2^-24 of it, and by what other kernels round S differently. So this kernel normalises
// such rows again, from scores with the bits of the backward kernels' own S^T = Kj Qi^T. docs/numerics.md says more.
//
//     role        | warps | does
//     every warp  | 4     | looks at lse; in a tile with a large row: loads a part of Qi and Kj, computes S^T of 16 queries
//
//     shared memory | size   | written              | read
//     Qi            | 64 x D | once a tile          | by the warp of its rows
//     Kj            | 32 x D | for 32 keys at a time | by all
//
//     barrier                     | arrives and waits | then
//     __syncthreads_or, each tile | the block         | all know whether a row is large; all have read the last Kj
//     wait_for_tiles              | the block         | Kj has arrived, and the first time Qi
//     __syncthreads, each Kj      | the block         | all have read Kj, so the next one may overwrite it
//
// multiply is half_gradient.cuh's, multiply_rows tf32.cuh's; load_swizzled and lane_address are mma.cuh's.
#include "portable/gradient_rows.h"
#include "portable/half_gradient.cuh"
#include "portable/tf32.cuh"

namespace minimal_attn {
namespace {

constexpr int kThreads = 128, kMostGrid = 512;

template <int D_>
struct RowsTile {
    static constexpr int D = D_, Br = 64, Bc = 32, Threads = kThreads;
    static constexpr int WarpRows = Br / (Threads / 32), M = Bc / 16, N = WarpRows / 8;  // accumulators of S^T, 16 x 8
    static constexpr int Columns = 2 * N;                                                // queries of a thread
};

template <class T, class Tile>
constexpr int kSharedBytes = (Tile::Br + Tile::Bc) * Tile::D * sizeof(T);

// m and l of a thread's queries, of its own keys. m is of scores times the sign of c.
template <class Tile>
struct Softmax {
    float m[Tile::Columns];
    double l[Tile::Columns] = {};
    __device__ Softmax() {
        for (float &x : m) x = -INFINITY;
    }
    __device__ void join(int column, float other_m, double other_l, float c) {
        const float m_new = fmaxf(m[column], other_m);
        if (m_new == -INFINITY) return;
        l[column] = l[column] * exp2_fast(c * (m[column] - m_new)) + other_l * exp2_fast(c * (other_m - m_new));
        m[column] = m_new;
    }
};

// Joins a tile of S^T. This thread has queries i + 8 n + 0, 1 and keys j + 8 r. Scores are not scaled; c > 0.
template <class Tile>
__device__ void add_scores(Softmax<Tile> &softmax, const float (&S)[Tile::M][Tile::N][4], float sign, float c,
                           const BandOf<int> &band, int i, int j) {
#pragma unroll
    for (int column = 0; column < Tile::Columns; ++column) {
        const Keys seen = keys_of_row(band, i + column / 2 * 8 + column % 2);
        const auto score = [&](int r) {
            const bool is_seen = seen.begin <= j + 8 * r && j + 8 * r < seen.end;
            return is_seen ? sign * S[r / 2][column / 2][r % 2 * 2 + column % 2] : -INFINITY;
        };
        float m = -INFINITY, l = 0.f;
#pragma unroll
        for (int r = 0; r < 2 * Tile::M; ++r) m = fmaxf(m, score(r));
        if (m == -INFINITY) continue;
#pragma unroll
        for (int r = 0; r < 2 * Tile::M; ++r) l += exp2_fast(c * (score(r) - m));
        softmax.join(column, m, l, c);
    }
}

// The rows from i0 on of a head.
template <class T, class Tile>
__device__ void normalize_rows(const Gradient &g, const GradientRows &rows, int head, int i0, bool aligned) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc;
    const Attention &a = g.a;
    const int64_t b = head / unsigned(a.Hq), h = head % unsigned(a.Hq), h_kv = h / (a.Hq / a.Hkv);
    const BandOf<int> band = narrow(band_of(a, b));
    const Keys seen = keys_of_any(band, i0, min(i0 + Br, a.Nq));
    extern __shared__ __align__(128) unsigned char shared[];
    T *const Q_tile = (T *)shared, *const K_tile = Q_tile + Br * D;
    const int warp_row = broadcast_lane0(threadIdx.x / 32) * Tile::WarpRows, lane = threadIdx.x % 32;
    const int i = i0 + warp_row + lane % 4 * 2;  // the thread's first query
    const float sign = a.softmax_scale < 0.f ? -1.f : 1.f, c = fabsf(a.softmax_scale * kLog2e);
    const unsigned A = lane_address<D>(K_tile, lane % 16, lane / 16);
    const unsigned B = lane_address<D>(Q_tile, warp_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);

    const T *const Q = (const T *)a.q + b * a.q_stride.batch + h * a.q_stride.head + i0 * a.q_stride.row;
    const T *const K = (const T *)a.k + b * a.k_stride.batch + h_kv * a.k_stride.head;
    load_swizzled<Br, D, kThreads>(Q_tile, Q, a.q_stride.row, a.Nq - i0, a.d, aligned);
    Softmax<Tile> softmax;
    for (int j0 = seen.begin; j0 < seen.end; j0 += Bc) {
        load_swizzled<Bc, D, kThreads>(K_tile, K + j0 * a.k_stride.row, a.k_stride.row, band.keys.end - j0, a.d,
                                       aligned);
        wait_for_tiles();
        float S[Tile::M][Tile::N][4] = {};
        if constexpr (std::is_same_v<T, float>)
            multiply_rows<D>(S, A, B, a.d);
        else
            multiply<T, Tile>(S, A, B);
        add_scores<Tile>(softmax, S, sign, c, band, i, j0 + lane / 4);
        __syncthreads();
    }
#pragma unroll
    for (int column = 0; column < Tile::Columns; ++column) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2)
            softmax.join(column, __shfl_xor_sync(~0u, softmax.m[column], other),
                         __shfl_xor_sync(~0u, softmax.l[column], other), c);
        const int row = i + column / 2 * 8 + column % 2;
        if (lane < 4 && row < a.Nq)
            rows.large[head * rows.head_stride + row] = {sign * softmax.m[column], log2f((float)softmax.l[column])};
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(kThreads)
    large_rows_kernel(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, bool aligned) {
    if constexpr (!on_tensor_cores<T>() && !std::is_same_v<T, float>) return;  // bfloat16 before 8.0
    constexpr int Br = Tile::Br, Lanes = kThreads / Br;  // tiles that the block looks at together
    const Attention &a = g.a;
    const int tiles_of_head = (a.Nq + Br - 1) / Br, tiles = (int)(a.B * a.Hq) * tiles_of_head;
    // The lse of one of a tile's rows, as the backward kernels have it, or 0.
    const auto lse_at = [&](int tile) {
        const int head = tile / tiles_of_head, i = tile % tiles_of_head * Br + threadIdx.x % Br;
        return tile < tiles && i < a.Nq ? g.lse[int64_t(head) * a.Nq + i] : 0.f;
    };
    // Mostly there is no large row: loads don't wait for each other until that is known.
    bool any = false;
#pragma unroll 8
    for (int tile = blockIdx.x; tile < tiles; tile += Lanes * gridDim.x)
        any |= is_large_of_P<T>(lse_of_P<T>(lse_at(tile + threadIdx.x / Br * gridDim.x)));
    if (!__syncthreads_or(any)) return;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const float lse = lse_at(tile);
        if (!__syncthreads_or(is_large_of_P<T>(lse_of_P<T>(lse)))) continue;
        const int head = tile / tiles_of_head, i0 = tile % tiles_of_head * Br, row = i0 + threadIdx.x;
        if (g.is_complete) {
            normalize_rows<T, Tile>(g, rows, head, i0, aligned);
        } else if (threadIdx.x < Br && row < a.Nq) {
            // lse covers other keys, too: it remains a float32, with its rounding.
            const float m = a.softmax_scale == 0.f ? 0.f : lse / a.softmax_scale;
            rows.large[head * rows.head_stride + row] = {m, fmaf(-a.softmax_scale, m, lse) * kLog2e};
        }
    }
}

struct RowsKernels {
    using D64 = TileList<RowsTile<64>>;    // 24 KB in float32
    using D128 = TileList<RowsTile<128>>;  // 48
    using D256 = TileList<RowsTile<256>>;  // 96; fits 99
};

template <class T>
cudaError_t launch(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    return with_tiles_for<RowsKernels>(g.a.d, [&](auto list) {
        return with_tile(0, list, [&](auto tile) {
            using Tile = decltype(tile);
            const bool aligned =
                is_aligned(g.a.q, g.a.q_stride, sizeof(T), g.a.d) && is_aligned(g.a.k, g.a.k_stride, sizeof(T), g.a.d);
            const auto kernel = large_rows_kernel<T, Tile>;
            const cudaError_t error = allow_shared_memory(kernel);
            if (error != cudaSuccess) return error;
            const int64_t tiles = g.a.B * g.a.Hq * ((g.a.Nq + Tile::Br - 1) / Tile::Br);
            const int grid = (int)std::min<int64_t>(tiles, kMostGrid);
            kernel<<<grid, kThreads, kSharedBytes<T, Tile>, stream>>>(g, rows, aligned);
            return cudaGetLastError();
        });
    });
}

}  // namespace

const char *launch_large_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    if (g.a.dtype == Dtype::float32) return why_not(launch<float>(g, rows, stream));
    if (g.a.dtype == Dtype::float16) return why_not(launch<__half>(g, rows, stream));
    return why_not(launch<__nv_bfloat16>(g, rows, stream));
}

}  // namespace minimal_attn
