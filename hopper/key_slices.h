// key_slices.h: where whole tiles of keys would leave multiprocessors idle, a block computes a slice of a tile. A slice
// walks some of the queries that see the keys. sum_slices adds the slices' dK and dV.
#pragma once
#include <algorithm>
#include <cmath>

#include "hopper/key_tiles.h"

namespace minimal_attn::hopper {

// The n-th work tile: whole tiles of keys come first, then the slices of the others.
__device__ inline KeyWork key_work(const KeyParameters &p, int n) {
    const int slice = n - p.whole_tiles;
    return slice < 0 ? KeyWork{n, kWhole} : KeyWork{p.whole_tiles + (slice >> p.log_slices), slice};
}

// A slice of a tile of keys, or all of it, and how it walks the queries. A step is one tile of queries of one head.
// Each slice has the next steps_of_slice steps of its tile, the last slices fewer or none.
template <class Tile, class Mask>
struct KeySlice : KeyTile<Tile, Mask> {
    using Base = KeyTile<Tile, Mask>;
    using Base::b, Base::may_skip, Base::p;
    using Base::band, Base::grows, Base::i0, Base::i1, Base::is_met, Base::is_ranges, Base::j0, Base::mask;
    int start;      // the query where the walk of each head begins
    int all_steps;  // of the tile
    int index, steps_of_slice;
    int h, i;   // where this slice begins
    int steps;  // of this slice; below 1: none

    __device__ KeySlice(const KeyParameters &p, const KeyWork &work)
        : KeySlice(p, work, key_entry<Tile, Mask>(p, work.tile)) {}
    __device__ KeySlice(const KeyParameters &p, const KeyWork &work, const KeyEntry<Mask> &entry)
        : Base(p, work.tile, entry) {
        // Where all queries see the keys, each tile of keys begins at other queries: so blocks add to different dQi.
        start = !is_ranges && i0 == 0 && i1 == p.a.Nq ? (j0 & p.starts_apart) % i1 / Tile::Br * Tile::Br : i0;
        const int steps_of_head = (i1 - i0 + Tile::Br - 1) / Tile::Br;
        all_steps = steps_of_head * (this->unseen ? 1 : (int)p.group);
        const int log_slices = work.slice == kWhole ? 0 : p.log_slices;
        const auto share = [&](int all) { return ((all - 1) >> log_slices) + 1; };
        index = work.slice & ((1 << log_slices) - 1);
        steps_of_slice = p.whole_heads ? share(p.group) * steps_of_head : share(all_steps);
        int before = index * steps_of_slice;
        steps = min(steps_of_slice, all_steps - before);
        h = this->h0;
        for (; before >= steps_of_head; before -= steps_of_head) ++h;  // no division: it has no uniform result
        i = start + before * Tile::Br;
        if (i >= i1) i -= steps_of_head * Tile::Br;
    }
    // Entries come from memory. By this nvcc knows that all lanes of a warp have the same numbers, which the loop over
    // queries reads.
    __device__ KeySlice of_warp() const {
        KeySlice same = *this;
        if constexpr (is_ranges) {
            for (int *x : {&same.i0, &same.i1, &same.start, &same.h, &same.i, &same.steps}) *x = broadcast_lane0(*x);
            same.any_blind = broadcast_lane0(same.any_blind);
            if constexpr (!Tile::AddsDQ || kIsGeneral<Mask>) same.batch_grows = broadcast_lane0(same.batch_grows);
        }
        return same;
    }
    // In order: how many tiles of keys add to dQi of the queries from i on before this one. They are all that the same
    // queries see of later keys.
    __device__ int tiles_before(int i) const {
        if constexpr (may_skip)
            if (p.a.mask_tables.shown)
                return count_shown(p.a, b, i, j0 / kMaskTile + 1, mask_tiles(keys_met(mask(), i).end));
        if constexpr (is_ranges)
            return (keys_met(mask(), i).end - 1 - j0) / Tile::Bc;
        else
            return (min(i + Tile::Br + band.last, band.keys.end) - 1 - j0) / Tile::Bc;
    }
    // Calls use(h, i, is_first) for each step. If the ranges don't grow, it skips tiles of queries that don't meet the
    // keys. One loop serves both cases, since two would take more registers.
    template <class Use>
    __device__ void for_each_step(const Use &use) const {
        int h = this->h, i = this->i;
        for (int n = 0; n < steps; ++n) {
            // The first step meets them: `meeting` begins there.
            if (!is_ranges || grows() || is_met(i)) use(h, i, n == 0);
            i += Tile::Br;
            if (i >= i1) i = i0;
            if (i == start) ++h;
        }
    }
};

// Stores this warp's sums of a slice, and counts the steps. The warp that completes the count adds all slices in their
// order: so the bits don't depend on which warp that is. Returns whether this warp did.
template <class Tile, class Mask, int... Counts>
__device__ bool sum_slices(const KeyParameters &p, const KeySlice<Tile, Mask> &keys, int slice,
                           float (&...sums)[Counts]) {
    constexpr int kWarps = 4 * Tile::Consumers, kSlice = Tile::SumsOfThread / 4 * 32;
    static_assert((Counts + ...) <= Tile::SumsOfThread);
    // Opaque: else ptxas keeps threadIdx.x in a register during the loop over queries, which was 5 % slower at d 128.
    const int thread = opaque(threadIdx.x), lane = thread % 32;
    const int warp = (slice >> p.log_slices) * kWarps + thread / 32 - 4;
    float4 *from = p.slices + ((int64_t)warp << p.log_slices) * kSlice + lane, *to = from + keys.index * kSlice;
    const auto store = [&](const auto &sum) {
        constexpr int kFours = sizeof(sum) / 16;
#pragma unroll
        for (int x = 0; x < kFours; ++x) __stcg(to + 32 * x, *(const float4 *)&sum[4 * x]);
        to += 32 * kFours;
    };
    (store(sums), ...);
    __syncwarp();
    const int before = lane == 0 ? add_acquire_release(p.steps_stored[warp], keys.steps) : 0;
    __syncwarp();  // lane 0 has acquired for all lanes
    if (broadcast_lane0(before) + keys.steps < keys.all_steps) return false;
    const auto clear = [](auto &sum) {
        constexpr int kCount = sizeof(sum) / 4;
#pragma unroll
        for (int x = 0; x < kCount; ++x) sum[x] = 0.f;
    };
    const auto add = [&](auto &sum) {
        constexpr int kFours = sizeof(sum) / 16;
#pragma unroll
        for (int x = 0; x < kFours; ++x) {
            const float4 four = __ldcg(from + 32 * x);
            sum[4 * x] += four.x, sum[4 * x + 1] += four.y, sum[4 * x + 2] += four.z, sum[4 * x + 3] += four.w;
        }
        from += 32 * kFours;
    };
    (clear(sums), ...);
    for (int step = 0; step < keys.all_steps; step += keys.steps_of_slice) {
        (add(sums), ...);
        from += kSlice - (Counts + ...) / 4 * 32;  // dV may have fewer numbers than its place has room for
    }
    return true;
}

// ------------------------------------------------------------------------------ which tiles are split: host code

// How many tiles of keys are whole, and how many are split: the host's side of KeyParameters.
struct Split {
    int64_t whole_tiles, split_tiles;
    int log_slices;

    int64_t slices() const { return split_tiles << log_slices; }
    int64_t work_tiles() const { return whole_tiles + slices(); }
    template <class Tile>
    int64_t warps() const {  // consumer warps of the split tiles
        return split_tiles * 4 * Tile::Consumers;
    }
    template <class Tile>
    int64_t bytes() const {  // of dK and dV of all slices
        return slices() * (2 * Tile::Bc * Tile::D * 4);
    }
};

// What a split costs, in steps of a multiprocessor on an H100: per_slice for each slice that a multiprocessor takes.
// next_kernel: the next kernel fills idle multiprocessors, with so many steps for each step of this one; or 0.
struct SplitCosts {
    double per_launch, per_slice, next_kernel;
};
constexpr int kMostSlices = 4;     // a multiprocessor, with those that have no step: it bounds the workspace
constexpr int kMostLogSlices = 4;  // a tile has at most 16 slices

// The split with the shortest estimated time. docs/backward.md has the estimate in words.
template <class Tile>
Split best_split(const Attention &a, int multiprocessors, bool whole_heads) {
    constexpr SplitCosts costs = Tile::Costs;
    const int64_t group = a.Hq / a.Hkv, tiles = key_tiles_of(a, Tile::Bc);
    if (has_ranges(a)) return {tiles, 0, 0};  // the host doesn't know how many queries see a tile of keys
    // The most that see one tile of keys.
    const int64_t queries = clamp(a.last - a.first + Tile::Bc + Tile::Br, int64_t(1), int64_t(a.Nq));
    const int64_t steps_of_head = (queries + Tile::Br - 1) / Tile::Br;
    // A slice has whole units: query heads, or steps.
    const int64_t units = whole_heads ? group : group * steps_of_head, steps_of_unit = whole_heads ? steps_of_head : 1;
    const bool is_equal = !is_banded(a) || queries < a.Nq;
    // If tiles are more than multiprocessors, none is split where a next kernel fills idle ones. Equal tiles are split
    // behind the last full round. Of uneven ones, on average half as long as the longest, the last are split.
    const int64_t splittable = tiles <= multiprocessors ? tiles
                               : costs.next_kernel > 0  ? 0
                               : is_equal               ? tiles % multiprocessors
                                                        : multiprocessors;
    Split best{tiles, 0, 0};
    double shortest = INFINITY;
    for (int n = 0; n <= kMostLogSlices && splittable > 0; ++n) {
        if (n > 0 && splittable << n > kMostSlices * multiprocessors) break;
        const int64_t units_of_slice = ((units - 1) >> n) + 1, used_slices = (units - 1) / units_of_slice + 1;
        const double load = double(splittable) * used_slices / multiprocessors;
        // steps: of the longest slice. rounds: the time of all slices, and of the next kernel, in units of that.
        const double steps = units_of_slice * steps_of_unit;
        const double rounds = costs.next_kernel > 0
                                  ? std::max(1., (1 + costs.next_kernel) * (is_equal ? load : load / 2))
                              : is_equal ? std::ceil(load)
                                         : std::max(1., (load + 1) / 2);
        const double time = steps * rounds + (n == 0 ? 0 : costs.per_launch + costs.per_slice * load);
        if (time >= shortest) continue;
        shortest = time;
        if (n > 0) best = {tiles - splittable, splittable, n};
    }
    return best;
}

// All but the tensor maps, what launch_kernels sets, and the pointers to the workspace.
template <class Tile>
KeyParameters key_parameters(const Gradient &g, const GradientRows &rows, const Split &split) {
    KeyParameters p{gradient_parameters(g, rows)};
    p.Tc = (g.a.Nk + Tile::Bc - 1) / Tile::Bc, p.whole_tiles = split.whole_tiles, p.log_slices = split.log_slices;
    return p;
}

}  // namespace minimal_attn::hopper
