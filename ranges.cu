// ranges.cu: the tables of ranges.h on a GPU, by two small kernels. The second is for backward passes alone.
#include "ranges.h"

#include <algorithm>

#include "device.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// The same in all lanes.
__device__ Interval hull_of_warp(Interval x) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2)
        x = hull(x, {__shfl_xor_sync(~0u, x.begin, other), __shfl_xor_sync(~0u, x.end, other)});
    return x;
}

__device__ Interval common_of_warp(Interval x) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2)
        x = common(x, {__shfl_xor_sync(~0u, x.begin, other), __shfl_xor_sync(~0u, x.end, other)});
    return x;
}

// `rows` and `tiles`: a warp has a tile, a lane two of its rows.
__global__ void __launch_bounds__(kThreads) fill_rows(const __grid_constant__ Attention a, int64_t first_block) {
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32, tiles = range_tiles(a);
    if (n >= a.B * tiles) return;
    const int64_t b = n / tiles, tile = n % tiles;
    const Band band = band_of(a, b);
    TileKeys keys = {{0, 0}, kAllKeys};
#pragma unroll
    for (int half = 0; half < kRangeTile; half += 32) {
        const int i = (int)tile * kRangeTile + half + threadIdx.x % 32;
        const Keys row = range_of_row(a, band, b, i);
        a.ranges.rows[b * range_rows(a) + i] = row;
        keys.any = hull(keys.any, row);
        if (i < a.Nq) keys.all = common(keys.all, row);
    }
    keys = {hull_of_warp(keys.any), common_of_warp(keys.all)};
    if (threadIdx.x % 32 == 0) a.ranges.tiles[n] = keys;
}

// `queries`: a warp has a tile of keys, and looks at all queries.
__global__ void __launch_bounds__(kThreads) fill_queries(const __grid_constant__ Attention a, int64_t first_block) {
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32, key_tiles = range_key_tiles(a);
    if (n >= a.B * key_tiles) return;
    const Ranges ranges = ranges_of(a, n / key_tiles);
    const int j0 = (int)(n % key_tiles) * kRangeTile;
    Interval queries = {0, 0};
    for (int i = threadIdx.x % 32 * kMeetTile; i < a.Nq; i += 32 * kMeetTile)
        if (meet(keys_that_meet(ranges, i), {j0, j0 + kRangeTile})) queries = hull(queries, {i, i + kMeetTile});
    queries = hull_of_warp(queries);
    if (threadIdx.x % 32 == 0) a.ranges.queries[n] = queries;
}

cudaError_t launch(void (*kernel)(Attention, int64_t), const Attention &a, int64_t warps, CUstream_st *stream) {
    return launch_all((warps + kWarps - 1) / kWarps, kMostBlocks, [&](int64_t first, int grid) {
        kernel<<<grid, kThreads, 0, stream>>>(a, first);
        return cudaGetLastError();
    });
}

}  // namespace

const char *make_ranges(const Attention &a, bool with_queries, CUstream_st *stream) {
    cudaError_t error = launch(fill_rows, a, a.B * range_tiles(a), stream);
    if (error == cudaSuccess && with_queries) error = launch(fill_queries, a, a.B * range_key_tiles(a), stream);
    return why_not(error);
}

}  // namespace minimal_attn
