// decode_rows.cuh: what a warp of decode.cu computes: Oi, li and mi of all rows of the tile, over the warp's steps.
// MmaRows computes on tensor cores, FmaRows on FMA units.
#pragma once
#include "portable/decode_join.cuh"
#include "portable/mma.cuh"
#include "scores.h"

namespace minimal_attn {
namespace {

// is_general: scores change or weights are dropped (scores.h, dropout.h). The mask is a band all the same.
template <int D_, bool OnTensorCores_, bool is_general_ = false>
struct DecodeTile {
    static constexpr int D = D_;
    static constexpr bool OnTensorCores = OnTensorCores_, is_general = is_general_;
    using General = DecodeTile<D, OnTensorCores, true>;
    static constexpr int Rows = OnTensorCores ? 16 : D <= 128 ? 8 : 4;  // queries
    static constexpr int Bc = OnTensorCores ? 16 : 8;                   // keys of a step
    static constexpr bool HasWholeRows = OnTensorCores && D <= 128;     // of kWholeRow
    template <class T>
    static constexpr int StageBytes = 2 * Bc * D * (int)sizeof(T);  // of a warp: Kj, Vj
    template <class T>
    static constexpr int QBytes = OnTensorCores ? Rows * D * (int)sizeof(T) : 0;
};

// How many parts (Oi, li, mi of a tile's rows) a block keeps in shared memory: one for each warp and chunk, and for
// whole rows one for each four but the last.
constexpr int parts_in_shared(Share share) {
    return kWarps * chunks_at_once(share) + (share == kWholeRow ? kFour - 1 : 0);
}

// Bytes of shared memory of a block. static_bytes: (li, mi) of the parts. shared_bytes: these, the stages, Qi, and Oi
// of the parts.
template <class Tile>
int static_bytes(Share share) {
    return parts_in_shared(share) * Tile::Rows * (int)sizeof(float2);
}
template <class Tile, class T>
int shared_bytes(int stages, int rows, Share share) {
    return static_bytes<Tile>(share) + kWarps * stages * Tile::template StageBytes<T> + Tile::template QBytes<T> +
           parts_in_shared(share) * std::min(rows, Tile::Rows) * Tile::D * (int)sizeof(float);
}

// Of a general kernel: which rows a tile has, for the terms of their scores (scores.h) and for dropout.
struct RowsOfTile {
    int b, first, group;
    int64_t first_head;
    template <class Item>
    __device__ void take(const Decode &p, const Item &item, int rows) {
        b = item.batch(), first = item.tile * rows, group = p.group, first_head = (int64_t)item.h_kv * group;
    }
    // What softmax_scale multiplies, from t or the product of row r and key j.
    template <class T>
    __device__ float unscaled(const Attention &a, float t, int r, int j) const {
        if (!has_terms(a)) return t;
        const int row = first + r;
        return whole(a, t, TermsOfRow(a, b, first_head + row % group, row / group).of_key<T>(j));
    }
    // Pij, or with dropout Pij Zij
    __device__ float dropped(const Attention &a, float p, int r, int j) const {
        if (!has_dropout(a)) return p;
        const int row = first + r;
        return p * DropoutOfHead(a, b, first_head + row % group).Zij(row / group, j);
    }
};

template <class T>
__device__ const T *query(const Attention &a, int b, const Row &row) {
    return (const T *)a.q + b * a.q_stride.batch + row.h * a.q_stride.head + row.i * a.q_stride.row;
}

// Half types. A lane has rows lane / 4 and lane / 4 + 8 of the tile, in fragments as mma.cuh describes them.
template <class T, class Tile>
struct MmaRows {
    static constexpr int D = Tile::D, PerRow = D / 8, Vectors = Tile::Rows * PerRow / kThreads;  // of 16 bytes of Qi
    uint4 next_Qi[Vectors];
    unsigned Qi;  // this lane's address
    float Oi[D / 8][4], li[2], mi[2];
    Keys keys[2];
    RowsOfTile of_tile;

    // This thread's n-th 16 bytes of Qi
    template <class Item>
    __device__ uint4 part_of_Qi(const Attention &a, const Decode &p, const Item &item, int n) const {
        const int at = threadIdx.x + n * kThreads, x = at % PerRow * 8;
        const Row row = item.row(p, item.tile * Tile::Rows + at / PerRow);
        const bool exists = item.exists && row.exists && x < a.d;
        return exists ? *(const uint4 *)(query<T>(a, item.batch(), row) + x) : uint4{};
    }

    // 8. Qi of the next item to registers, while the last item's Qi is in use. On Turing there are no registers for it.
    template <class Item>
    __device__ void load_queries(const Attention &a, const Decode &p, const Item &item) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
        for (int n = 0; n < Vectors; ++n) next_Qi[n] = part_of_Qi(a, p, item, n);
#endif
    }

    // 8. ... then to shared memory, once all have read the last item's Qi
    template <class Item>
    __device__ void take_queries(const Attention &a, const Decode &p, const Item &item, T *Q_tile) {
        if (!item.exists) return;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < Vectors; ++n) {
            const int at = threadIdx.x + n * kThreads;
#if __CUDA_ARCH__ < 800
            next_Qi[n] = part_of_Qi(a, p, item, n);
#endif
            *(uint4 *)(Q_tile + swizzle<D, T>(at / PerRow, at % PerRow)) = next_Qi[n];
        }
        const BandOf<int> band = narrow(item.band(a));
        for (int r = 0; r < 2; ++r)
            keys[r] = keys_of_row(band, item.row(p, item.tile * Tile::Rows + lane / 4 + 8 * r).i);
        Qi = lane_address<D>(Q_tile, lane % 16, lane / 16);
        if constexpr (Tile::is_general) of_tile.take(p, item, Tile::Rows);
    }

    __device__ void clear() {
#pragma unroll
        for (int x = 0; x < D / 8; ++x) Oi[x][0] = Oi[x][1] = Oi[x][2] = Oi[x][3] = 0.f;
        li[0] = li[1] = 0.f, mi[0] = mi[1] = -INFINITY;
    }

    // 9. - 12. of the step that begins at key j
    __device__ void add_step(const Attention &a, const T *Kj, const T *Vj, int j) {
        const int lane = threadIdx.x % 32;
        const unsigned K = lane_address<D>(Kj, lane / 16 * 8 + lane % 8, lane / 8 % 2);
        const unsigned V = lane_address<D>(Vj, lane % 16, lane / 16);
        // Up to D 128 a score is two sums: in one, each mma would wait for the one before.
        float Sij[2][4] = {}, odd[2][4] = {};
#pragma unroll
        for (int x = 0; x < D / 16; ++x) {
            unsigned q[4], k[4];
            load_matrices(q, (Qi ^ x % 4 * 32) + x / 4 * 128);
            load_matrices(k, (K ^ x % 4 * 32) + x / 4 * 128);
            mma<T>(x % 2 && D <= 128 ? odd[0] : Sij[0], q, k[0], k[1]);
            mma<T>(x % 2 && D <= 128 ? odd[1] : Sij[1], q, k[2], k[3]);
        }
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int begin = keys[r].begin - j - lane % 4 * 2, end = keys[r].end - j - lane % 4 * 2;
            float m_new = mi[r], m_safe, l = 0.f;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float &s = Sij[n / 2][2 * r + n % 2];
                const int key = n / 2 * 8 + n % 2;
                const auto score = [&](float QK) {
                    if (Tile::is_general && has_softcap(a)) QK = changed_in<T>(a.scores, QK);
                    if constexpr (Tile::is_general)
                        QK = of_tile.template unscaled<T>(a, QK, lane / 4 + 8 * r, j + lane % 4 * 2 + key);
                    return QK * a.softmax_scale;
                };
                s = key >= begin && key < end ? score(s + odd[n / 2][2 * r + n % 2]) : -INFINITY;
                m_new = fmaxf(m_new, s);
            }
            alpha[r] = update_row_max(mi[r], row_max<4>(m_new), m_safe);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float &s = Sij[n / 2][2 * r + n % 2];
                s = exp_fast(s - m_safe);
                l += s;
                if constexpr (Tile::is_general)
                    s = of_tile.dropped(a, s, lane / 4 + 8 * r, j + lane % 4 * 2 + n / 2 * 8 + n % 2);
            }
            li[r] = alpha[r] * li[r] + l;
        }
        if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
            for (int x = 0; x < D / 8; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) Oi[x][e] *= alpha[e / 2];
        }
        unsigned p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = pack<T>(Sij[e / 2][e % 2 * 2], Sij[e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int x = 0; x < D / 16; ++x) {
            unsigned v[4];
            load_matrices_transposed(v, (V ^ x % 4 * 32) + x / 4 * 128);
            mma<T>(Oi[2 * x], p, v[0], v[1]);
            mma<T>(Oi[2 * x + 1], p, v[2], v[3]);
        }
    }

    // The first `rows` rows of Oi and of (li, mi) to shared memory
    __device__ void store(float *O, float2 *lm, int rows) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane / 4 + 8 * r;
            const float l = row_sum<4>(li[r]);
            if (row >= rows) continue;
            if (lane % 4 == 0) lm[row] = {l, mi[r]};
#pragma unroll
            for (int x = 0; x < D / 8; ++x)
                *(float2 *)(O + place_of<D>(row, 8 * x + lane % 4 * 2)) = {Oi[x][2 * r], Oi[x][2 * r + 1]};
        }
    }
};

// Sums each x[n] over Lanes neighbours. Lanes / N of them, from the n * Lanes / N-th on, return the sum of x[n]. Each
// exchange halves the numbers that a lane holds.
template <int Lanes, int N>
__device__ float sum_and_spread(float (&x)[N]) {
    int offset = Lanes / 2;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, offset /= 2) {
        const bool upper = threadIdx.x & offset;
#pragma unroll
        for (int y = 0; y < n; ++y) {
            const float received = __shfl_xor_sync(~0u, upper ? x[y] : x[y + n], offset);
            x[y] = (upper ? x[y + n] : x[y]) + received;
        }
    }
    return row_sum<Lanes / N>(x[0]);
}

// float32, and bfloat16 without tensor cores. A lane has columns 4 * (lane + Lanes * c) + 0..3 of all rows. For D = 64
// each half of the warp takes every other key.
template <class T, class Tile>
struct FmaRows {
    static constexpr int D = Tile::D, Rows = Tile::Rows, Lanes = D / 4 < 32 ? D / 4 : 32, C = D / 4 / Lanes;
    static constexpr int Groups = 32 / Lanes, N = Tile::Bc / Groups, R = 4;  // N: keys of a lane; R: rows at a time
    float q[Rows][C][4], Oi[Rows][C][4], li[Rows], mi[Rows];
    Keys keys[Rows];
    RowsOfTile of_tile;
    int rows;

    __device__ static int column(int c) { return 4 * (threadIdx.x % Lanes + Lanes * c); }
    __device__ static int group() { return threadIdx.x % 32 / Lanes; }

    __device__ static void load4(float (&x)[4], const T *from) {
        if constexpr (sizeof(T) == 4) {
            const float4 four = *(const float4 *)from;
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
            const uint2 four = *(const uint2 *)from;  // a bfloat16 is the upper half of a float
            x[0] = __uint_as_float(four.x << 16), x[1] = __uint_as_float(four.x & 0xffff0000);
            x[2] = __uint_as_float(four.y << 16), x[3] = __uint_as_float(four.y & 0xffff0000);
        }
    }

    // This lane's four columns of a row of Kj or Vj in shared memory
    __device__ static void load_column(float (&x)[4], const T *tile, int row, int c) {
        constexpr int Element = 16 / sizeof(T);
        load4(x, tile + swizzle<D, T>(row, column(c) / Element) + column(c) % Element);
    }

    template <class Item>
    __device__ void load_queries(const Attention &, const Decode &, const Item &) {}

    // 8. Qi to registers
    template <class Item>
    __device__ void take_queries(const Attention &a, const Decode &p, const Item &item, T *) {
        if (!item.exists) return;
        const BandOf<int> band = narrow(item.band(a));
        if constexpr (Tile::is_general) of_tile.take(p, item, Rows);
        rows = min(Rows, item.rows(p) - item.tile * Rows);
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            const Row row = item.row(p, item.tile * Rows + r);
            keys[r] = keys_of_row(band, row.i);
#pragma unroll
            for (int c = 0; c < C; ++c) {
                q[r][c][0] = q[r][c][1] = q[r][c][2] = q[r][c][3] = 0.f;
                if (row.exists && column(c) < a.d) load4(q[r][c], query<T>(a, item.batch(), row) + column(c));
            }
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            li[r] = 0.f, mi[r] = -INFINITY;
#pragma unroll
            for (int c = 0; c < C; ++c) Oi[r][c][0] = Oi[r][c][1] = Oi[r][c][2] = Oi[r][c][3] = 0.f;
        }
    }

    // 9. - 12. of the step that begins at key j
    __device__ void add_step(const Attention &a, const T *Kj, const T *Vj, int j) {
        const int key = threadIdx.x % Lanes / (Lanes / N) * Groups + group();  // this lane's, in Pij
#pragma unroll
        for (int r0 = 0; r0 < Rows; r0 += R) {
            if (r0 > 0 && r0 >= rows) break;
            float s[R][N] = {}, Pij[R];
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int c = 0; c < C; ++c) {
                    float k[4];
                    load_column(k, Kj, n * Groups + group(), c);
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) s[r][n] = fmaf(q[r0 + r][c][x], k[x], s[r][n]);
                }
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float QK = sum_and_spread<Lanes>(s[r]);
                if constexpr (Tile::is_general) QK = of_tile.template unscaled<T>(a, capped(a, QK), r0 + r, j + key);
                float score = QK * a.softmax_scale, m_safe;
                if (j + key < keys[r0 + r].begin || j + key >= keys[r0 + r].end) score = -INFINITY;
                const float m_new = fmaxf(mi[r0 + r], row_max<32>(score));
                const float alpha = update_row_max(mi[r0 + r], m_new, m_safe);
                Pij[r] = exp_fast(score - m_safe);
                li[r0 + r] = alpha * li[r0 + r] + Pij[r];
                if constexpr (Tile::is_general) Pij[r] = of_tile.dropped(a, Pij[r], r0 + r, j + key);
#pragma unroll
                for (int c = 0; c < C; ++c)
#pragma unroll
                    for (int x = 0; x < 4; ++x) Oi[r0 + r][c][x] *= alpha;
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float P[R];
#pragma unroll
                for (int r = 0; r < R; ++r) P[r] = __shfl_sync(~0u, Pij[r], group() * Lanes + n * (Lanes / N));
#pragma unroll
                for (int c = 0; c < C; ++c) {
                    float v[4];
                    load_column(v, Vj, n * Groups + group(), c);
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) Oi[r0 + r][c][x] = fmaf(P[r], v[x], Oi[r0 + r][c][x]);
                }
            }
        }
    }

    // The first `rows` rows of Oi and of (li, mi) to shared memory
    __device__ void store(float *O, float2 *lm, int) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            if (r >= rows) break;
            const float l = row_sum<32>(li[r]) / (Lanes / N);  // Lanes / N lanes have the same key
            if (threadIdx.x % 32 == 0) lm[r] = {l, mi[r]};
#pragma unroll
            for (int c = 0; c < C; ++c) {
#pragma unroll
                for (int x = 0; x < 4; ++x)
                    if constexpr (Groups == 2) Oi[r][c][x] += __shfl_xor_sync(~0u, Oi[r][c][x], Lanes);
                if (group() == 0)
                    *(float4 *)(O + place_of<D>(r, column(c))) = {Oi[r][c][0], Oi[r][c][1], Oi[r][c][2], Oi[r][c][3]};
            }
        }
    }
};

}  // namespace
}  // namespace minimal_attn
