// float32_block.cuh: one block of attention in float32 on the FMA units: Br queries of a head, by Tile::Threads
// threads. common.cuh has the steps and the barriers, float32.cu the kernel. hopper/float32/fallback.h computes by it
// what tensor cores can't.
//
//     shared memory | size    | row padded by | written                    | read
//     Qi            | Br x D  | 4             | once                       | step 9, by the warps that have its rows
//     Oi            | Qi's place              | after the last tile        | on the way to HBM, by the same warps
//     Kj            | Bc x D  | 4             | while Pij and Oi computed  | step 9, by all
//     Vj            | Bc x D  | 0             | while Sij is computed      | step 12, by all
//     Pij           | Br x Bc | TX            | step 10                    | step 12, by the warp that wrote the row
//
// Sij stays in registers. Padding keeps the rows that a warp reads or writes at once in different banks.
#pragma once
#include "portable/common.cuh"

namespace minimal_attn {
namespace {

// TX x TY threads. Thread (tx, ty) has rows i = ty + TY r of the tile; of Sij the keys j = tx + TX c, of Oi the columns
// x = 4 (tx + TX c) + 0..3. Where registers allow these are 8 x 8 numbers of each, since every number read from shared
// memory is then used 8 times. The TX threads of a row are neighbours in one warp.
template <int D_, int Br_, int Bc_, int TX_, int TY_, int BlocksPerSM_>
struct FloatTile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, TX = TX_, TY = TY_;
    static constexpr int Threads = TX * TY, BlocksPerSM = BlocksPerSM_;
    // Of a thread: rows, keys of Sij, groups of 4 columns of Oi
    static constexpr int R = Br / TY, CS = Bc / TX, CO = D / (4 * TX);
    static constexpr int QStride = D + 4, KStride = D + 4, VStride = D, PStride = Bc + TX;
    static constexpr int Floats = Br * QStride + Bc * KStride + Bc * VStride + Br * PStride;
    static constexpr int SharedBytes = Floats * 4, NeededBytes = SharedBytes;
    static constexpr int SumFloats = Threads * R * (2 * (4 * CO + 1) + 1);  // of a block in the workspace (flush_sums)
    static_assert(32 % TX == 0, "a row of threads must not leave its warp");
};

__device__ void load4(float (&x)[4], const float *from) {
    const float4 four = *(const float4 *)from;
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// Long calls flush li and Oi after so many tiles of keys (flush_sums): longer sums round more (docs/numerics.md).
constexpr int kTilesOfSum = 64;

// 9. Sij = Qi Kj^T. The next operands are read while these are multiplied; else the FMA units wait for shared memory
// (H200, d 64: 36 instead of 38 TFLOP/s). For d > 128 a score is the sum of four chains, two for each 128 channels: one
// chain of 256 FMAs rounds too often.
template <class Tile>
__device__ void multiply_QK(float (&Sij)[Tile::R][Tile::CS], const float *Qi, const float *Kj, int tx, int ty, int d) {
    constexpr int R = Tile::R, CS = Tile::CS, TX = Tile::TX, TY = Tile::TY, Chains = Tile::D > 128 ? 2 : 1;
    constexpr int Channels = Tile::D > 128 ? 128 : Tile::D;  // of a chain, or of two
    float q[2][R][4], k[2][CS][4];
    const auto load_qk = [&](int buffer, int x) {
#pragma unroll
        for (int r = 0; r < R; ++r) load4(q[buffer][r], &Qi[(ty + TY * r) * Tile::QStride + x]);
#pragma unroll
        for (int c = 0; c < CS; ++c) load4(k[buffer][c], &Kj[(tx + TX * c) * Tile::KStride + x]);
    };
    load_qk(0, 0);
#pragma unroll
    for (int first = 0; first < Tile::D; first += Channels) {
        if (first > 0 && first >= d) break;
        float sum[Chains][R][CS] = {};
#pragma unroll 1
        for (int x0 = first; x0 < min(d, first + Channels); x0 += 8) {
#pragma unroll
            for (int now = 0; now < 2; ++now) {
                load_qk(1 - now, x0 + 4 * now + 4);  // the last one reads padding, which is not used
#pragma unroll
                for (int c = 0; c < CS; ++c)
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            float &s = sum[now % Chains][r][c];
                            s = fmaf(q[now][r][x], k[now][c][x], s);
                        }
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < CS; ++c) {
                const float s = Chains == 1 ? sum[0][r][c] : sum[0][r][c] + sum[Chains - 1][r][c];
                Sij[r][c] = first == 0 ? s : Sij[r][c] + s;
            }
    }
}

// 9. - 11. softmax_scale and the mask, mi, li and Pij; and step 12's Oi = diag(alpha) Oi
template <class Tile, class T, class Mask>
__device__ void softmax(const Attention &a, const Block<T, Mask> &block, int j0, float (&Sij)[Tile::R][Tile::CS],
                        float (&Oi)[Tile::R][Tile::CO][4], float (&li)[Tile::R], float (&mi)[Tile::R], float *Pij,
                        int tx, int ty) {
    constexpr int R = Tile::R, CS = Tile::CS, CO = Tile::CO, TX = Tile::TX, TY = Tile::TY;
    const bool masked = j0 < block.seen_by_all.begin || j0 + Tile::Bc > block.seen_by_all.end;
    const DropoutOfHead dropout(a, block.b, block.h);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int i = block.i0 + ty + TY * r;
        const Keys keys = masked ? keys_of_row(block.mask, i) : Keys{};
        float m_new = mi[r];
#pragma unroll
        for (int c = 0; c < CS; ++c) {
            const int j = j0 + tx + TX * c;
            if constexpr (kIsGeneral<Mask>) Sij[r][c] = unscaled<T>(a, Sij[r][c], block.b, block.h, i, j);
            Sij[r][c] *= a.softmax_scale;
            if (masked && (j < keys.begin || j >= keys.end)) Sij[r][c] = -INFINITY;
            m_new = fmaxf(m_new, Sij[r][c]);
        }
        float m_safe;
        const float alpha = update_row_max(mi[r], row_max<TX>(m_new), m_safe);
#pragma unroll
        for (int c = 0; c < CO; ++c)
#pragma unroll
            for (int x = 0; x < 4; ++x) Oi[r][c][x] *= alpha;
        // li is the sum before dropout, of this thread's keys. The TX threads of the row add theirs up after the last
        // tile.
        float l = 0.f;
#pragma unroll
        for (int c = 0; c < CS; ++c) {
            float p = exp_fast(Sij[r][c] - m_safe);
            l += p;
            if (kIsGeneral<Mask> && has_dropout(a)) p *= dropout.Zij(i, j0 + tx + TX * c);
            Pij[(ty + TY * r) * Tile::PStride + tx + TX * c] = p;
        }
        li[r] = alpha * li[r] + l;
    }
}

// Sets a thread's Kahan sums in the workspace to 0 (docs/numerics.md). A row there has the mi of the last flush, to
// which the sums are relative, then each sum and what it lost.
template <int Count, int Stride, int R>
__device__ void start_sums(float *sums) {
#pragma unroll 1
    for (int n = 0; n < R * (1 + 2 * Count); ++n) sums[n * Stride] = n % (1 + 2 * Count) == 0 ? -INFINITY : 0.f;
}

// Adds li and Oi to the sums and sets them to 0; the last time the sums go to li and Oi. at(r, 0) is li of row r, at(r,
// n) a number of its Oi; exp(mi) is exp2(c mi).
template <int Count, int Stride, int R, class At>
__device__ void flush_sums(float *sums, const float (&mi)[R], float c, bool is_last, const At &at) {
    constexpr int Batch = Count < 17 ? Count : 17;
#pragma unroll
    for (int r = 0; r < R; ++r, sums += (1 + 2 * Count) * Stride) {
        const float m_safe = mi[r] == -INFINITY ? 0.f : mi[r], alpha = exp2_fast((sums[0] - m_safe) * c);
#pragma unroll
        for (int n0 = 0; n0 < Count; n0 += Batch) {
            float sum[Batch], lost[Batch];
#pragma unroll
            for (int n = 0; n < min(Batch, Count - n0); ++n)  // so many loads are under way together
                sum[n] = sums[(1 + 2 * (n0 + n)) * Stride], lost[n] = sums[(2 + 2 * (n0 + n)) * Stride];
#pragma unroll
            for (int n = 0; n < min(Batch, Count - n0); ++n) {
                float &x = at(r, n0 + n);
                const float y = fmaf(alpha, lost[n], x);
                x = fmaf(alpha, sum[n], y);
                lost[n] = fabsf(x) < INFINITY ? y - fmaf(-alpha, sum[n], x) : 0.f;
            }
            if (is_last) continue;
#pragma unroll
            for (int n = 0; n < min(Batch, Count - n0); ++n) {
                float &x = at(r, n0 + n);
                sums[(1 + 2 * (n0 + n)) * Stride] = x, sums[(2 + 2 * (n0 + n)) * Stride] = lost[n], x = 0.f;
            }
        }
        if (!is_last) sums[0] = mi[r];
    }
}

// 12. - 13. O = Oi / li, l and m to HBM. Oi goes through Qi's place, li and mi through the padding there, so that one
// loop stores all rows: unrolled, it took half of the compile time.
template <class Tile, class T, class Mask>
__device__ void store_rows(const Attention &a, const Block<T, Mask> &block, const float (&Oi)[Tile::R][Tile::CO][4],
                           const float (&li)[Tile::R], const float (&mi)[Tile::R], float *Qi, int tx, int ty,
                           bool aligned) {
    constexpr int D = Tile::D, TX = Tile::TX, TY = Tile::TY, QStride = Tile::QStride;
#pragma unroll
    for (int r = 0; r < Tile::R; ++r) {
        float *const row = &Qi[(ty + TY * r) * QStride];
#pragma unroll
        for (int c = 0; c < Tile::CO; ++c)
            *(float4 *)&row[4 * (tx + TX * c)] = {Oi[r][c][0], Oi[r][c][1], Oi[r][c][2], Oi[r][c][3]};
        const float l = row_sum<TX>(li[r]);
        if (tx == 0) *(float2 *)&row[D] = {l, mi[r]};
    }
    __syncwarp();
#pragma unroll 1
    for (int row = ty; row < block.rows; row += TY) {
        const float *of_row = &Qi[row * QStride];
        const int i = block.i0 + row;
        const RowEnd end = end_row(a, block, i, of_row[D], of_row[D + 1]);
        if (tx == 0) store_l_m_lse(a, block.b, block.h, i, end.l, end.m);
#pragma unroll 1
        for (int x = 4 * tx; x < D; x += 4 * TX) store_o<4>(a, block, i, x, end, &of_row[x], aligned);
    }
}

// 5. - 13. One block. shared: Tile::Floats floats. sums: Tile::SumFloats floats a block; null if the call isn't long.
template <class Tile, class T, class Mask, class Threads>
__device__ void float_block(const Attention &a, const Block<T, Mask> &block, bool aligned, float *shared, float *sums,
                            const Threads &threads) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, TX = Tile::TX, TY = Tile::TY;
    constexpr int QStride = Tile::QStride, KStride = Tile::KStride, VStride = Tile::VStride, PStride = Tile::PStride;
    constexpr int R = Tile::R, CS = Tile::CS, CO = Tile::CO;
    constexpr int AtOnce = std::is_same_v<Threads, WholeBlock> ? 4 : 1;  // fallbacks are rare: short code
    float *Qi = shared, *Kj = Qi + Br * QStride, *Vj = Kj + Bc * KStride, *Pij = Vj + Bc * VStride;

    const unsigned thread = threads.index();
    const int tx = thread % TX, ty = thread / TX;
    const auto load_K = [&](int j0) {
        load_tile<Bc, D, KStride, Tile::Threads, AtOnce>(Kj, block.K + j0 * a.k_stride.row, a.k_stride.row,
                                                         block.mask.keys.end - j0, a.d, aligned, thread);
    };

    // 8. Qi from HBM, unless no query sees a key: nothing would wait for it. Oi = 0, li = 0, mi = -inf
    if (!empty(block.seen))
        load_tile<Br, D, QStride, Tile::Threads, AtOnce>(Qi, block.Q, a.q_stride.row, block.rows, a.d, aligned, thread);
    float Oi[R][CO][4] = {}, li[R] = {}, mi[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mi[r] = -INFINITY;

    // 5. for j: the first tile begins at the first key that some query of this block sees, so no tile holds a key
    // before leftpad_k. The last tile may hold keys that no query sees; the mask hides them.
    if (!empty(block.seen)) load_K(block.seen.begin);
    const bool is_long = sums && block.seen.end - block.seen.begin > kTilesOfSum * Bc;
    float *const of_thread = sums + (int64_t)threads.block() * Tile::SumFloats + thread;
    if (is_long) start_sums<1 + 4 * CO, Tile::Threads, R>(of_thread);
    for (int j0 = block.seen.begin; j0 < block.seen.end; j0 += Bc) {
        // 6. Kj, Vj from HBM
        wait_for_tiles(threads);
        load_tile<Bc, D, VStride, Tile::Threads, AtOnce>(Vj, block.V + j0 * a.v_stride.row, a.v_stride.row,
                                                         block.mask.keys.end - j0, a.d_v, aligned, thread);

        // 9.
        float Sij[R][CS];
        multiply_QK<Tile>(Sij, Qi, Kj, tx, ty, a.d);
        wait_for_tiles(threads);
        if (j0 + Bc < block.seen.end) load_K(j0 + Bc);
        // 9. - 11.
        softmax<Tile>(a, block, j0, Sij, Oi, li, mi, Pij, tx, ty);
        __syncwarp();

        // 12. Oi += Pij Vj. Pij Vj is summed on its own first: one running sum over 8192 keys has an error of 1.6e-6,
        // this one 4e-7.
        float PV[R][CO][4] = {}, p[2][R][4], v[2][CO][4];
        const auto load_p = [&](int buffer, int j) {
#pragma unroll
            for (int r = 0; r < R; ++r) load4(p[buffer][r], &Pij[(ty + TY * r) * PStride + j]);
        };
        const auto load_v = [&](int buffer, int j) {
#pragma unroll
            for (int c = 0; c < CO; ++c) load4(v[buffer][c], &Vj[j * VStride + 4 * (tx + TX * c)]);
        };
        load_p(0, 0);
        load_v(0, 0);
#pragma unroll 1
        for (int j = 0; j < Bc; j += 8) {
#pragma unroll
            for (int y = 0; y < 8; ++y) {
                const int now = y / 4;
                if (y % 4 == 0) load_p(1 - now, j + y + 4);  // the last one reads padding, too
                load_v((y + 1) % 2, min(j + y + 1, Bc - 1));
#pragma unroll
                for (int c = 0; c < CO; ++c)
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) PV[r][c][x] = fmaf(p[now][r][y % 4], v[y % 2][c][x], PV[r][c][x]);
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < CO; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) Oi[r][c][x] += PV[r][c][x];

        const int walked = j0 + Bc - block.seen.begin;
        const bool is_last = j0 + Bc >= block.seen.end;
        if (is_long && (is_last || walked % (kTilesOfSum * Bc) == 0))
            flush_sums<1 + 4 * CO, Tile::Threads>(of_thread, mi, kLog2e, is_last, [&](int r, int n) -> float & {
                return n == 0 ? li[r] : Oi[r][(n - 1) / 4][(n - 1) % 4];
            });
    }

    // 12. - 13.
    pad_lse(a, block.b, block.h, block.i0 + block.rows, thread);
    store_rows<Tile>(a, block, Oi, li, mi, Qi, tx, ty, aligned);
}

}  // namespace
}  // namespace minimal_attn
