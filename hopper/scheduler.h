#pragma once
#include "hopper/params.h"
#include "hopper/pipeline.h"
namespace minimal_attn::hopper {

constexpr int kQueueStages = 2;  // one work tile ends while the next one is loaded and begun

// Under a mask so many of the last heads are worked on together that a block gets 4 of their tiles (2 and 3 are up to 3
// % slower, 8 is the same), but no more than have their K and V in 32 MB of the L2 cache.
constexpr int64_t kInterleavedTilesPerBlock = 4;
constexpr int64_t kL2Bytes = 32 << 20;
// Tiles are dealt out in a fixed order, there and back, the longest first, instead of being counted: without a mask any
// number; under one up to two a block, or so many, if of half types batches have one mask, and K and V are short and
// stay in the L2 cache: N 1000 at d 64 and 128 9 to 11 and 3 to 5 % faster; at N 4096, where tiles differ more, 2 %
// slower. Of float32 with a workspace all are counted.
constexpr int kFixedRounds = 4, kShortKeys = 2048;

// A tile of queries i0 <= i < i1 of head h in batch b, and the keys that some of its rows see.
struct alignas(16) WorkTile {  // aligned: read by fewer instructions, up to 2 % of half types at d 64
    int b, h, i0, i1;          // b < 0: there is no more work
    Keys visible;
    BandOf<int> band;
    int key_head;  // whose keys and values head h reads
};

// From p, if it can be: its limits in 64 bits are many instructions before a work's first load.
__device__ inline BandOf<int> band_of_batch(const Parameters &p, int b) {
    return p.same_band ? p.band : narrow(band_of(p.a, b));
}

// Keys that all 64 rows from i0 on see: their scores need no mask. With a negative scale none: all tiles are negated.
__device__ inline Keys fully_visible_keys(const Parameters &p, const WorkTile &work, int i0) {
    Keys fully_visible = keys_of_all(work.band, i0, i0 + 64);
    if (p.a.softmax_scale < 0.f) fully_visible.end = 0;
    return fully_visible;
}

// Which tile of queries a block computes next, and in what order.
template <class Tile>
struct TileScheduler {
    const Parameters &p;

    // The tile after tile n; after -1 the block's first
    __device__ int next(int n) const {
        if (n < 0) return blockIdx.x;
        if (p.tile_counter) return p.grid + atomicAdd(p.tile_counter, 1);
        const int next_round = (n / p.grid + 1) * p.grid;
        return next_round + (next_round - 1 - n);
    }
    __device__ WorkTile tile(int n) const {
        if (n >= p.work_tiles) return {-1};
        const int rest = n - p.sequential_heads * p.Tr;
        const int head = rest < 0 ? n / p.Tr : p.sequential_heads + rest % p.interleaved_heads, b = head / p.Hq,
                  h = head % p.Hq;
        const int i1 = p.a.Nq - (rest < 0 ? n % p.Tr : rest / p.interleaved_heads) * Tile::Br,
                  i0 = max(i1 - Tile::Br, 0);
        const BandOf<int> band = band_of_batch(p, b);
        Keys visible = keys_of_any(band, i0, i1);
        const int none = Tile::kAlignKeys ? band.keys.begin / Tile::Bc * Tile::Bc : 0;
        if (empty(visible)) visible = {none, none + 1};
        if (Tile::kAlignKeys) visible.begin = visible.begin / Tile::Bc * Tile::Bc;
        return {b, h, i0, i1, visible, band, h / p.group};
    }
};

// The order in which work tiles are computed, which the plan and the launch agree on.
struct Order {
    int grid;
    bool uses_counter;      // a counter in memory deals out the work tiles; else their order is fixed
    int interleaved_heads;  // heads that are worked on together
};

template <class Tile>
Order order_of(const Attention &a, int multiprocessors, int element, bool may_be_short) {
    const int64_t Tr = (a.Nq + Tile::Br - 1) / Tile::Br, heads = a.B * a.Hq, tiles = heads * Tr, group = a.Hq / a.Hkv;
    const int64_t grid = std::min<int64_t>(tiles, multiprocessors * Tile::BlocksPerSM);
    const int64_t in_L2 = kL2Bytes / (std::max<int64_t>(a.Nk, 1) * a.d * 2 * element) * group;  // heads
    const bool same_band = !a.seqlens_k && !a.leftpad_k && !a.offset;
    const bool is_short = may_be_short && is_masked(a) && same_band && a.Nk <= kShortKeys && heads <= in_L2;
    const bool in_order = tiles <= (is_short ? kFixedRounds : 2) * grid, uses_counter = !in_order && is_masked(a);
    const int64_t some =
        uses_counter ? clamp(std::min(kInterleavedTilesPerBlock * grid / Tr, in_L2), int64_t(1), heads) : 1;
    return {(int)grid, uses_counter, (int)(in_order ? heads : some)};
}

// What both launches fill in the same way; `counter` is null where the order is fixed.
template <class Tile>
void fill_schedule(Parameters &p, const Attention &a, const Plan &plan, const Order &order, int *counter) {
    p.Hq = a.Hq, p.Hkv = a.Hkv, p.group = a.Hq / a.Hkv, p.Tr = (a.Nq + Tile::Br - 1) / Tile::Br;
    p.work_tiles = a.B * a.Hq * p.Tr;
    p.same_band = !a.seqlens_k && !a.leftpad_k && !a.offset;
    if (p.same_band) p.band = narrow(band_of(a, 0));
    p.tile_counter = order.uses_counter ? counter : nullptr;
    p.interleaved_heads = order.interleaved_heads;
    p.sequential_heads = a.B * a.Hq - order.interleaved_heads;
    p.grid = plan.grid;
}

}  // namespace minimal_attn::hopper
