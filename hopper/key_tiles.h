// key_tiles.h: tiles of keys that a block owns, while it walks the tiles of queries. For backward_fused.cu and
// backward_separate.cu.
#pragma once
#include "hopper/gradient.h"

namespace minimal_attn::hopper {

// Tile n of keys: those from j0 on, and `tiles` tiles of the queries i0 <= i < i1 of the heads from h0 on. Queries that
// see one of the keys are neighbours, since the band's bounds only grow with i.
template <class Tile>
struct KeyTile {
    int b, key_head, j0, h0, i0, i1, tiles;
    int start;  // where the walk of a head's queries begins
    bool none;  // no query sees them: one tile is computed all the same, and masked
    BandOf<int> band;

    __device__ KeyTile(const GradientParameters &p, int n) {
        const int head = n / p.Tc;
        b = head / p.Hkv, key_head = head % p.Hkv, h0 = key_head * p.group, j0 = n % p.Tc * Tile::Bc;
        band = band_of_batch(p, b);
        const int first = max(j0, band.keys.begin), end = min(j0 + Tile::Bc, band.keys.end);
        i0 = max(first - band.last, 0) / Tile::Br * Tile::Br;
        i1 = first < end ? min(end - band.first, p.a.Nq) : 0;
        none = i0 >= i1;
        if (none) i0 = 0, i1 = 1;
        // Where all queries see the keys, each tile's walk begins at other queries: blocks add to different dQi.
        start = Tile::kStartsApart && i0 == 0 && i1 == p.a.Nq ? j0 % i1 / Tile::Br * Tile::Br : i0;
        tiles = (i1 - i0 + Tile::Br - 1) / Tile::Br * (none ? 1 : (int)p.group);
    }
    // Which queries see key j.
    __device__ Keys queries(int j) const {
        if (j < band.keys.begin || j >= band.keys.end) return {0, 0};
        return {j - band.last, j - band.first + 1};
    }
    __device__ bool is_seen(int j, int Nq) const { return max(queries(j).begin, 0) < min(queries(j).end, Nq); }
    // use(h, i0, whether it is the first) for each tile of queries. One loop: two would take more registers.
    template <class Use>
    __device__ void for_each_query_tile(const Use &use) const {
        int h = h0, i = start;
        for (int n = 0; n < tiles; ++n) {
            use(h, i, n == 0);
            i += Tile::Br;
            if (i >= i1) i = i0;
            if (i == start) ++h;
        }
    }
};

// Loads a tile of Qi with lse_i, or of dOi with Di. Boxes of the tensor map have BoxRows rows.
template <class Tile, int BoxRows = Tile::Br, int Stages, int Bytes>
__device__ void load_query_tile(const GradientParameters &p, int b, int h, int i0, const TensorMap &Q_or_dO,
                                const float *rows, Pipeline<Stages> &pipeline, unsigned char (&tiles)[Stages][Bytes],
                                float (&numbers)[Stages][Tile::Br]) {
    static_assert(BoxRows == Tile::Br || Tile::Boxes == 1);
    pipeline.producer_acquire();
    const int stage = pipeline.stage();
    Barrier &full = pipeline.full();
    arrive_expect_tx(full, Tile::Br * 4);
    bulk_load(numbers[stage], rows + (b * p.Hq + h) * p.rows.head_stride + i0, Tile::Br * 4, full);
    for (int row = 0; row < Tile::Br; row += BoxRows)
        load_tile<BoxRows, Tile::Boxes>(tiles[stage] + row * 128, Q_or_dO, i0 + row, h, b, full);
    pipeline.advance();
}

// All of those of a tile of keys.
template <class Tile, int Stages, int Bytes>
__device__ void load_queries(const GradientParameters &p, const KeyTile<Tile> &keys, const TensorMap &Q_or_dO,
                             const float *rows, Pipeline<Stages> &pipeline, unsigned char (&tiles)[Stages][Bytes],
                             float (&numbers)[Stages][Tile::Br]) {
    keys.for_each_query_tile(
        [&](int h, int i0, bool) { load_query_tile<Tile>(p, keys.b, h, i0, Q_or_dO, rows, pipeline, tiles, numbers); });
}

// Sets blind rows of a tile of queries, which see no key at all, to 0.
template <class Tile>
__device__ void zero_blind_rows(unsigned char *tile, const BandOf<int> &band, int i0, int Nq, int barrier) {
    const int end = empty(band.keys) ? 0 : band.keys.end - band.first;
    // TMA has set the rows from Nq on to 0.
    zero_rows_outside<Tile::Br, Tile::Boxes>(tile, band.keys.begin - band.last - i0, end < Nq ? end - i0 : Tile::Br,
                                             barrier);
}

// P^T = exp(S^T - lse) in place of S^T. A thread's columns are 8 n + 2 (lane % 4) and the next one; `lse`
// begins at its first column.
template <int Count>
__device__ void compute_P(float (&S)[Count], const float *lse, float c) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = *(const float2 *)(lse + 2 * x);
#pragma unroll
        for (int y = x; y < x + 4; ++y) S[y] = exp2_fast(fmaf(S[y], c, y % 2 ? -two.y : -two.x));
    }
}

// dS^T = P^T o (dP^T - D) in place of dP^T. `D` is like lse.
template <int Count>
__device__ void compute_dS(float (&dP)[Count], const float (&P)[Count], const float *D) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = *(const float2 *)(D + 2 * x);
#pragma unroll
        for (int y = x; y < x + 4; ++y) dP[y] = P[y] * (dP[y] - (y % 2 ? two.y : two.x));
    }
}

}  // namespace minimal_attn::hopper
