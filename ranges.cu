// ranges.cu: the tables of ranges.h on a GPU. cpu/ranges.cpp fills them on a CPU.
//
//     trim_rows         `rows`, where all heads share an attn_mask: from the first to the last key that it shows; a warp
//                         has a query
//     fill_query_tables   `rows`, `tiles`; a warp has a tile of queries, a lane two of its rows
//     sort_tiles          sort_tiles_cuda's; a warp finds the place of a tile, by counting those before it
//     fill_key_tables     `meeting`, `batches`, `seeing`, for backward passes only; a warp has a tile of keys
//
// Uses ranges.h: range_of_row, position_of_query, add_row, keys_met, tile_has_blind_query, hull, intersection; flash.h:
// band_of; device.h: launch_all, launch_overlapping, let_next_kernel_start, wait_for_kernel_before, why_not.
#include "ranges.h"

#include "device.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// x of all lanes, combined by hull or intersection. All lanes get the result.
template <class Combine>
__device__ Interval over_warp(Interval x, const Combine &combine) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2)
        x = combine(x, Interval{__shfl_xor_sync(~0u, x.begin, other), __shfl_xor_sync(~0u, x.end, other)});
    return x;
}

// x of the lane before; lane 0 gets lane 31's `last`.
__device__ Interval lane_before(Interval x, Interval last) {
    const Interval from = threadIdx.x % 32 == 31 ? last : x;
    const int lane = (threadIdx.x + 31) % 32;
    return {__shfl_sync(~0u, from.begin, lane), __shfl_sync(~0u, from.end, lane)};
}

// Tiles of keys that the mask hides from all of a tile's queries are not computed: rows end at the first and the last
// visible key.
__host__ __device__ bool trims_rows(const Attention &a) {
    return a.terms.mask && (a.terms.mask_stride.head == 0 || a.Hq == 1);
}

__global__ void __launch_bounds__(kThreads) trim_rows(const __grid_constant__ Attention a, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32;
    if (n >= a.B * a.Nq) return;
    const int64_t b = n / a.Nq;
    const int i = (int)(n % a.Nq), lane = threadIdx.x % 32;
    constexpr int kStep = 8 * 32;  // keys: so many loads at a time
    const unsigned char *const mask =
        a.terms.mask + b * a.terms.mask_stride.batch + i * a.terms.mask_stride.row + lane * a.terms.mask_stride.key;
    const Keys keys = range_of_row(a, band_of(a, b), b, i);
    const auto shown_from = [&](int j0) {
        unsigned char x[kStep / 32];
        Keys shown = {0, 0};
#pragma unroll
        for (int n = 0; n < kStep / 32; ++n) {
            const int j = j0 + 32 * n;
            x[n] = 0;
            if (keys.begin <= j + lane && j + lane < keys.end) x[n] = mask[j * a.terms.mask_stride.key];
        }
#pragma unroll
        for (int n = 0; n < kStep / 32; ++n)
            if (x[n]) shown = hull(shown, {j0 + 32 * n + lane, j0 + 32 * n + lane + 1});
        return over_warp(shown, hull);
    };
    Keys first = {0, 0}, last = {0, 0};
    for (int j = keys.begin; j < keys.end && empty(first); j += kStep) first = shown_from(j);
    for (int j = keys.end - kStep; !empty(first) && empty(last); j -= kStep) last = shown_from(j);
    // A row without a key is empty behind the last key: so ranges that grow still do.
    if (lane == 0) a.ranges.rows[b * range_rows(a) + i] = empty(first) ? Keys{keys.end, keys.end} : hull(first, last);
}

__device__ Keys seen_by_row(const Attention &a, const Band &band, int64_t b, int i) {
    if (i < a.Nq && trims_rows(a)) return a.ranges.rows[b * range_rows(a) + i];
    return range_of_row(a, band, b, i);
}

__global__ void __launch_bounds__(kThreads)
    fill_query_tables(const __grid_constant__ Attention a, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32, tiles = range_tiles(a);
    if (n >= a.B * tiles) return;
    const int64_t b = n / tiles;
    const Band band = band_of(a, b);
    const int i0 = (int)(n % tiles) * kRangeTile, lane = threadIdx.x % 32;
    TileKeys tile = {{0, 0}, kAllKeys, true};
    Keys last = lane == 31 && i0 > 0 ? seen_by_row(a, band, b, i0 - 1) : Keys{0, 0};  // before this half
#pragma unroll
    for (int i = i0 + lane; i < i0 + kRangeTile; i += 32) {
        const Keys row = seen_by_row(a, band, b, i), before = lane_before(row, last);
        last = row;
        a.ranges.rows[b * range_rows(a) + i] = row;
        if (a.terms.positions) a.terms.positions[b * range_rows(a) + i] = position_of_query(a, b, i);
        if (i >= a.Nq) continue;
        add_row(tile, row);
        tile.grows &= before.begin <= row.begin && before.end <= row.end;
    }
    tile = {over_warp(tile.any, hull), over_warp(tile.all, intersection), __all_sync(~0u, tile.grows) != 0};
    if (threadIdx.x % 32 == 0) a.ranges.tiles[n] = tile;
}

// Which of `queries` see key j, for two keys. The ranges grow. The four binary searches run side by side, since each
// step waits for memory.
__device__ void find_seeing(Interval (&seeing)[2], const Ranges &ranges, Interval queries, const int (&j)[2]) {
    for (Interval &x : seeing) x = {queries.begin, queries.begin};
    for (int step = 1 << 30; step > 0; step /= 2) {
        if (step > queries.end - queries.begin) continue;
        const auto pass = [&](int &i, const auto &is_before) {
            if (i + step <= queries.end && is_before(keys_of_row(ranges, i + step - 1))) i += step;
        };
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            pass(seeing[x].begin, [&](Keys row) { return row.end <= j[x]; });
            pass(seeing[x].end, [&](Keys row) { return row.begin <= j[x]; });
        }
    }
}

// A warp looks at all queries.
__global__ void __launch_bounds__(kThreads) fill_key_tables(const __grid_constant__ Attention a, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32, key_tiles = range_key_tiles(a);
    if (n >= a.B * key_tiles) return;
    const int64_t b = n / key_tiles;
    const Ranges ranges = ranges_of(a, b);
    const int j0 = (int)(n % key_tiles) * kRangeTile, lane = threadIdx.x % 32;
    Interval queries = {0, 0};
    bool grows = true, any_blind = false;
#pragma unroll 4
    for (int i = lane * kMeetTile; i < a.Nq; i += 32 * kMeetTile) {
        if (meet(keys_met(ranges, i), {j0, j0 + kRangeTile})) queries = hull(queries, {i, i + kMeetTile});
        for (int i_tile = i; i_tile < i + kMeetTile; i_tile += kRangeTile) {
            grows &= ranges.tiles[i_tile / kRangeTile].grows;
            any_blind |= i_tile < a.Nq && tile_has_blind_query(ranges, i_tile);
        }
    }
    queries = over_warp(queries, hull), grows = __all_sync(~0u, grows), any_blind = __any_sync(~0u, any_blind);
    if (lane == 0) a.ranges.meeting[n] = queries;
    if (lane == 0 && j0 == 0) a.ranges.batches[b] = {grows, any_blind};
    if (!grows) return;
    Interval seeing[2];
    find_seeing(seeing, ranges, {queries.begin, min(queries.end, a.Nq)}, {j0 + lane, j0 + lane + 32});
    for (int x = 0; x < 2; ++x) a.ranges.seeing[n * kRangeTile + lane + 32 * x] = seeing[x];
}

__global__ void __launch_bounds__(kThreads)
    sort_tiles(const __grid_constant__ Attention a, int Br, int Tr, int *order, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32;
    if (n >= a.B * Tr) return;
    const int64_t b = n / Tr;
    const Ranges ranges = ranges_of(a, b);
    const auto keys_of = [&](int tile) {
        const Keys any = keys_of_any(ranges, tile * Br, (tile + 1) * Br);
        return any.end - any.begin;
    };
    const int tile = n % Tr, keys = keys_of(tile);
    int before = 0;
#pragma unroll 4
    for (int other = threadIdx.x % 32; other < Tr; other += 32) {
        const int x = keys_of(other);
        before += x > keys || (x == keys && other > tile);
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) before += __shfl_xor_sync(~0u, before, other);
    if (threadIdx.x % 32 == 0) order[b * Tr + before] = tile;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Attention, Parameters...), const Attention &a, int64_t warps, CUstream_st *stream,
                   const Arguments &...arguments) {
    return launch_all((warps + kWarps - 1) / kWarps, kMostBlocks, [&](int64_t first, int grid) {
        return launch_overlapping(kernel, grid, kThreads, 0, stream, a, arguments..., first);
    });
}

}  // namespace

const char *make_ranges_cuda(const Attention &a, bool backward, CUstream_st *stream) {
    cudaError_t error = trims_rows(a) ? launch(trim_rows, a, a.B * a.Nq, stream) : cudaSuccess;
    if (error == cudaSuccess) error = launch(fill_query_tables, a, a.B * range_tiles(a), stream);
    if (error == cudaSuccess && backward) error = launch(fill_key_tables, a, a.B * range_key_tiles(a), stream);
    return why_not(error);
}

const char *sort_tiles_cuda(const Attention &a, int Br, int *order, CUstream_st *stream) {
    const int Tr = (a.Nq + Br - 1) / Br;
    return why_not(launch(sort_tiles, a, a.B * Tr, stream, Br, Tr, order));
}

}  // namespace minimal_attn
