// accumulators.cuh: rows of Sij and Oi in the accumulators of mma.sync (mma.cuh), for half.cu and tf32.cu. Here are
// the numbers that a thread keeps of its warp's rows, the mask, and the softmax up to the exponentials. There is no
// barrier: the four lanes of a row exchange numbers by shuffles.
#pragma once
#include "portable/common.cuh"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

// What a thread has of its warp's rows: its row r is row lane / 4 + 8 * r of the warp. Elements [m][.][2 * h + 0, 1] of
// Sij and Oi belong to r = 2 * m + h.
template <class Tile>
struct ThreadRows {
    static constexpr int R = 2 * Tile::M;
    float Oi[Tile::M][Tile::X][4] = {};
    float li[R] = {};  // of this thread's keys: the four lanes of a row add theirs up after the last tile
    float mi[R];       // of scores before the scaling

    __device__ ThreadRows() {
#pragma unroll
        for (int r = 0; r < R; ++r) mi[r] = -INFINITY;
    }
};

// mi of the scaled scores. -inf stays -inf also where the scale is 0.
__device__ inline float scaled_max(const Attention &a, float mi) {
    return mi == -INFINITY ? mi : mi * fabsf(a.softmax_scale);
}

// 9. The place for everything that changes a score of head h, or hides it by -inf. This thread has rows i0 + 8 r and
// keys j0 + 8 n + 0, 1.
template <class T, class Tile, class Mask>
__device__ void change_scores(float (&Sij)[Tile::M][Tile::N][4], const Attention &a, const Mask &mask, int64_t b,
                              int64_t h, int i0, int j0, bool masked) {
    if constexpr (kIsGeneral<Mask>) {
        if (has_softcap(a)) change<T>(a.scores, flat(Sij));
        add_terms<T, false>(a, b, h, i0, j0, Sij);
    }
    if (a.softmax_scale < 0.f) {  // what follows scales by the absolute value
#pragma unroll
        for (float &s : flat(Sij)) s = -s;
    }
    if (!masked) return;
#pragma unroll
    for (int r = 0; r < 2 * Tile::M; ++r) {
        const Keys keys = keys_of_row(mask, i0 + 8 * r);
        const int begin = keys.begin - j0, end = keys.end - j0;
#pragma unroll
        for (int n = 0; n < Tile::N; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (8 * n + c < begin || 8 * n + c >= end) Sij[r / 2][n][r % 2 * 2 + c] = -INFINITY;
    }
}

// 10. - 11. mi, alpha and li = alpha li. Then Pij = exp2(c Sij - subtract), one FMA and one ex2, where c is
// |softmax_scale| log2 e. subtract is c mi, rounded: one factor for the row, which Oi / li cancels. Where |c mi| > 1024
// or mi = -inf, mi (or 0) is subtracted from Sij here, before the scaling, and subtract is 0 (docs/numerics.md).
template <class Tile>
__device__ void update_rows(float (&Sij)[Tile::M][Tile::N][4], ThreadRows<Tile> &rows,
                            float (&subtract)[ThreadRows<Tile>::R], float (&alpha)[ThreadRows<Tile>::R], float c) {
    constexpr int R = ThreadRows<Tile>::R, N = Tile::N;
    float m_old[R];
    bool large = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        m_old[r] = rows.mi[r];
#pragma unroll
        for (int n = 0; n < N; ++n)
            rows.mi[r] = fmaxf(rows.mi[r], fmaxf(Sij[r / 2][n][r % 2 * 2], Sij[r / 2][n][r % 2 * 2 + 1]));
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        rows.mi[r] = row_max<4>(rows.mi[r]);
        subtract[r] = __fmul_rn(rows.mi[r], c);
        alpha[r] = exp2_fast(__fmul_rn(m_old[r], c) - subtract[r]);
        large |= !(fabsf(subtract[r]) <= 1024.f);
    }
    if (__any_sync(~0u, large)) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (fabsf(subtract[r]) <= 1024.f) continue;
            const float m_safe = rows.mi[r] == -INFINITY ? 0.f : rows.mi[r];
            alpha[r] = exp2_fast((m_old[r] - m_safe) * c);
            subtract[r] = 0.f;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int x = 0; x < 2; ++x) Sij[r / 2][n][r % 2 * 2 + x] -= m_safe;
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) rows.li[r] *= alpha[r];
}

// 12. Oi = diag(alpha) Oi
template <class Tile>
__device__ void scale_Oi(ThreadRows<Tile> &rows, const float (&alpha)[ThreadRows<Tile>::R]) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m)
#pragma unroll
        for (int x = 0; x < Tile::X; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) rows.Oi[m][x][e] *= alpha[2 * m + e / 2];
}

}  // namespace
}  // namespace minimal_attn
