// fallback.h: FMAs multiply what hi and lo don't carry, 64 rows of a work tile at a time, from float32s in shared
// memory.
//
// It needs the memory of Qi, Kj and Vj, so it comes after all work tiles. Until then each warp has a list of deferred
// work tiles. Shared memory holds the number of the last one. The O rows of each hold the number of the one deferred
// before it, until its O is stored.
#pragma once
#include "hopper/float32/consumer.h"

namespace minimal_attn::hopper {

template <int D>
constexpr int kFallbackBc = D == 128 ? 32 : 16;  // keys of a tile

// The unit of Sij, as scale_of knows it. 2 keeps a difference of scores from overflowing; for huge softmax_scale the
// scale times 2 would overflow.
__device__ inline float fallback_unit(const Attention &a) { return fabsf(a.softmax_scale) > 1e10f ? .25f : 2.f; }

// Four neighbours, of which the first `count` exist
__device__ inline float4 load_four(const float *from, int count) {
    if (count >= 4) return *(const float4 *)from;
    return {from[0], count > 1 ? from[1] : 0.f, count > 2 ? from[2] : 0.f, 0.f};
}

// Four neighbours in a tile of Qi or Kj. The XOR puts those of eight rows into different banks.
template <int D>
__device__ float4 &four_at(float *tile, int row, int x) {
    return *(float4 *)(tile + row * D + ((x / 4) ^ (row % 8)) * 4);
}

// Rows x D numbers, by a warpgroup; 0 where there is no such row or column
template <int Rows, int D, class Store>
__device__ void copy_tile(const float *from, int64_t stride, Keys rows, int d, const Store &store) {
#pragma unroll 4
    for (int n = threadIdx.x % 128; n < Rows * D / 4; n += 128) {
        const int row = n / (D / 4), x = n % (D / 4) * 4;
        const bool exists = row >= rows.begin && row < rows.end && x < d;
        store(row, x, exists ? load_four(from + row * stride + x, d - x) : float4());
    }
}

// 9. Sij, but for its unit. Sums of 32 columns, added up, are more exact than one sum.
template <int D, int Count>
__device__ void multiply_QK(float (&Sij)[Count], float *Qi, float *Kj, int row, int d) {
#pragma unroll
    for (int y0 = 0; y0 < D; y0 += 32) {
        float sum[Count] = {};
#pragma unroll 1
        for (int y = y0; y < min(y0 + 32, d); y += 4) {
            const float4 q[2] = {four_at<D>(Qi, row, y), four_at<D>(Qi, row + 8, y)};
#pragma unroll
            for (int n = 0; n < Count / 2; ++n) {
                const float4 k = four_at<D>(Kj, n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2, y);
                for (int r = 0; r < 2; ++r) {
                    float &s = sum[n / 2 * 4 + 2 * r + n % 2];
                    s = fmaf(q[r].x, k.x, s), s = fmaf(q[r].y, k.y, s);
                    s = fmaf(q[r].z, k.z, s), s = fmaf(q[r].w, k.w, s);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < Count; ++x) Sij[x] = y0 > 0 ? Sij[x] + sum[x] : sum[x];
    }
}

// 12. Oi += Pij Vj, which is summed first and then added: one sum over all keys would lose small terms. P is
// transposed; of Vj a thread's four columns of sixteen are neighbours.
template <int D, int Keys, int Count>
__device__ void multiply_PV(float (&Oi)[Count], const float *P, const float *Vj, int row) {
#pragma unroll
    for (int x0 = 0; x0 < Count; x0 += 32) {
        float Tij[32] = {};
#pragma unroll 1
        for (int j = 0; j < Keys; ++j) {
            const float p[2] = {P[64 * j + row], P[64 * j + row + 8]};
#pragma unroll
            for (int x = 0; x < 32; x += 8) {
                const float4 v = *(const float4 *)(Vj + j * D + 2 * (x0 + x) + threadIdx.x % 4 * 4);
                for (int r = 0; r < 2; ++r) {
                    float *const T = Tij + x + 2 * r;
                    T[0] = fmaf(p[r], v.x, T[0]), T[1] = fmaf(p[r], v.y, T[1]);
                    T[4] = fmaf(p[r], v.z, T[4]), T[5] = fmaf(p[r], v.w, T[5]);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < 32; ++x) Oi[x0 + x] += Tij[x];
    }
}

// Adds Oi to the sum of earlier tiles, which is kept in O, relative to m_of_O. Oi begins again at 0; after the last
// flush it is the whole sum. Only where m is subtracted first: Oi is then relative to m, not to a rounded cm.
template <int Count>
__device__ void flush_O(const Parameters &p, const WorkTile &work, float (&Oi)[Count], float &unitO,
                        const SoftmaxState &softmax, float c, float *m_of_O, bool is_first, bool is_last) {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {  // one row after the other: registers are short
        const int row = row_of_thread() + 8 * r, column = 2 * (opaque(threadIdx.x) % 4);
        float *const o = (float *)p.a.o + row_offset(p.a.o_stride, work, work.i0 + row) + column;
        const int columns = work.i0 + row < work.i1 ? p.a.d - column : 0;
        const float m = r == 0 ? softmax.m[0] : softmax.m[1];
        const float alpha = is_first ? 0.f : exact_alpha<true>(m_of_O[row], m, c);
#pragma unroll
        for (int x = 0; x < Count; x += x % 2 ? 3 : 1) {
            const int at = x / 4 * 8 + x % 2;
            float sum = (r == 0 ? Oi[x] : Oi[x + 2]) * unitO;
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
    unitO = 1.f;
}

// 64 rows of a work tile from float32s. Qi is where Qi always is; Kj and Vj are in this warpgroup's part of `tiles`.
template <class Tile>
__device__ void run_fallback(const Parameters &p, ConsumerMemory<Tile> &shared, const WorkTile &work, int warpgroup) {
    constexpr int D = Tile::D, Bc = kFallbackBc<D>, FlushKeys = 64 * Bc;
    static_assert(2 * Bc * D * 4 * Tile::Consumers <= sizeof(shared.tiles) && 64 * D * 4 <= sizeof(shared.Qi[0]));
    float *const Qi = (float *)shared.Qi[warpgroup], *const Kj = (float *)shared.tiles + warpgroup * 2 * Bc * D;
    float *const Vj = Kj + Bc * D, *const P = Kj;
    const Attention &a = p.a;
    const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1), row = row_of_thread() - 64 * warpgroup;
    const auto first_row = [&](const void *tensor, const Strides &stride, int h) {
        return (const float *)tensor + work.b * stride.batch + h * stride.head;
    };
    const auto barrier = [&] { named_barrier_sync(barrier_of_group(warpgroup), 128); };

    // 8. Qi, times the part of the unit that is below 1
    const float unit = fallback_unit(a), c = scale_of(a, unit), of_q = fminf(1.f / unit, 1.f);
    copy_tile<64, D>(first_row(a.q, a.q_stride, work.h) + i0 * a.q_stride.row, a.q_stride.row, {0, i1 - i0}, a.d,
                     [&](int i, int x, const float4 &q) {
                         four_at<D>(Qi, i, x) = {of_q * q.x, of_q * q.y, of_q * q.z, of_q * q.w};
                     });
    float Oi[D / 2] = {}, Sij[Bc / 2], unitO = 1.f;
    SoftmaxState softmax = SoftmaxState();
    const Keys visible = keys_of_any(work.band, i0, i1);
    int j0 = visible.begin;
#pragma unroll 1
    for (; j0 < visible.end; j0 += Bc) {  // 5. - 6. for j: Kj, Vj
        const int keys = j0 - visible.begin;
        if (!Tile::IsSingle && keys > 0 && keys % FlushKeys == 0)
            flush_O(p, work, Oi, unitO, softmax, c, shared.m_of_O, keys == FlushKeys, false);
        const Keys valid = {work.band.keys.begin - j0, work.band.keys.end - j0};
        copy_tile<Bc, D>(first_row(a.k, a.k_stride, work.key_head) + j0 * a.k_stride.row, a.k_stride.row, valid, a.d,
                         [&](int j, int x, const float4 &k) { four_at<D>(Kj, j, x) = k; });
        copy_tile<Bc, D>(first_row(a.v, a.v_stride, work.key_head) + j0 * a.v_stride.row, a.v_stride.row, valid, a.d,
                         [&](int j, int x, const float4 &v) {
                             float2 *const at = (float2 *)(Vj + j * D + x / 16 * 16 + x % 8 * 2 + x % 16 / 8 * 2);
                             at[0] = {v.x, v.y}, at[2] = {v.z, v.w};
                         });
        barrier();
        // 9.
        multiply_QK<D>(Sij, Qi, Kj, row, a.d);
        const float of_sum = fmaxf(1.f / unit, 1.f);
#pragma unroll
        for (float &s : Sij) s *= of_sum;
        negate_and_mask(Sij, a, work, j0);
        // 10. - 11.
        update_row_max<true>(Sij, softmax, c);
        exponentiate<true>(Sij, softmax, c);
        // 12.
        rescale(Oi, softmax);
        barrier();  // all have read Kj; P takes its place, 16 rows for each warp
#pragma unroll
        for (int x = 0; x < Bc / 2; ++x)
            P[(x / 4 * 8 + threadIdx.x % 4 * 2 + x % 2) * 64 + row + x / 2 % 2 * 8] = Sij[x];
        __syncwarp();
        multiply_PV<D, Bc>(Oi, P, Vj, row);
        barrier();
    }
    if (!Tile::IsSingle && j0 - visible.begin > FlushKeys)
        flush_O(p, work, Oi, unitO, softmax, c, shared.m_of_O, false, true);
    store_state<true>(p, work, work.i0 + row_of_thread(), Oi, softmax, c, unit);
}

// Where a warp's list continues after `work`: in the first number of the warp's rows of O
__device__ inline int &next_deferred(const Parameters &p, const WorkTile &work) {
    return ((int *)p.a.o)[row_offset(p.a.o_stride, work, work.i0 + row_of_thread())];
}

// Puts a warp's 16 rows of a work tile on its list.
template <class Tile>
__device__ void defer(const Parameters &p, ConsumerMemory<Tile> &shared, const Float32Work &work) {
    const int thread = opaque(threadIdx.x);
    if (thread % 32 != 0 || work.i0 + row_of_thread() >= work.i1) return;
    int &deferred = shared.deferred[thread / 32 - 4];
    next_deferred(p, work) = deferred, deferred = work.n;
}

// All deferred work tiles of a warpgroup's four lists, the largest number first, which is the last one that was put
// there
template <class Tile>
__device__ void run_deferred(const Parameters &p, ConsumerMemory<Tile> &shared, Pipeline<Tile::Stages> KV) {
    const int warpgroup = consumer_index();
    for (int stage = 0; stage < Tile::Stages; ++stage)
        KV.producer_acquire(), KV.advance();  // no tile is in use any more
    for (;;) {
        int n = -1;
        for (int warp = 0; warp < 4; ++warp) n = max(n, shared.deferred[4 * warpgroup + warp]);
        if (n < 0) return;
        const WorkTile work = TileScheduler<Tile>{p}.tile(n);
        int &deferred = shared.deferred[threadIdx.x / 32 - 4];
        named_barrier_sync(barrier_of_group(warpgroup), 128);  // all have read the lists
        if (threadIdx.x % 32 == 0 && deferred == n) deferred = next_deferred(p, work);
        run_fallback<Tile>(p, shared, work, warpgroup);
        named_barrier_sync(barrier_of_group(warpgroup), 128);
    }
}

// For the single tile: amid its code, which runs once, it costs 3 %.
template <class Tile>
__device__ __noinline__ void run_deferred_out_of_line(const Parameters &p, ConsumerMemory<Tile> &shared,
                                                      Pipeline<Tile::Stages> KV) {
    run_deferred<Tile>(p, shared, KV);
}

}  // namespace minimal_attn::hopper
