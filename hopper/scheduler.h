// scheduler.h: which work tile a block computes next, and how many blocks there are.
//
// A block takes one work tile after another. Where a mask makes tiles differ, a counter in memory deals them out: head
// after head, in the end the tiles of the last heads together, the longest first. If there are few tiles, or all are alike, their order is fixed: round after round, to and fro, so that
// the block with the longest tile of one round gets the shortest of the next. That saves setting the counter to 0, and
// the kernel can overlap the one before it.
#pragma once
#include <algorithm>

#include "hopper/params.h"
#include "hopper/pipeline.h"

namespace minimal_attn::hopper {

constexpr int kQueueStages = 2;  // one work tile ends while the next one begins

// Under a mask the last heads are interleaved, the longest tiles of all of them first, so that blocks end together. So
// many heads are interleaved that each block gets about 4 of their tiles (2 and 3: up to 3 % slower; 8: the same). Their K and V must fit the L2 cache.
constexpr int64_t kInterleavedTilesPerBlock = 4;
constexpr int64_t kL2Bytes = 32 << 20;
// Under a mask the order is fixed up to 2 tiles a block; for 16-bit types up to 4, with at most 2048 keys that stay in
// the L2 cache: at N 1000 9 to 11 % faster at d 64, 3 to 5 % at d 128; at N 4096, where tiles differ more, 2 % slower.
constexpr int kFixedRounds = 4, kShortKeys = 2048;

// Queries i0 <= i < i1 of head h in batch b. Aligned, so that fewer instructions read it (up to 2 % at d 64).
struct alignas(16) WorkTile {
    int b, h, i0, i1;  // b < 0: no work tile is left
    Keys visible;      // the keys that any of its rows sees
    BandOf<int> band;  // its batch's mask
    int key_head;      // the head of K and V that head h reads
};

// Taken from p if possible: computing it in 64 bits would delay the first load of a work tile.
__device__ inline BandOf<int> band_of_batch(const Parameters &p, int b) {
    return p.same_band ? p.band : narrow(band_of(p.a, b));
}

// The keys that all 64 rows from i0 on see: no mask there. None if the scale is negative, since masking negates Sij.
__device__ inline Keys fully_visible_keys(const Parameters &p, const WorkTile &work, int i0) {
    Keys fully_visible = keys_of_all(work.band, i0, i0 + 64);
    if (p.a.softmax_scale < 0.f) fully_visible.end = 0;
    return fully_visible;
}

template <class Tile>
struct TileScheduler {
    const Parameters &p;

    // The number of the work tile after n; after -1 the block's first one.
    __device__ int next(int n) const {
        if (n < 0) return blockIdx.x;
        if (p.tile_counter) return p.grid + atomicAdd(p.tile_counter, 1);
        const int next_round = (n / p.grid + 1) * p.grid;
        return next_round + (next_round - 1 - n);
    }
    // Work tile n. Of a head the last rows come first: under a causal mask they see the most keys.
    __device__ WorkTile tile(int n) const {
        if (n >= p.work_tiles) return {-1};
        const int rest = n - p.sequential_heads * p.Tr;
        const int head = rest < 0 ? n / p.Tr : p.sequential_heads + rest % p.interleaved_heads;
        const int b = head / p.Hq, h = head % p.Hq;
        const int tile_of_head = rest < 0 ? n % p.Tr : rest / p.interleaved_heads;
        const int i1 = p.a.Nq - tile_of_head * Tile::Br, i0 = max(i1 - Tile::Br, 0);
        const BandOf<int> band = band_of_batch(p, b);
        Keys visible = keys_of_any(band, i0, i1);
        // Without a visible key one tile is computed all the same, and masked.
        const int none = Tile::kAlignKeys ? band.keys.begin / Tile::Bc * Tile::Bc : 0;
        if (empty(visible)) visible = {none, none + 1};
        if (Tile::kAlignKeys) visible.begin = visible.begin / Tile::Bc * Tile::Bc;
        return {b, h, i0, i1, visible, band, h / p.group};
    }
};

// The order of work tiles, which the plan and the launch compute alike.
struct Order {
    int grid;
    bool uses_counter;  // else the order is fixed
    int interleaved_heads;
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

// Sets what TileScheduler reads. `counter` is used where the order needs one.
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
