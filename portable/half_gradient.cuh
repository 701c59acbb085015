// half_gradient.cuh: what a warp of half_backward.cu computes of a tile of scores: P and dS, and their products.
#pragma once
#include "portable/gradient_rows.h"
#include "portable/gradient_view.cuh"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

// Own x Walk scores are a tile. Group warps share WarpRows rows: each computes Columns columns of their scores, and
// D / Group columns of their sums.
template <Pass pass_, int D_, int Own_, int Walk_, int WarpRows_, int Group_, int Columns_, int BlocksPerSM_,
          int Stages_>
struct GradientTile {
    static constexpr Pass pass = pass_;
    static constexpr int D = D_, Own = Own_, Walk = Walk_, WarpRows = WarpRows_, Group = Group_, Columns = Columns_;
    static constexpr int Threads = Own / WarpRows * Group * 32, BlocksPerSM = BlocksPerSM_, Stages = Stages_;
    static constexpr int M = WarpRows / 16, N = Columns / 8, X = D / Group / 8;  // a warp's accumulators, 16 x 8 each
    static constexpr bool walks_queries = pass == Pass::dK_dV;
    static constexpr int Products = walks_queries ? 2 : 1;                  // that end in sums
    static constexpr int OwnBytes = Own * D * 2, WalkBytes = Walk * D * 2;  // of a tile
    static constexpr int StageBytes = 2 * WalkBytes + (walks_queries ? 2 * Walk * 4 : 0);
    static constexpr int OperandBytes = Group > 1 ? Products * M * Columns * 32 : 0;  // of a warp
    static constexpr int SharedBytes = 2 * OwnBytes + Stages * StageBytes + Threads / 32 * OperandBytes;
    static constexpr int NeededBytes = BlocksPerSM * (SharedBytes + 1024) - 1024;  // that a GPU must let a block have
    static_assert(Group == 1 ? Walk % Columns == 0 : Walk == Group * Columns);
    static_assert(D / Group % 64 == 0 && kGradientRows % Walk == 0 && kGradientRows % Own == 0);
};

// 16 columns of a warp's P or dS: two accumulators side by side are an operand.
template <class Tile>
struct Operand {
    unsigned of[Tile::M][4];

    template <class T>
    __device__ void take(const float (&S)[Tile::M][Tile::N][4], int n) {
#pragma unroll
        for (int m = 0; m < Tile::M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) of[m][e] = pack<T>(S[m][n + e / 2][e % 2 * 2], S[m][n + e / 2][e % 2 * 2 + 1]);
    }
    // As the registers of the warp's lanes are, for the other warps of the group
    __device__ void leave(uint4 *shared) const {
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) shared[32 * m] = {of[m][0], of[m][1], of[m][2], of[m][3]};
    }
    __device__ void fetch(const uint4 *shared) {
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
            const uint4 x = shared[32 * m];
            of[m][0] = x.x, of[m][1] = x.y, of[m][2] = x.z, of[m][3] = x.w;
        }
    }
};

// What a thread has of its warp's rows: elements [m][.][2 * h + 0, 1] belong to row lane / 4 + 8 * (2 * m + h).
template <class Tile>
struct Sums {
    float of_dS[Tile::M][Tile::X][4] = {};                           // dKj or dQi, before the scaling
    float of_P[Tile::walks_queries ? Tile::M : 1][Tile::X][4] = {};  // dVj
};

// ------------------------------------------------------------------------------ a tile

// 11., 17. S = A B^T: WarpRows owned rows times Columns walked rows. Columns of A and B past d are zeros.
template <class T, class Tile>
__device__ void multiply(float (&S)[Tile::M][Tile::N][4], unsigned A, unsigned B) {
    constexpr int D = Tile::D;
#pragma unroll
    for (int x = 0; x < D / 16; ++x) {
        unsigned a[Tile::M][4];
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) load_matrices(a[m], (A ^ x % 4 * 32) + 2 * (x / 4 * 64 + 16 * m * D));
#pragma unroll
        for (int n = 0; n < Tile::N; n += 2) {
            unsigned b[4];
            load_matrices(b, (B ^ x % 4 * 32) + 2 * (x / 4 * 64 + 8 * n * D));
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                mma<T>(S[m][n], a[m], b[0], b[1]);
                mma<T>(S[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// 13., 20. P and dS = P o (dP - D), in the places of S and dP; c = softmax_scale * log2(e). log2_l and D are of the
// columns (in shared memory, from this thread's first) or of the rows (registers). So is m_i, in HBM; it is null if all
// m are 0. In a general kernel change_S_dP has subtracted D.
template <class T, class Tile, bool has_m, bool is_general>
__device__ void compute_P_dS(float (&S)[Tile::M][Tile::N][4], float (&dP)[Tile::M][Tile::N][4], float c,
                             const float *log2_l, const float *D, const float *m_i) {
    constexpr bool by_column = Tile::walks_queries;
#pragma unroll
    for (int n = 0; n < Tile::N; ++n) {
        float2 l_n, D_n;
        if constexpr (by_column) l_n = *(const float2 *)(log2_l + 8 * n), D_n = *(const float2 *)(D + 8 * n);
#pragma unroll
        for (int m = 0; m < Tile::M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 2 * m + e / 2;
                float &p = S[m][n][e], &ds = dP[m][n][e];
                const float l = !by_column ? log2_l[r] : e % 2 ? l_n.y : l_n.x;
                if constexpr (has_m) p = less_m<T>(p, __ldcg(m_i + (by_column ? 8 * n + e % 2 : 8 * r)), l, c);
                p = exp2_fast(fmaf(p, c, -l));
                ds = p * (is_general ? ds : subtract_D<T>(ds, !by_column ? D[r] : e % 2 ? D_n.y : D_n.x));
            }
    }
}

// Which of a thread's weights dropout keeps, a bit each.
template <class Tile>
struct Kept {
    static constexpr int Count = Tile::M * Tile::N * 4;
    unsigned bits[(Count + 31) / 32] = {};

    __device__ void add(int m, int n, int e, float Z) {
        const int x = (m * Tile::N + n) * 4 + e;
        bits[x / 32] |= (Z != 0.f) << x % 32;
    }
    // 15. P = P o Z, but for the factor of kept ones: P has a scale (kPScale), and float16 an end. dV gets the factor.
    __device__ void drop(float (&P)[Tile::M][Tile::N][4]) const {
#pragma unroll
        for (int x = 0; x < Count; ++x)
            if (!(bits[x / 32] >> x % 32 & 1)) flat(P)[x] = 0.f;
    }
};

// 11., 18., 20. In a general kernel (scores.h): S becomes what is masked, dP becomes dP o Z - D times the slope. D as
// in compute_P_dS; this thread has rows row0 + 8 r and columns column0 + 8 n + 0, 1.
template <class T, class Tile>
__device__ void change_S_dP(float (&S)[Tile::M][Tile::N][4], float (&dP)[Tile::M][Tile::N][4], Kept<Tile> &kept,
                            const Attention &a, int64_t b, int64_t h, int row0, int column0, const float *D) {
    constexpr bool by_column = Tile::walks_queries;
    if (has_softcap(a)) change<T>(a.scores, flat(S));
    if (has_dropout(a))
        for_each_Z<by_column, Tile::M, Tile::N>(
            {a, b, h}, row0, column0, [&](int m, int n, int e, float Z) { dP[m][n][e] *= Z, kept.add(m, n, e, Z); });
#pragma unroll
    for (int x = 0; x < Tile::M * Tile::N * 4; ++x) {
        const int m = x / 4 / Tile::N, n = x / 4 % Tile::N, e = x % 4;
        dP[m][n][e] = subtract_D<T>(dP[m][n][e], D[by_column ? 8 * n + e % 2 : 2 * m + e / 2]);
    }
    if (has_softcap(a)) {
#pragma unroll
        for (int x = 0; x < Tile::M * Tile::N * 4; ++x) flat(dP)[x] *= slope_of(flat(S)[x]);
    }
    add_terms<T, by_column>(a, b, h, row0, column0, S);
    if (!has_terms(a)) return;
#pragma unroll
    for (int x = 0; x < Tile::M * Tile::N * 4; ++x)
        if (flat(S)[x] == -INFINITY) flat(dP)[x] = 0.f;  // where a term hides the key dP may be inf
}

// 12. P = dS = 0 where the mask hides a score. This thread has rows row0 + 8 r and columns column0 + 8 n + 0, 1.
template <class Tile, class Mask>
__device__ void hide(float (&P)[Tile::M][Tile::N][4], float (&dS)[Tile::M][Tile::N][4],
                     const View<Tile::pass, Mask> &view, int row0, int column0) {
#pragma unroll
    for (int r = 0; r < 2 * Tile::M; ++r) {
        const auto row = view.in_tile(row0 + 8 * r, column0);
#pragma unroll
        for (int n = 0; n < Tile::N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (!row.sees(8 * n + e)) P[r / 2][n][r % 2 * 2 + e] = dS[r / 2][n][r % 2 * 2 + e] = 0.f;
    }
}

// The warp's columns of the sums += A B, where A has 16 columns and B 16 walked rows.
template <class T, class Tile>
__device__ void add_product(float (&sums)[Tile::M][Tile::X][4], const Operand<Tile> &A, unsigned B) {
#pragma unroll
    for (int x = 0; x < Tile::X / 2; ++x) {
        unsigned b[4];
        load_matrices_transposed(b, (B ^ x % 4 * 32) + 2 * (x / 4 * 64));
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
            mma<T>(sums[m][2 * x], A.of[m], b[0], b[1]);
            mma<T>(sums[m][2 * x + 1], A.of[m], b[2], b[3]);
        }
    }
}

template <class Tile>
__device__ void wait_for_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(32 * Tile::Group) : "memory");
}

// 16., 21., 22. First the warp's own columns of P and dS, then, behind wait_for_group, those of the group's other
// warps. `walked` is the address of the group's first column, `operands` that of the group's operands.
template <class T, class Tile>
__device__ void add_products(Sums<Tile> &sums, const float (&P)[Tile::M][Tile::N][4],
                             const float (&dS)[Tile::M][Tile::N][4], unsigned walked, uint4 *operands, int group,
                             int part) {
    constexpr bool has_P = Tile::walks_queries;
    constexpr int Steps = Tile::Columns / 16;
    const auto add_step = [&](int column, const Operand<Tile> &p, const Operand<Tile> &ds) {
        if constexpr (has_P) add_product<T, Tile>(sums.of_P, p, walked + Tile::WalkBytes + 2 * Tile::D * column);
        add_product<T, Tile>(sums.of_dS, ds, walked + 2 * Tile::D * column);
    };
    const auto shared = [&](int of, int step, int product) {
        return operands + ((of * Steps + step) * Tile::Products + product) * (32 * Tile::M) + threadIdx.x % 32;
    };
#pragma unroll
    for (int step = 0; step < Steps; ++step) {
        Operand<Tile> p, ds;
        ds.template take<T>(dS, 2 * step);
        if constexpr (has_P) p.template take<T>(P, 2 * step);
        if constexpr (Tile::Group > 1) ds.leave(shared(part, step, 0));
        if constexpr (Tile::Group > 1 && has_P) p.leave(shared(part, step, 1));
        add_step(part * Tile::Columns + 16 * step, p, ds);
    }
    if constexpr (Tile::Group > 1) {
        wait_for_group<Tile>(group);
#pragma unroll 1
        for (int other = 1; other < Tile::Group; ++other) {
            const int of = (part + other) % Tile::Group;
#pragma unroll
            for (int step = 0; step < Steps; ++step) {
                Operand<Tile> p, ds;
                ds.fetch(shared(of, step, 0));
                if constexpr (has_P) p.fetch(shared(of, step, 1));
                add_step(of * Tile::Columns + 16 * step, p, ds);
            }
        }
    }
}

}  // namespace
}  // namespace minimal_attn
