// ranges.cu: the tables of ranges.h on a GPU. cpu/ranges.cpp fills them on a CPU.
//
//     look_at_mask        `mask_tables.tiles`, where all heads share a bool mask; a block has a tile
//     trim_rows           then `rows`: from the first to the last key that it shows; `shown`; a warp has a query
//     fill_query_tables   `rows`, `tiles`; a warp has a tile of queries, a lane two of its rows
//     sort_tiles          sort_tiles_cuda's; a warp finds the place of a tile, by counting those before it
//     cut_shown           `shown`, for backward passes: what `tiles` say of ranges, too; a thread has a word
//     fill_key_tables     `meeting`, `batches`, `seeing`, for backward passes only; a warp has a tile of keys
//
// Uses ranges.h: range_of_row, position_of_query, add_row, keys_met, tile_has_blind_query, hull, intersection,
// keys_of_all, has_mask_tables, mask_tiles, shown_tiles, words_of_shown, is_shown; flash.h: band_of; device.h: launch_all, launch_overlapping, let_next_kernel_start, wait_for_kernel_before, why_not.
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

// A block's tile of 128 x 128 of the mask. A thread reads 16 keys of each 16th query, or, where they don't lie so, a
// key of each query.
__global__ void __launch_bounds__(kThreads)
    look_at_mask(const __grid_constant__ Attention a, bool in_sixteens, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    static_assert(kThreads == kMaskTile);
    const int64_t n = first_block + blockIdx.x, key_tiles = mask_tiles(a.Nk), query_tiles = mask_tiles(a.Nq);
    const PairStrides &stride = a.terms.mask_stride;
    const int i0 = int(n / key_tiles % query_tiles) * kMaskTile, j0 = int(n % key_tiles) * kMaskTile;
    const unsigned char *const mask = a.terms.mask + n / key_tiles / query_tiles * stride.batch;
    bool any = false, all = true;
    if (in_sixteens && j0 + kMaskTile <= a.Nk) {
        constexpr int kRows = kThreads / 8;  // at a time
        uint4 loaded[kMaskTile / kRows];
#pragma unroll
        for (int n = 0; n < kMaskTile / kRows; ++n) {  // the last query again instead of those behind it
            const int i = min(i0 + kRows * n + (int)threadIdx.x / 8, a.Nq - 1);
            loaded[n] = __ldg((const uint4 *)(mask + i * stride.row + j0 + threadIdx.x % 8 * 16));
        }
        for (const uint4 &x : loaded) {
            any |= (x.x | x.y | x.z | x.w) != 0;
            all &= (__vcmpeq4(x.x, 0) | __vcmpeq4(x.y, 0) | __vcmpeq4(x.z, 0) | __vcmpeq4(x.w, 0)) == 0;
        }
    } else if (const int j = j0 + threadIdx.x; j < a.Nk) {
#pragma unroll 8
        for (int i = i0; i < min(i0 + kMaskTile, a.Nq); ++i) {
            const bool is_visible = mask[i * stride.row + j * stride.key];
            any |= is_visible, all &= is_visible;
        }
    }
    any = __syncthreads_or(any), all = __syncthreads_and(all);
    if (threadIdx.x == 0) a.mask_tables.tiles[n] = !any ? hides_all : all ? shows_all : hides_some;
}

// The keys that the mask shows of `keys`, those of query i in one tile. Four keys of each lane.
__device__ Keys shown_in_tile(const Attention &a, int64_t b, int i, Keys keys, MaskTile tile) {
    if (tile == shows_all || empty(keys)) return keys;
    const PairStrides &stride = a.terms.mask_stride;
    const unsigned char *const mask = a.terms.mask + b * stride.batch + i * stride.row;
    Keys shown = {0, 0};
#pragma unroll
    for (int x = 0; x < kMaskTile; x += 32)
        if (const int j = keys.begin + x + threadIdx.x % 32; j < keys.end && mask[j * stride.key])
            shown = hull(shown, {j, j + 1});
    return over_warp(shown, hull);
}

// Tiles of keys that the mask hides from all of a tile's queries are not computed.
__global__ void __launch_bounds__(kThreads) trim_rows(const __grid_constant__ Attention a, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int64_t n = (first_block + blockIdx.x) * kWarps + threadIdx.x / 32;
    if (n >= a.B * a.Nq) return;
    const int64_t b = n / a.Nq;
    const int i = (int)(n % a.Nq), lane = threadIdx.x % 32, end = mask_tiles(a.Nk);
    const unsigned char *const tiles = a.mask_tables.tiles + (b * mask_tiles(a.Nq) + i / kMaskTile) * end;
    // Of 32 tiles, a lane each.
    const auto tile_of_lane = [&](int first) { return first + lane < end ? (MaskTile)tiles[first + lane] : hides_all; };
    const Keys keys = range_of_row(a, band_of(a, b), b, i);
    // The visible keys of the first or last tile that has some.
    const auto find = [&](bool from_end) {
        const int begin = keys.begin / kMaskTile / 32 * 32, last = (keys.end - 1) / kMaskTile / 32 * 32;
        for (int x = begin; x <= last; x += 32) {
            const int first = from_end ? last - (x - begin) : x;
            const MaskTile mine = tile_of_lane(first);
            for (unsigned left = __ballot_sync(~0u, mine != hides_all); left;) {
                const int at = from_end ? 31 - __clz(left) : __ffs(left) - 1, j0 = (first + at) * kMaskTile;
                left &= ~(1u << at);
                const MaskTile tile = (MaskTile)__shfl_sync(~0u, (int)mine, at);
                const Keys shown = shown_in_tile(a, b, i, intersection(keys, {j0, j0 + kMaskTile}), tile);
                if (!empty(shown)) return shown;
            }
        }
        return Keys{0, 0};
    };
    const Keys first = empty(keys) ? Keys{0, 0} : find(false), last = empty(first) ? first : find(true);
    // A row without a key is empty behind the last key: so ranges that grow still do.
    if (lane == 0) a.ranges.rows[b * range_rows(a) + i] = empty(first) ? Keys{keys.end, keys.end} : hull(first, last);
    if (!a.mask_tables.shown || i % kMaskTile) return;
    const auto bits = [&](int first, const auto &is_one) {
        const uint64_t low = __ballot_sync(~0u, is_one(tile_of_lane(first)));
        return low | (uint64_t)__ballot_sync(~0u, is_one(tile_of_lane(first + 32))) << 32;
    };
    for (int word = 0; word < words_of_shown(a); ++word) {
        const ShownTiles found = {bits(64 * word, [](MaskTile x) { return x != hides_all; }),
                                  bits(64 * word, [](MaskTile x) { return x != shows_all; })};
        if (lane == 0) ((ShownTiles *)shown_tiles(a, b, i))[word] = found;
    }
}

__device__ Keys seen_by_row(const Attention &a, const Band &band, int64_t b, int i) {
    if (i < a.Nq && has_mask_tables(a)) return a.ranges.rows[b * range_rows(a) + i];
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

// For backward passes: the tiles that 128 queries meet alone are shown, and those within the ranges of all are whole. A
// thread has a word.
__global__ void __launch_bounds__(kThreads) cut_shown(const __grid_constant__ Attention a, int64_t first_block) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int64_t words = words_of_shown(a), n = (first_block + blockIdx.x) * kThreads + threadIdx.x;
    const int64_t group = n / words, b = group / mask_tiles(a.Nq);
    if (b >= a.B) return;
    const int i0 = int(group % mask_tiles(a.Nq)) * kMaskTile, first = int(n % words) * 64;
    const Ranges ranges = ranges_of(a, b);
    const Keys any = keys_met(ranges, i0), all = keys_of_all(ranges, i0, min(i0 + kMaskTile, a.Nq));
    // Bits of the tiles from `begin` to `end`.
    const auto bits = [&](int begin, int end) {
        const auto below = [&](int tile) {
            return tile - first >= 64 ? ~uint64_t(0) : (uint64_t(1) << max(tile - first, 0)) - 1;
        };
        return begin < end ? below(end) & ~below(begin) : 0;
    };
    ShownTiles &word = a.mask_tables.shown[n];
    word.shown &= empty(any) ? 0 : bits(any.begin / kMaskTile, mask_tiles(any.end));
    word.partial |= ~bits(mask_tiles(all.begin), all.end / kMaskTile);
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
    bool grows = !a.mask_tables.shown, any_blind = false;  // kernels ask `shown` where ranges don't grow
#pragma unroll 4
    for (int i = lane * kMeetTile; i < a.Nq; i += 32 * kMeetTile) {
        if (a.mask_tables.shown ? is_shown(a, b, i, j0) : meet(keys_met(ranges, i), {j0, j0 + kRangeTile}))
            queries = hull(queries, {i, i + kMeetTile});
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
    cudaError_t error = cudaSuccess;
    if (has_mask_tables(a)) {
        const PairStrides &stride = a.terms.mask_stride;
        const bool in_sixteens = stride.key == 1 && ((uintptr_t)a.terms.mask | stride.row | stride.batch) % 16 == 0;
        const int64_t tiles = a.B * mask_tiles(a.Nq) * mask_tiles(a.Nk);
        error = launch(look_at_mask, a, tiles * kWarps, stream, in_sixteens);
        if (error == cudaSuccess) error = launch(trim_rows, a, a.B * a.Nq, stream);
    }
    if (error == cudaSuccess) error = launch(fill_query_tables, a, a.B * range_tiles(a), stream);
    if (error == cudaSuccess && backward && a.mask_tables.shown) {
        const int64_t words = a.B * mask_tiles(a.Nq) * words_of_shown(a);
        error = launch(cut_shown, a, (words + 31) / 32, stream);
    }
    if (error == cudaSuccess && backward) error = launch(fill_key_tables, a, a.B * range_key_tiles(a), stream);
    return why_not(error);
}

const char *sort_tiles_cuda(const Attention &a, int Br, int *order, CUstream_st *stream) {
    const int Tr = (a.Nq + Br - 1) / Br;
    return why_not(launch(sort_tiles, a, a.B * Tr, stream, Br, Tr, order));
}

}  // namespace minimal_attn
