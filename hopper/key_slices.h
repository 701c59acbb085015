// key_slices.h: which tiles of keys backward_fused.cu splits, where whole ones would leave multiprocessors idle.
#pragma once
#include <algorithm>
#include <cmath>

#include "hopper/gradient.h"

namespace minimal_attn::hopper {

// The last `tiles` of keys, in the order of work tiles, are split into up to 2^log_slices slices each.
struct Split {
    int64_t tiles;
    int log_slices;
};

// Costs of a split on an H100, in steps of a multiprocessor: one to join, and at d 128 one to store each slice that a
// multiprocessor takes. kMostLoad is the most slices a multiprocessor, which bounds the workspace. A tile has at most
// 2^kMostLogSlices slices.
constexpr double kCostToJoin = 2, kCostToStoreD128 = 3, kMostLoad = 4;
constexpr int kMostLogSlices = 4;

// The split with the shortest estimated time. In order, a slice has whole query heads: else it would wait for slices of
// later keys that end at its queries.
template <class Tile>
Split best_split(const Gradient &g, int multiprocessors) {
    const Attention &a = g.a;
    const int64_t group = a.Hq / a.Hkv, tiles = key_tiles_of(a, Tile::Bc);
    const int64_t queries = std::min<int64_t>(a.Nq, a.last - a.first + Tile::Bc + Tile::Br);  // a tile's, at most
    const double longest = (queries + Tile::Br - 1) / Tile::Br * group;
    const bool is_equal = !is_banded(a) || queries < a.Nq;
    // Of equally long tiles those after the last full round may be split. Under causal, or a window wider than the
    // queries, a tile is half as long on average as the longest one: there the whole last round may be split.
    Split split{tiles <= multiprocessors ? tiles : is_equal ? tiles % multiprocessors : multiprocessors, 0};
    double shortest = INFINITY;
    for (int n = 0; n <= kMostLogSlices && split.tiles > 0; ++n) {
        const int slices = 1 << n;
        const double load = double(split.tiles) * slices / multiprocessors, steps = std::ceil(longest / slices);
        if (slices > 1 && (load > kMostLoad || (g.deterministic && group % slices != 0))) break;
        const double costs = slices == 1 ? 0 : kCostToJoin + kCostToStoreD128 * Tile::D / 128 * load;
        const double time = costs + steps * (is_equal ? std::ceil(load) : std::max(1., (load + 1) / 2));
        if (time < shortest) shortest = time, split.log_slices = n;
    }
    return split.log_slices == 0 ? Split{} : split;
}

}  // namespace minimal_attn::hopper
