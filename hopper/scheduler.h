// scheduler.h: which work tile a block computes next, and how many blocks there are.
//
// A block computes one work tile after another. Where a mask makes tiles differ, blocks take them from a counter in
// memory, head after head. The tiles of the last heads are interleaved, longest first. In half.cu a kernel sorts them
// by length if there are ranges.
//
// If tiles are few or all alike, their order is fixed: round after round, and every second round is reversed. So the
// block with the longest tile of one round gets the shortest of the next. A fixed order needs no counter.
//
// By sequence (sequences.h) blocks take tiles from a counter in the tables: all heads of a tile of queries, then the
// next.
//
// With a float32 workspace (float32/forward.cu, produce), in backward_fused.cu and in backward_dq.cu, blocks always
// take work tiles from a counter. In backward_dk_dv.cu each block has one work tile.
#pragma once
#include <algorithm>

#include "hopper/params.h"
#include "hopper/pipeline.h"
#include "ranges.h"
#include "scores.h"
#include "sequences.h"

namespace minimal_attn::hopper {

constexpr int kQueueStages = 2;  // one work tile ends while the next one begins

// Under a mask the last heads are interleaved, so that blocks end together. Each block gets about 4 work tiles of these
// heads: 2 and 3 were up to 3 % slower, 8 the same. K and V of all interleaved heads must fit the L2 cache.
constexpr int64_t kInterleavedTilesPerBlock = 4;
constexpr int64_t kL2Bytes = 32 << 20;
// Under a mask the order is fixed up to 2 tiles a block. For 16-bit types it is fixed up to 4, if at most 2048 keys of
// each head stay in the L2 cache. At N 1000 this is 9 to 11 % faster at d 64, 3 to 5 % at d 128; N 4096: 2 % slower.
constexpr int kFixedRounds = 2, kFixedRoundsIfShort = 4, kShortKeys = 2048;

// The mask type of kernels that may read pages and the tables of sequences.h. Others are compiled without.
struct PagedBand : BandOf<int> {};
template <class Mask>
constexpr bool kIsPaged = std::is_same_v<Mask, PagedBand>;

// The entries of a work tile in the tables of ranges. The pointers are to global memory, or to a copy in shared memory
// that schedule (half.h) has made.
struct RangesOfTile {
    Keys keys;  // Ranges::keys
    const TileKeys *tiles;
    const Keys *rows;
    int i0;  // of the first row
};
__device__ inline Keys keys_of_row(const RangesOfTile &mask, int i) { return mask.rows[i - mask.i0]; }
// Both of the 64 queries from i0 on.
__device__ inline Keys keys_of_any(const RangesOfTile &mask, int i0, int) {
    return hull({0, 0}, mask.tiles[(i0 - mask.i0) / kRangeTile].any);
}
__device__ inline Keys keys_of_all(const RangesOfTile &mask, int i0, int) {
    return mask.tiles[(i0 - mask.i0) / kRangeTile].all;
}

// Queries i0 <= i < i1 of head h in batch b. Aligned, so that fewer instructions read it (up to 2 % at d 64). Mask is
// BandOf<int> (flash.h), PagedBand or Ranges (ranges.h).
template <class Mask>
struct alignas(16) WorkTileOf {
    int b, h, i0, i1;                                              // b < 0: no more work tiles
    Keys visible;                                                  // the keys that any of its rows sees
    std::conditional_t<kIsRanges<Mask>, RangesOfTile, Mask> mask;  // a band is its batch's
    int key_head;                                                  // the head of K and V that head h reads
};

// Whether tiles of keys are those of a mask's tables, and hidden ones are skipped.
template <class Tile, class Mask>
__device__ bool skips_tiles(const Attention &a) {
    return kHasTerms<Mask> && Tile::Br == kMaskTile && Tile::Bc == kMaskTile && a.mask_tables.shown;
}
// The tile of keys behind the one from j0 on.
template <class Tile, class Mask>
__device__ ShownTile next_tile(const Attention &a, const WorkTileOf<Mask> &work, int j0) {
    if constexpr (kHasTerms<Mask>)
        if (skips_tiles<Tile, Mask>(a)) return next_shown(a, work.b, work.i0, j0 + Tile::Bc);
    return {j0 + Tile::Bc, false};
}

// The band comes from p if possible: computing it in 64 bits would delay the first load of a work tile.
__device__ inline BandOf<int> band_of_batch(const Parameters &p, int b) {
    return p.same_band ? p.band : narrow(band_of(p.a, b));
}
template <class Mask>
__device__ Mask mask_of_batch(const Parameters &p, int b) {
    if constexpr (kIsRanges<Mask>)
        return {ranges_of(p.a, b)};
    else
        return {band_of_batch(p, b)};
}

// The keys that all 64 rows from i0 on see: a tile within needs no mask. With a negative softmax_scale every tile needs
// mask_scores, which also negates Sij, so this returns no keys.
template <class Mask>
__device__ Keys fully_visible_keys(const Parameters &p, const WorkTileOf<Mask> &work, int i0) {
    Keys fully_visible = keys_of_all(work.mask, i0, i0 + 64);
    if (p.a.softmax_scale < 0.f) fully_visible.end = 0;
    return fully_visible;
}

// Where the keys end that the 64 rows from i0 on see. Other rows of the work tile may see further keys.
template <class Mask>
__device__ int end_of_keys(const WorkTileOf<Mask> &work, int i0) {
    const int i1 = min(i0 + 64, work.i1);
    return i0 < i1 ? min(keys_of_any(work.mask, i0, i1).end, work.visible.end) : 0;
}

template <class Tile, class Mask>
struct TileScheduler {
    const Parameters &p;

    __device__ static auto of_tile(const Mask &mask, int i0) {
        if constexpr (kIsRanges<Mask>)
            return RangesOfTile{mask.keys, mask.tiles + i0 / kRangeTile, mask.rows + i0, i0};
        else
            return mask;
    }

    // The number of the block's work tile after n; n = -1 asks for the first one.
    __device__ int next(int n) const {
        if (n < 0) return blockIdx.x;
        if (p.tile_counter) return p.grid + atomicAdd(p.tile_counter, 1);
        const int next_round = (n / p.grid + 1) * p.grid;
        return next_round + (next_round - 1 - n);
    }
    // Work tile n. A head's last rows come first: under a causal mask they see the most keys. The first tile may be
    // short. With ranges the last one may be: tiles begin where those of the tables do.
    __device__ WorkTileOf<Mask> tile(int n) const {
        if constexpr (kIsPaged<Mask>)
            if (p.a.by_sequence) return tile_of_sequence(n);
        if (n >= p.work_tiles) return {-1};
        const int rest = n - p.sequential_heads * p.Tr;  // below 0: a tile of a sequential head
        const int head = rest < 0 ? n / p.Tr : p.sequential_heads + rest % p.interleaved_heads;
        const int b = head / p.Hq, h = head % p.Hq;
        const int tile_of_head = rest < 0 ? n % p.Tr : rest / p.interleaved_heads;
        int i1 = p.a.Nq - tile_of_head * Tile::Br, i0 = max(i1 - Tile::Br, 0);
        if constexpr (kIsRanges<Mask>) {
            i0 = (p.order && rest >= 0 ? p.order[b * p.Tr + tile_of_head] : p.Tr - 1 - tile_of_head) * Tile::Br;
            i1 = min(i0 + Tile::Br, p.a.Nq);
        }
        const Mask of_batch = mask_of_batch<Mask>(p, b);
        const auto mask = of_tile(of_batch, i0);
        Keys visible = keys_of_any(of_batch, i0, i1);
        // Without a visible key one tile is computed all the same, and masked.
        if (empty(visible)) visible = {mask.keys.begin, mask.keys.begin + 1};
        // hopper/terms.h reads two neighbours at once, and hopper/dropped.h wants multiples of 16. Keys before
        // keys.begin may be anything: consumers set them to 0.
        if (kHasTerms<Mask>) visible.begin = max(visible.begin / 16 * 16, has_dropout(p.a) ? 0 : mask.keys.begin);
        if (Tile::AlignKeys || skips_tiles<Tile, Mask>(p.a)) visible.begin = visible.begin / Tile::Bc * Tile::Bc;
        if (kIsPaged<Mask> && p.rows_of_piece) visible.begin -= visible.begin % p.rows_of_piece;
        return {b, h, i0, i1, visible, mask, h / p.group};
    }
    // Work tile n by the tables of sequences.h.
    __device__ WorkTileOf<Mask> tile_of_sequence(int n) const {
        if (n / p.Hq >= p.a.sequences.counts->tiles) return {-1};
        const Sequence tile = p.a.sequences.tiles[n / p.Hq];
        const Mask band = {narrow(band_of(p.a, tile))};
        Keys visible = keys_of_any(band, tile.queries.begin, tile.queries.end);
        if (empty(visible)) visible = {band.keys.begin, band.keys.begin + 1};
        if (p.rows_of_piece) visible.begin -= visible.begin % p.rows_of_piece;
        const int h = n % p.Hq;
        return {0, h, tile.queries.begin, tile.queries.end, visible, band, h / p.group};
    }
};

// In which order blocks take the work tiles of a call; see this file's header.
struct Order {
    int64_t grid;       // blocks
    bool uses_counter;  // else the order is fixed
    int64_t interleaved_heads;
};

inline int64_t tiles_of_head(const Attention &a, int Br) {
    return a.by_sequence ? most_sequence_tiles(a, Br) : (a.Nq + Br - 1) / Br;
}

template <class Tile>
Order order_of(const Attention &a, int multiprocessors) {
    const int64_t heads = a.B * a.Hq, Tr = tiles_of_head(a, Tile::Br), tiles = heads * Tr;
    const int64_t grid = std::min<int64_t>(tiles, multiprocessors * Tile::BlocksPerSM);
    const int64_t bytes_of_KV = std::max<int64_t>(a.Nk, 1) * (a.d + a.d_v) * element_size(a.dtype);  // of one key head
    const int64_t heads_in_L2 = kL2Bytes / bytes_of_KV * (a.Hq / a.Hkv);
    if (a.by_sequence) return {grid, false, heads};  // sequences.h has the counter
    const bool is_short = is_masked(a) && has_same_band(a) && a.Nk <= kShortKeys && heads <= heads_in_L2;
    const int rounds = is_short && a.dtype != Dtype::float32 ? kFixedRoundsIfShort : kFixedRounds;
    if (tiles <= rounds * grid) return {grid, false, heads};
    if (!is_masked(a) && !a.terms.mask) return {grid, false, 1};
    return {grid, true, clamp(std::min(kInterleavedTilesPerBlock * grid / Tr, heads_in_L2), int64_t(1), heads)};
}

}  // namespace minimal_attn::hopper
