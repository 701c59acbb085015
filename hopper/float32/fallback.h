// FMAs multiply what the parts don't carry
#pragma once
#include "hopper/epilogue.h"
#include "hopper/float32/workspace.h"
namespace minimal_attn::hopper {
namespace {

// The first of a thread's rows, counted from the work's first. Computed anew where it is needed: registers are short.
__device__ int row_of_thread() {
    const unsigned thread = opaque(threadIdx.x);
    return 64 * (thread / 128 - 1) + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// 9. -Sij if the scale is negative, and the mask, of a tile of keys from j0 on
template <int Count>
__device__ void negate_and_mask(float (&Sij)[Count], const Attention &a, const WorkTile &work, int j0) {
    if (a.softmax_scale < 0.f) negate(Sij);
    mask_scores(Sij, work.band, work.i0 + row_of_thread(), j0);
}

// What Sij is to be multiplied by if it is of FMAs: 2, so that a difference of scores can't overflow; or less for
// scales that, times 2, would.
__device__ float unit_of_floats(const Attention &a) { return fabsf(a.softmax_scale) > 1e10f ? .25f : 2.f; }

// Four neighbours, of which so many are there
__device__ float4 load_four(const float *from, int count) {
    if (count >= 4) return *(const float4 *)from;
    return {from[0], count > 1 ? from[1] : 0.f, count > 2 ? from[2] : 0.f, 0.f};
}

// What the parts don't carry FMAs multiply, from tiles of float32s in shared memory, of so many keys.
template <int D>
constexpr int kKeysOfFloats = D == 128 ? 32 : 16;

// Four neighbours in a tile of Qi or Kj: those of eight rows lie in different banks.
template <int D>
__device__ float4 &four_at(float *tile, int row, int x) {
    return *(float4 *)(tile + row * D + ((x / 4) ^ (row % 8)) * 4);
}

// Rows x D numbers by a warpgroup, zeros where row and column aren't there
template <int Rows, int D, class Store>
__device__ void copy_floats(const float *from, int64_t stride, Keys rows, int d, const Store &store) {
#pragma unroll 4
    for (int n = threadIdx.x % 128; n < Rows * D / 4; n += 128) {
        const int row = n / (D / 4), x = n % (D / 4) * 4;
        const bool is_there = row >= rows.begin && row < rows.end && x < d;
        store(row, x, is_there ? load_four(from + row * stride + x, d - x) : float4());
    }
}

// Sij, but for the unit, of Qi, of which this thread's first row is `row`; a sum of sums of 32, which is more exact
template <int D, int Count>
__device__ void multiply_QK_floats(float (&Sij)[Count], float *Qi, float *Kj, int row, int d) {
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

// Oi += Pij Vj, summed for the tile and then added: in a sum over all keys small terms are lost. P is Pij transposed;
// of Vj a thread's four columns of sixteen are neighbours.
template <int D, int Keys, int Count>
__device__ void multiply_PV_floats(float (&Oi)[Count], const float *P, const float *Vj, int row) {
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

// Oi is added to the sum of earlier tiles, which O has, relative to m_of_O. The new sum goes to O, and Oi begins at 0;
// at last it goes to Oi. Only where m is always subtracted first: Oi is then relative to m, not to a rounded cm.
template <int Count>
__device__ void add_up(const ParametersOfParts &p, const WorkTile &work, float (&Oi)[Count], float &unitO,
                       const SoftmaxState &softmax, float c, float *m_of_O, bool is_first, bool is_last) {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {  // one after the other: registers are short
        const int row = row_of_thread() + 8 * r, column = 2 * (opaque(threadIdx.x) % 4);
        float *const o = (float *)p.a.o + row_offset(p.a.o_stride, work, work.i0 + row) + column;
        const int columns = work.i0 + row < work.i1 ? p.a.d - column : 0;
        const float m = r == 0 ? softmax.m[0] : softmax.m[1],
                    alpha = is_first ? 0.f : exact_alpha<true>(m_of_O[row], m, c);
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
        __syncwarp();  // the row's four lanes have read it
        m_of_O[row] = m;
    }
    unitO = 1.f;
}

// A consumer's part of a work, from the float32s themselves. Its Qi is where Qi was, its Kj and Vj are in its part of
// the tiles' places.
template <class Tile>
__device__ void attend_by_floats(const ParametersOfParts &p, SharedOfParts<Tile> &shared, const WorkTile &work,
                                 int warpgroup) {
    constexpr int D = Tile::D, Bc = kKeysOfFloats<D>, InOi = 64 * Bc;  // so many keys are added up in Oi (add_up)
    static_assert(2 * Bc * D * 4 * Tile::Consumers <= sizeof(shared.tiles) && 64 * D * 4 <= sizeof(shared.Qi[0]));
    float *const Qi = (float *)shared.Qi[warpgroup], *const Kj = (float *)shared.tiles + warpgroup * 2 * Bc * D;
    float *const Vj = Kj + Bc * D, *const P = Kj;
    const Attention &a = p.a;
    const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1), row = row_of_thread() - 64 * warpgroup;
    const auto first_row = [&](const void *tensor, const Strides &stride, int h) {
        return (const float *)tensor + work.b * stride.batch + h * stride.head;
    };
    const auto meet = [&] { named_barrier_sync(barrier_of(warpgroup), 128); };

    // 8. Qi, times the part of the unit that is below 1
    const float unit = unit_of_floats(a), c = scale_of(a, unit), of_q = fminf(1.f / unit, 1.f);
    copy_floats<64, D>(first_row(a.q, a.q_stride, work.h) + i0 * a.q_stride.row, a.q_stride.row, {0, i1 - i0}, a.d,
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
        if (!Tile::SplitsAll && keys > 0 && keys % InOi == 0)
            add_up(p, work, Oi, unitO, softmax, c, shared.m_of_O, keys == InOi, false);
        const Keys there = {work.band.keys.begin - j0, work.band.keys.end - j0};
        copy_floats<Bc, D>(first_row(a.k, a.k_stride, work.key_head) + j0 * a.k_stride.row, a.k_stride.row, there, a.d,
                           [&](int j, int x, const float4 &k) { four_at<D>(Kj, j, x) = k; });
        copy_floats<Bc, D>(first_row(a.v, a.v_stride, work.key_head) + j0 * a.v_stride.row, a.v_stride.row, there, a.d,
                           [&](int j, int x, const float4 &v) {
                               float2 *const at = (float2 *)(Vj + j * D + x / 16 * 16 + x % 8 * 2 + x % 16 / 8 * 2);
                               at[0] = {v.x, v.y}, at[2] = {v.z, v.w};
                           });
        meet();
        // 9.
        multiply_QK_floats<D>(Sij, Qi, Kj, row, a.d);
        const float of_sum = fmaxf(1.f / unit, 1.f);
#pragma unroll
        for (float &s : Sij) s *= of_sum;
        negate_and_mask(Sij, a, work, j0);
        // 10. - 11.
        update_row_max<true>(Sij, softmax, c);
        exponentiate<true>(Sij, softmax, c);
        // 12.
        rescale(Oi, softmax);
        meet();  // Kj has been read; P takes its place, 16 rows for each warp
#pragma unroll
        for (int x = 0; x < Bc / 2; ++x)
            P[(x / 4 * 8 + threadIdx.x % 4 * 2 + x % 2) * 64 + row + x / 2 % 2 * 8] = Sij[x];
        __syncwarp();
        multiply_PV_floats<D, Bc>(Oi, P, Vj, row);
        meet();
    }
    if (!Tile::SplitsAll && j0 - visible.begin > InOi)
        add_up(p, work, Oi, unitO, softmax, c, shared.m_of_O, false, true);
    store_state<true>(p, work, work.i0 + row_of_thread(), Oi, softmax, c, unit);
}

// What is left to do by floats, until all works are done, since it needs the tiles' places: a list for each warp, of
// works of which its rows are left. The last, which has the largest number, is first; which one comes next lies where
// the first number of the warp's rows of O will be.
__device__ int &left_after(const ParametersOfParts &p, const WorkTile &work) {
    return ((int *)p.a.o)[row_offset(p.a.o_stride, work, work.i0 + row_of_thread())];
}

template <class Tile>
__device__ void leave(const ParametersOfParts &p, SharedOfParts<Tile> &shared, const WorkOfParts &work) {
    const int thread = opaque(threadIdx.x);
    if (thread % 32 != 0 || work.i0 + row_of_thread() >= work.i1) return;
    int &left = shared.left[thread / 32 - 4];
    left_after(p, work) = left, left = work.n;
}

template <class Tile>
__device__ void attend_to_left(const ParametersOfParts &p, SharedOfParts<Tile> &shared, Pipeline<Tile::Stages> KV) {
    const int warpgroup = consumer_index();
    for (int place = 0; place < Tile::Stages; ++place)
        KV.producer_acquire(), KV.advance();  // nobody reads tiles any more
    for (;;) {                                // the works of its four warps
        int n = -1;
        for (int warp = 0; warp < 4; ++warp) n = max(n, shared.left[4 * warpgroup + warp]);
        if (n < 0) return;
        const WorkTile work = TileScheduler<Tile>{p}.tile(n);
        int &left = shared.left[threadIdx.x / 32 - 4];
        named_barrier_sync(barrier_of(warpgroup), 128);  // all have read which
        if (threadIdx.x % 32 == 0 && left == n) left = left_after(p, work);
        attend_by_floats<Tile>(p, shared, work, warpgroup);
        named_barrier_sync(barrier_of(warpgroup), 128);
    }
}

// Out of line: amid the small tile's code, which runs once, it cost 3 %.
template <class Tile>
__device__ __noinline__ void attend_to_left_elsewhere(const ParametersOfParts &p, SharedOfParts<Tile> &shared,
                                                      Pipeline<Tile::Stages> KV) {
    attend_to_left<Tile>(p, shared, KV);
}

}  // namespace
}  // namespace minimal_attn::hopper
