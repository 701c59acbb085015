// bias_gradient.cu: the gradient of a bias from dS^T, which backward_fused.cu has stored (docs/scores.md). A block owns
// a tile of 64 queries x 32 keys of the bias. It walks the heads and tiles that share its numbers, in a fixed order: no
// atomics, and the same bits on every run. Memory bounds it: each number of dS is read once.
//
//     role         | warps | does
//     every thread | 8     | adds up 8 queries of one key, 16 bytes of each head; then all store the tile
//
// One __syncthreads orders the sums in shared memory. Uses portable/bias_sums.cuh: Part, Sum, store_sums; ranges.h:
// ranges_of, is_shown: which pairs are visible, since what is hidden may never have been stored; params.h: Divisor;
// backward.h: dS_stride; device.h: launch_overlapping, let_next_kernel_start, wait_for_kernel_before, why_not.
#include "hopper/backward.h"
#include "hopper/params.h"
#include "portable/bias_sums.cuh"

namespace minimal_attn::hopper {
namespace {

constexpr int kQueries = kRangeTile, kKeys = 32, kQueriesOfThread = 8, kThreads = kQueries * kKeys / kQueriesOfThread;

struct SumParameters {
    Gradient g;
    const void *dS;
    Divisor key_tiles, query_tiles, Hq, B;
    bool sees_all;  // whether no pair is hidden, but by a bias: there dS is 0
};

// Adds dS of the queries i to i + 7 and key j of a head, where they are visible.
template <class T>
__device__ void add_visible(const Attention &a, int b, int i, int j, const T *dS, Sum (&sums)[kQueriesOfThread]) {
    const Ranges ranges = ranges_of(a, b);
    const TileKeys tile = ranges.tiles[i / kRangeTile];
    if (j < tile.any.begin || j >= tile.any.end || !is_shown(a, b, i, j)) return;
    const bool all_see = tile.all.begin <= j && j < tile.all.end;
#pragma unroll
    for (int y = 0; y < kQueriesOfThread; ++y) {
        const Keys seen = all_see ? tile.all : ranges.rows[i + y];
        if (i + y < a.Nq && seen.begin <= j && j < seen.end) sums[y].add((float)dS[y]);
    }
}

// HeadsAtOnce: so many loads of a thread are in flight.
template <class T, int HeadsAtOnce>
__global__ void __launch_bounds__(kThreads) sum_dS_kernel(const __grid_constant__ SumParameters p) {
    let_next_kernel_start();
    wait_for_kernel_before();
    __shared__ float all_sums[kQueries][kKeys + 1];
    const Attention &a = p.g.a;
    const PairStrides &stride = p.g.dbias_stride;
    int index = blockIdx.x;
    const Part key_tiles(index, stride.key, p.key_tiles), query_tiles(index, stride.row, p.query_tiles);
    const Part heads(index, stride.head, p.Hq), batches(index, stride.batch, p.B);
    // The heads of dS that share the bias's numbers are `count`, each `step` behind the one before.
    const int first = batches.begin * p.Hq + heads.begin, step = heads.end - heads.begin > 1 ? 1 : (int)p.Hq;
    const int count = (batches.end - batches.begin) * (heads.end - heads.begin);
    constexpr int kThreadsOfKey = kQueries / kQueriesOfThread;
    const int key = threadIdx.x / kThreadsOfKey, query = threadIdx.x % kThreadsOfKey * kQueriesOfThread;
    const Strides of_dS = dS_stride(a);
    Sum sums[kQueriesOfThread];
    for (int i0 = query_tiles.begin * kQueries; i0 < query_tiles.end * kQueries; i0 += kQueries)
        for (int j0 = key_tiles.begin * kKeys; j0 < key_tiles.end * kKeys; j0 += kKeys) {
            const int i = i0 + query, j = j0 + key;
            if (i >= of_dS.row || j >= a.Nk) continue;
            const T *from = (const T *)p.dS + first * of_dS.head + j * of_dS.row + i;
            for (int n = 0; n < count; n += HeadsAtOnce, from += HeadsAtOnce * step * of_dS.head) {
                uint4 loaded[HeadsAtOnce];
#pragma unroll
                for (int x = 0; x < HeadsAtOnce; ++x)
                    if (n + x < count) loaded[x] = __ldcs((const uint4 *)(from + x * step * of_dS.head));
#pragma unroll
                for (int x = 0; x < HeadsAtOnce; ++x) {
                    const T *const dS = (const T *)&loaded[x];
                    if (n + x >= count) break;
                    if (!p.sees_all) {
                        add_visible<T>(a, (first + (n + x) * step) / p.Hq, i, j, dS, sums);
                        continue;
                    }
#pragma unroll
                    for (int y = 0; y < kQueriesOfThread; ++y)
                        if (i + y < a.Nq) sums[y].add((float)dS[y]);  // behind them dS was never stored
                }
            }
        }
#pragma unroll
    for (int y = 0; y < kQueriesOfThread; ++y) all_sums[query + y][key] = sums[y].sum;
    __syncthreads();
    store_sums<T>(p.g, all_sums, batches.begin, heads.begin, query_tiles.begin * kQueries, key_tiles.begin * kKeys);
}

}  // namespace

const char *launch_dS_sums(const Gradient &g, const void *dS, CUstream_st *stream) {
    const Attention &a = g.a;
    const PairStrides &stride = g.dbias_stride;
    const auto tiles_of = [](int n, int tile) { return (n + tile - 1) / tile; };
    const SumParameters p{g,         dS,       tiles_of(a.Nk, kKeys),         tiles_of(a.Nq, kQueries),
                          (int)a.Hq, (int)a.B, !is_masked(a) && !a.terms.mask};
    // kMostBytesOfdS bounds it by 2^25.
    const int64_t blocks = (stride.batch ? a.B : 1) * (stride.head ? a.Hq : 1) * (stride.row ? (int)p.query_tiles : 1) *
                           (stride.key ? (int)p.key_tiles : 1);
    // A bias of each head's own needs one load, and so fewer registers.
    const bool is_shared = (!stride.batch && a.B > 1) || (!stride.head && a.Hq > 1);
    const auto kernel = a.dtype == Dtype::float16 ? (is_shared ? sum_dS_kernel<__half, 4> : sum_dS_kernel<__half, 1>)
                        : is_shared               ? sum_dS_kernel<__nv_bfloat16, 4>
                                                  : sum_dS_kernel<__nv_bfloat16, 1>;
    return why_not(launch_overlapping(kernel, blocks, kThreads, 0, stream, p));
}

}  // namespace minimal_attn::hopper
