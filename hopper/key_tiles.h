// key_tiles.h: what backward_fused.cu and backward_dk_dv.cu share where a block owns a tile of keys and walks the tiles
// of queries.
#pragma once
#include "hopper/gradient.h"
#include "hopper/dropped.h"
#include "hopper/terms.h"

namespace minimal_attn::hopper {

struct KeyParameters : GradientParameters {
    Divisor Tc;         // tiles of keys of a head
    int whole_tiles;    // so many tiles of keys, the first ones in the order of work tiles, are whole,
    int log_slices;     // the next ones are split into up to 2^log_slices slices each (key_slices.h)
    bool whole_heads;   // in order: slices end where a query head ends, or they would wait for slices of later keys
    int starts_apart;   // a mask of all bits or none, for KeySlice::start
    float4 *slices;     // the sums of slices, as the consumer warps hold them
    int *steps_stored;  // a counter for each consumer warp of a split tile
};

// Of all heads.
inline int64_t key_tiles_of(const Attention &a, int Bc) { return a.B * a.Hkv * ((a.Nk + Bc - 1) / Bc); }

// All lanes of a warp call it when they have written the stage.
template <int Stages>
__device__ void producer_commit(Pipeline<Stages> &pipeline) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(pipeline.full());
    pipeline.advance();
}

// A work tile: a tile of keys, or a slice of it.
struct KeyWork {
    int tile;   // kNoTile: no more
    int slice;  // its number among the slices of all split tiles, or kWhole
};
constexpr int kNoTile = -1, kWhole = -1;

// What the tables say of a tile of keys. A band needs none.
template <class Mask, bool = kIsRanges<Mask>>
struct KeyEntry {};
template <class Mask>
struct KeyEntry<Mask, true> {
    Interval queries;  // from the first to the last 128 that meet one of the keys
    Keys of_batch;     // Ranges::keys
    bool any_blind;    // of BatchFlags
};
template <class Mask>
struct KeyWorkOf : KeyWork, KeyEntry<Mask> {};

template <class Tile, class Mask>
__device__ KeyEntry<Mask> key_entry(const KeyParameters &p, int n) {
    if constexpr (kIsRanges<Mask>) {
        const Ranges mask = ranges_of(p.a, n / p.Tc / p.Hkv);
        const int j0 = n % p.Tc * Tile::Bc;
        const Keys keys = intersection({j0, j0 + Tile::Bc}, mask.keys);
        return {queries_of_any(mask, p.a.Nq, keys), mask.keys, mask.batch->any_blind};
    }
    return {};
}

// Tile n of keys, from j0 on, and the queries i0 <= i < i1 of the heads from h0 on. Of a band they are those that see
// one of its keys: an interval, since the bounds only grow with i. With ranges they are from the first to the last 128
// that meet one (ranges.h).
template <class Tile, class Mask>
struct KeyTile : KeyEntry<Mask> {
    static constexpr bool is_ranges = kIsRanges<Mask>;
    const KeyParameters &p;
    int b, key_head, j0, h0, i0, i1;
    bool unseen;       // no query sees the keys: one tile is computed all the same, and masked
    bool batch_grows;  // of BatchFlags, in a general kernel, or if no block adds to dQ
    BandOf<int> band;  // only of a band

    __device__ KeyTile(const KeyParameters &p, int n, const KeyEntry<Mask> &entry) : KeyEntry<Mask>(entry), p(p) {
        const int head = n / p.Tc;
        b = head / p.Hkv, key_head = head % p.Hkv, h0 = key_head * p.group, j0 = n % p.Tc * Tile::Bc;
        if constexpr (is_ranges) {
            i0 = entry.queries.begin, i1 = entry.queries.end;
            if constexpr (kIsGeneral<Mask>) batch_grows = mask().batch->grows;
            if constexpr (!Tile::AddsDQ) {  // so blocks needn't agree on what a query meets
                const Keys keys = intersection({j0, j0 + Tile::Bc}, this->of_batch);
                batch_grows = mask().batch->grows;
                if (batch_grows && i0 < i1)
                    i0 = queries(keys.begin).begin / Tile::Br * Tile::Br, i1 = queries(keys.end - 1).end;
            }
        } else {
            band = band_of_batch(p, b);
            const int first = max(j0, band.keys.begin), end = min(j0 + Tile::Bc, band.keys.end);
            i0 = max(first - band.last, 0) / Tile::Br * Tile::Br;
            i1 = first < end ? min(end - band.first, p.a.Nq) : 0;
        }
        unseen = i0 >= i1;
        if (unseen) i0 = 0, i1 = 1;
    }
    // Ranges are pointers, and loops over queries have no registers for them: they are computed anew.
    __device__ decltype(auto) mask() const {
        if constexpr (is_ranges)
            return ranges_of(p.a, opaque(b));
        else
            return (band);
    }
    // Which queries see key j: of a band, or of ranges that grow. Unlike queries_of_key it takes any j, and its bounds
    // may lie outside 0 to Nq.
    __device__ Interval queries(int j) const {
        if constexpr (is_ranges) {
            const int2 two = *(const int2 *)(mask().seeing + j);  // one load
            return {two.x, two.y};
        }
        if (j < band.keys.begin || j >= band.keys.end) return {0, 0};
        return {j - band.last, j - band.first + 1};
    }
    // If ranges grow, consumers mask by `seeing` and skip no tile.
    __device__ bool grows() const {
        if constexpr (is_ranges && (!Tile::AddsDQ || kIsGeneral<Mask>)) return batch_grows;
        return std::is_same_v<Mask, GrowingRanges>;
    }
    // Keys of the batch: outside of them memory may hold anything.
    __device__ Keys keys_of_batch() const {
        if constexpr (is_ranges)
            return this->of_batch;
        else
            return band.keys;
    }
    // With ranges the sums of a key that no query sees are 0 anyway.
    __device__ bool is_seen(int j, int Nq) const {
        if constexpr (is_ranges)
            return this->of_batch.begin <= j && j < this->of_batch.end;
        else
            return max(queries(j).begin, 0) < min(queries(j).end, Nq);
    }
    // Whether the tile of queries from i on meets these keys. Of a band all from i0 to i1 do; of ranges that grow, all
    // in which a query sees a key.
    __device__ bool is_met(int i) const {
        if constexpr (may_skip)
            if (p.a.mask_tables.shown) return unseen || is_shown(p.a, opaque(b), i, j0);
        if constexpr (is_ranges)
            return unseen || meet(keys_met(mask(), i), {j0, j0 + Tile::Bc});
        else
            return true;
    }
    // Whether tables of an attn_mask may say which tiles of queries meet these keys.
    static constexpr bool may_skip = kHasTerms<Mask> && Tile::AddsDQ;
};

// Loads a tile of Qi with m_i and log2_l_i, or of dOi with Di. A box of the tensor map has 64 rows.
template <class Tile, int Count, int Stages, int Bytes>
__device__ void load_query_tile(const KeyParameters &p, int b, int h, int i0, const TensorMap &Q_or_dO,
                                const float *const (&of_rows)[Count], Pipeline<Stages> &pipeline,
                                unsigned char (&tiles)[Stages][Bytes], float (&numbers)[Stages][Count][Tile::Br]) {
    constexpr int Boxes = Bytes / (Tile::Br * 128);
    static_assert(Tile::Br == 64 || Boxes == 1);
    pipeline.producer_acquire();
    const int stage = pipeline.stage();
    Barrier &full = pipeline.full();
    const unsigned row = (b * p.Hq + h) * (unsigned)p.rows.head_stride + i0;  // 2^32 rows of q are 1 TB
    arrive_expect_tx(full, sizeof numbers[stage]);
    for (int n = 0; n < Count; ++n) bulk_load(numbers[stage][n], of_rows[n] + row, Tile::Br * 4, full);
    for (int row = 0; row < Tile::Br; row += 64)
        load_tile<64, Boxes>(tiles[stage] + row * 128, Q_or_dO, i0 + row, h, b, full);
    pipeline.advance();
}

// Sets the blind rows of a tile of queries to 0: those that see no key, so that nothing says what they hold.
template <class Tile, int Boxes = Tile::Boxes>
__device__ void zero_blind_rows(unsigned char *tile, const BandOf<int> &band, int i0, int Nq, int barrier) {
    const int end = empty(band.keys) ? 0 : band.keys.end - band.first;
    // TMA has set the rows from Nq on to 0.
    zero_rows_outside<Tile::Br, Boxes>(tile, band.keys.begin - band.last - i0, end < Nq ? end - i0 : Tile::Br, barrier);
}

template <class Tile, int Boxes = Tile::Boxes>
__device__ void zero_blind_rows(unsigned char *tile, const Ranges &ranges, int i0, int, int barrier) {
    bool any = false;
    for (int i = i0; i < i0 + Tile::Br; i += kRangeTile) any |= tile_has_blind_query(ranges, i);
    if (!any) return;
    zero_rows<Tile::Br, Boxes>(tile, [&](int row) { return empty(keys_of_row(ranges, i0 + row)); }, barrier);
}

// P^T = 0 where query i0 + column doesn't see key j, or j + 8 in a thread's second row.
template <int Count>
__device__ void hide_keys(float (&P)[Count], const Ranges &ranges, int i0, int j) {
    const int4 *const two_queries = (const int4 *)(ranges.rows + i0 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const int4 two = two_queries[x];  // 8 queries behind the last two
#pragma unroll
        for (int y = 0; y < 4; ++y) {
            const int key = j + y / 2 * 8, begin = y % 2 ? two.z : two.x, end = y % 2 ? two.w : two.y;
            if (key < begin || key >= end) P[x + y] = 0.f;
        }
    }
}

// Large rows: S^T less m_i. A thread's columns are 8 n + 2 (lane % 4) and the next one; `first` is its first one.
template <class T, int Count>
__device__ void subtract_m(float (&S)[Count], const float (&m_l)[2][2 * Count], int first, float c) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 m = *(const float2 *)&m_l[0][first + 2 * x], log2_l = *(const float2 *)&m_l[1][first + 2 * x];
#pragma unroll
        for (int y = x; y < x + 4; ++y) S[y] = less_m<T>(S[y], y % 2 ? m.y : m.x, y % 2 ? log2_l.y : log2_l.x, c);
    }
}

// P^T = exp2(c S^T - log2_l_i) in place of S^T. `log2_l` points to the thread's first column.
template <int Count>
__device__ void compute_P(float (&S)[Count], const float *log2_l, float c) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = *(const float2 *)(log2_l + 2 * x);
#pragma unroll
        for (int y = x; y < x + 4; ++y) S[y] = exp2_fast(fmaf(S[y], c, y % 2 ? -two.y : -two.x));
    }
}

// dS^T = P^T o (dP^T - D) in place of dP^T. `D` points to the thread's first column, too.
template <class T, int Count>
__device__ void compute_dS(float (&dP)[Count], const float (&P)[Count], const float *D) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = *(const float2 *)(D + 2 * x);
#pragma unroll
        for (int y = x; y < x + 4; ++y) dP[y] = P[y] * subtract_D<T>(dP[y], y % 2 ? two.y : two.x);
    }
}

// Of a general kernel: dP^T - D, times the slopes of the scores S^T, in place of dP^T. Then dS^T is P^T times that.
template <class T, int Count>
__device__ void multiply_by_slopes(float (&dP)[Count], const float (&S)[Count], const float *D) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = *(const float2 *)(D + 2 * x);
#pragma unroll
        for (int y = x; y < x + 4; ++y) dP[y] = slope_of(S[y]) * subtract_D<T>(dP[y], y % 2 ? two.y : two.x);
    }
}

// Likewise without slopes, behind dropout.
template <class T, int Count>
__device__ void subtract_D_of_columns(float (&dP)[Count], const float *D, float of_kept) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = *(const float2 *)(D + 2 * x);
#pragma unroll
        for (int y = x; y < x + 4; ++y) dP[y] = dP_less_D<T>(dP[y], y % 2 ? two.y : two.x, of_kept);
    }
}

// A = A o B
template <int Count>
__device__ void multiply_elements(float (&A)[Count], const float (&B)[Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) A[x] *= B[x];
}

}  // namespace minimal_attn::hopper
