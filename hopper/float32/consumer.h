// consumer.h: the steps of a consumer warpgroup, which has 64 rows of a work tile. A thread has two of them, 8 apart.
#pragma once
#include "hopper/epilogue.h"
#include "hopper/float32/tile.h"

namespace minimal_attn::hopper {

// Tensor cores truncate sums towards 0, so Sij and Tij = Pij Vj are too small, in the mean by these parts of
// themselves. The exponent's factor and O's weight correct that for free: a quarter less error. m stays uncorrected.
template <int D>
constexpr float kLog2eS = 1.4426950408889634 * (1 + (D <= 64 || D > 128 ? 0.8 : 1.4) * 0x1p-23);
// Of sums of 64 keys; of 32 keys, for D > 128, it is half as much, which a float can't express.
template <int D>
constexpr float kTruncationT = D <= 128 ? 0x1p-23f : 0.f;

// A thread's first row, counted from the work tile's first. Computed again where it is needed: registers are short.
__device__ inline int row_of_thread() {
    const unsigned thread = opaque(threadIdx.x);
    return 64 * (thread / 128 - 1) + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// Broadcasts x, which is in shared memory. Lane 0 reads x, because lane 0 later arrives to release the stage of x. An
// arrival waits for its own lane's loads alone: another lane could read the next tile's x.
__device__ inline float read_by_lane0(const float &x, bool is_lane_0) { return broadcast_lane0(is_lane_0 ? x : 0.f); }

// Whether this is lane 0, by a shuffle, so that ptxas keeps the answer. Else it reads threadIdx.x again in each turn of
// a loop, which takes a while (S2R).
__device__ inline bool is_lane0_kept() { return __shfl_sync(~0u, threadIdx.x, threadIdx.x % 32) % 32 == 0; }

// 9. Sij = Qi Kj^T of columns x0 to x1. The products with a low part come first, while the sum is small.
template <class Tile, int Count>
__device__ void issue_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj, int x0, int x1) {
    constexpr int QBox = 64 * 128, KBox = Tile::Bc * 128;
    Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    Q.low = broadcast_lane0(Q.low);  // else what depends on it is kept in local memory
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; ++product)
#pragma unroll
        for (int x = x0; x < x1; x += 16)
            wgmma_shared<Product::ABt>(
                __half(), Sij, Q + x / kBoxColumns * (2 * QBox) + x % kBoxColumns * 2 + (product == 0) * QBox,
                K + x / kBoxColumns * (2 * KBox) + x % kBoxColumns * 2 + (product == 1) * KBox, x > x0 || product > 0);
    wgmma_commit();
}

// 12. Tij = Pij Vj
template <class Tile, int CountT, int CountP>
__device__ void issue_PV(float (&Tij)[CountT], const uint32_t (&hi)[CountP], const uint32_t (&lo)[CountP],
                         const unsigned char *Vj) {
    const Descriptor V = descriptor(Vj, 2 * Tile::Bc * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) {
        wgmma_AB(__half(), Tij, &hi[j / 4], V + Tile::Bc * 128 + j * 128, j > 0);
        wgmma_AB(__half(), Tij, &lo[j / 4], V + j * 128);
    }
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) wgmma_AB(__half(), Tij, &hi[j / 4], V + j * 128);
    wgmma_commit();
}

// Whether hi and lo are exact enough for scores in this unit (kMaxScoreUnit), and m is a normal float in it. False for
// NaN, too.
template <class Unit>
__device__ bool scores_fit(const Attention &a, const Unit &unit_of_m) {
    const float scale = fabsf(a.softmax_scale);
    return unit_of_m() > 1e-30f && unit_of_m() * fmaxf(scale, 1.f) < 1e30f && unit_of_m() * scale * a.d < kMaxScoreUnit;
}

// Adds Oi to the sum of earlier tiles, which is kept in O, relative to m_of_O. Then Oi begins again at 0. The last time
// Oi becomes the whole sum instead, and O isn't written. forward.cu has a table of units.
template <class Mask, int Count>
__device__ void flush_O(const Parameters &p, const WorkTileOf<Mask> &work, float (&Oi)[Count], float &unit_of_O,
                        const SoftmaxState &softmax, float c_of_m, float *m_of_O, bool is_first, bool is_last) {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {  // one row after the other: registers are short
        const int row = row_of_thread() + 8 * r, column = 2 * (opaque(threadIdx.x) % 4);
        float *const o = (float *)p.a.o + row_offset(p.a.o_stride, work, work.i0 + row) + column;
        const int columns = work.i0 + row < work.i1 ? p.a.d - column : 0;
        const float m = r == 0 ? softmax.m[0] : softmax.m[1];
        const float alpha = is_first ? 0.f : alpha_between(m_of_O[row], m, c_of_m);
#pragma unroll
        for (int x = 0; x < Count; x += x % 2 ? 3 : 1) {
            const int at = x / 4 * 8 + x % 2;
            float sum = (r == 0 ? Oi[x] : Oi[x + 2]) * unit_of_O;
            if (at < columns) {
                if (!is_first) sum = fmaf(alpha, o[at], sum);
                if (!is_last) o[at] = sum;
            }
            if (!is_last) sum = 0.f;
            Oi[x] = r == 0 ? sum : Oi[x], Oi[x + 2] = r == 0 ? Oi[x + 2] : sum;
        }
        __syncwarp();  // the row's four lanes have read m_of_O
        m_of_O[row] = m;
    }
    unit_of_O = 1.f;
}

// Whether a row of O is so small that what hi and lo of Vj or Pij lose may count: the fallback then computes the rows
// again. Means of n ordinary numbers are 32 times these bounds (docs/float32.md). A row with l = 0 isn't counted: it
// sees no key, or only scores of -inf.
template <class Tile, class Mask, int Count>
__device__ bool any_row_small(const float (&Oi)[Count], const float (&l)[2], const Float32Work<Mask> &work,
                              float unit_of_O) {
    // A number of V in hi + lo, times V_to_O, is in units of Oi.
    const float V_to_O = work.inverse_scale_V * inverse_of_power(unit_of_O);
    const float n = work.visible.end - work.visible.begin;
    bool small = false;
    for (int r = 0; r < 2; ++r) {
        float most = 0.f;
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1) most = fmaxf(most, fabsf(Oi[x]));
        small |= row_max<4>(most) < V_to_O * rsqrtf(n) * fmaxf(256.f * l[r], 0x1p11f / kPScale<Tile> * n) &&
                 l[r] > 0.f && work.i0 + row_of_thread() + 8 * r < work.i1;
    }
    return small;
}

// 12. - 13. O to HBM. store_state does what is rare. This code runs once a work tile, and warps wait while it is
// fetched into the instruction cache, so it is short.
template <class Tile, class Mask, int Count>
__device__ void store_O(const Parameters &p, const WorkTileOf<Mask> &work, int i, const float (&Oi)[Count],
                        const SoftmaxState &softmax, const float (&l)[2], float c_of_m, float unit_of_m,
                        float unit_of_O) {
    constexpr float truncation = kTruncationT<Tile::D>;
    // A row that sees no key has l = 0; store_state tells it from a row with scores of -inf alone.
    if (!p.stores_O_alone || __any_sync(~0u, l[0] == 0.f || l[1] == 0.f))
        return store_state<float>(p, work, i, Oi, softmax, c_of_m, unit_of_m, unit_of_O, truncation);
    const int column = opaque(threadIdx.x) % 4 * 2;
    float *const o = (float *)p.a.o + row_offset(p.a.o_stride, work, i) + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float near = __fdividef(1.f, l[r]),
                    inverse = fmaf(near, fmaf(-l[r], near, 1.f), near);  // one Newton step
        const float weight = inverse * undo_truncation(unit_of_O, l[r], truncation);
        store_row<Count / 2>(o + 8 * r * p.a.o_stride.row, i + 8 * r < work.i1 ? p.a.d - column : 0, true,
                             [&](int x) { return float2{weight * Oi[4 * x + 2 * r], weight * Oi[4 * x + 2 * r + 1]}; });
    }
}

}  // namespace minimal_attn::hopper
