// cpu/bias_gradient.h: the gradient of a bias. An element of the bias is added to the scores of one or more pairs
// (query, key), and its gradient is the sum of their dS. A work item is the set of tiles of keys that contribute to the
// same elements. One thread computes a work item, so each sum has a fixed order. If no bias wants a gradient, a work
// item is one tile of keys.
#pragma once

namespace minimal_attn::cpu {

struct Item {
    int64_t b0, b1, h0, h1, tile0, tile1;  // its batches, key heads and tiles of keys
};

inline int64_t key_tiles(const Attention &a) { return round_up(a.Nk, Bc) / Bc; }
inline bool shares(const Gradient &g, int64_t stride) { return g.dbias && stride == 0; }

inline int64_t items(const Gradient &g) {
    const PairStrides &s = g.dbias_stride;
    return (shares(g, s.batch) ? 1 : g.a.B) * (shares(g, s.head) ? 1 : g.a.Hkv) *
           (shares(g, s.key) ? 1 : key_tiles(g.a));
}

// The first tiles of all key heads come first.
inline Item item_at(const Gradient &g, int64_t n) {
    const auto take = [&](int64_t stride, int64_t count, int64_t &begin, int64_t &end) {
        if (shares(g, stride)) return begin = 0, end = count, void();
        begin = n % count, end = begin + 1, n /= count;
    };
    Item item{};
    take(g.dbias_stride.head, g.a.Hkv, item.h0, item.h1);
    take(g.dbias_stride.batch, g.a.B, item.b0, item.b1);
    take(g.dbias_stride.key, key_tiles(g.a), item.tile0, item.tile1);
    return item;
}

// (query, head of the key head, key of the tile): one of each where the bias is broadcast. Empty where none is wanted.
struct BiasSums {
    const int64_t queries, heads, keys;
    std::vector<double> sums;

    explicit BiasSums(const Gradient &g)
        : queries(g.dbias_stride.row ? g.a.Nq : 1),
          heads(g.dbias_stride.head ? g.a.Hq / g.a.Hkv : 1),
          keys(g.dbias_stride.key ? Bc : 1),
          sums(g.dbias ? queries * heads * keys : 0) {}

    void clear() { std::fill(sums.begin(), sums.end(), 0.); }
    double *row(int64_t query, int64_t head) {
        return sums.data() + ((queries > 1 ? query : 0) * heads + head % heads) * keys;
    }
    // n numbers of dS of a row, for keys from `first` of the tile on. Inline, so that each instruction set has its own.
    [[gnu::always_inline]] void add(int64_t query, int64_t head, int first, int n, const float *dS) {
        double *const sum = row(query, head);
        if (keys == 1)
            for (int c = 0; c < n; ++c) *sum += dS[c];
        else
            for (int c = 0; c < n; ++c) sum[first + c] += dS[c];
    }
    // dbias is dense, so neighbouring keys are neighbours.
    template <class T>
    void store(const Gradient &g, const Item &item, T *dbias) {
        const PairStrides &stride = g.dbias_stride;
        const int64_t j0 = keys == 1 ? 0 : item.tile0 * Bc, n = keys == 1 ? 1 : std::min<int64_t>(Bc, g.a.Nk - j0);
        for (int64_t i = 0; i < queries; ++i)
            for (int64_t h = 0; h < heads; ++h) {
                const double *const sum = row(i, h);
                T *const to =
                    dbias + item.b0 * stride.batch + (item.h0 * heads + h) * stride.head + i * stride.row + j0;
                for (int64_t c = 0; c < n; ++c) to[c] = (float)sum[c];
            }
    }
};

}  // namespace minimal_attn::cpu
