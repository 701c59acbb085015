// half_backward.cu: the backward pass in float16 and bfloat16 on the tensor cores, by mma.sync (mma.cuh). Sums are float32.
// docs/backward.md has the budget. Two passes of one kernel:
//
//     pass     | a block owns | and walks                                  | computes
//     dK_dV    | Kj, Vj       | Qi, dOi of all heads that share the key    | Sij^T = Kj Qi^T, dPij^T = Vj dOi^T, dVj += Pij^T dOi,
//              |              | head                                       | dKj += dSij^T Qi
//     dQ       | Qi, dOi      | Kj, Vj                                     | Sij = Qi Kj^T, dPij = dOi Vj^T, dQi += dSij Kj
//
// with Pij = exp2(c Sij - lse), c = softmax_scale * log2(e), and dSij = Pij o (dPij - D); lse and D are gradient_rows.h's.
// So one code has both: rows of S are rows that the block owns, columns are rows that it walks. No result is shared by
// two blocks: no atomics, the same bits on every run. It takes 7 products where one pass with atomics takes 5.
//
//     role        | warps              | registers                  | does
//     every warp  | Tile::Threads / 32 | sums, S and dP, operands:  | loads a part of each tile; computes S and dP of WarpRows
//                 |                    | up to 255                  | rows and Columns columns, and 1 / Group of the rows' sums
//
//     shared memory   | size              | written                        | read
//     own tiles       | 2 x Own x D       | once; the results in the end   | by the warps of the rows
//     walked tiles    | 2 x Walk x D each | while the last is computed     | by all
//     lse, D (dK_dV)  | 2 x Walk floats   | likewise                       | likewise
//     fragments       | P, dS of a warp   | after S and dP                 | by the other warps of the group
//
//     barrier                           | arrives and waits | then
//     wait_for_tiles                    | the block         | the next walked tiles have arrived; all warps have read the last
//                                       |                   | ones and the fragments, so these may be overwritten
//     __syncthreads, one Stage          | the block         | all warps have read the walked tiles
//     wait_for_group, Group > 1         | a group of warps  | P and dS of all columns are there

#include "portable/common.cuh"
#include "portable/gradient_rows.h"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

enum class Pass { dK_dV, dQ };

// Own x Walk scores are a tile. Group warps share WarpRows rows: each computes Columns of their scores, and D / Group
// columns of their sums.
template <Pass pass_, int D_, int Own_, int Walk_, int WarpRows_, int Group_, int Columns_, int BlocksPerSM_,
          int Stages_>
struct GradientTile {
    static constexpr Pass pass = pass_;
    static constexpr int D = D_, Own = Own_, Walk = Walk_, WarpRows = WarpRows_, Group = Group_, Columns = Columns_;
    static constexpr int BlocksPerSM = BlocksPerSM_, Stages = Stages_;
    static constexpr int Threads = Own / WarpRows * Group * 32;
    static constexpr int M = WarpRows / 16, N = Columns / 8, X = D / Group / 8;  // a warp's accumulators, 16 x 8 each
    static constexpr bool walks_queries = pass == Pass::dK_dV;
    static constexpr int Products = walks_queries ? 2 : 1;  // that end in sums
    static constexpr int OwnBytes = 2 * Own * D * 2;
    static constexpr int TileBytes = Walk * D * 2, StageBytes = 2 * TileBytes + (walks_queries ? 2 * Walk * 4 : 0);
    static constexpr int Fragments = M * Columns / 16, FragmentBytes = Group > 1 ? Products * Fragments * 512 : 0;
    static constexpr int SharedBytes = OwnBytes + Stages * StageBytes + Threads / 32 * FragmentBytes;
    static constexpr int NeededBytes = BlocksPerSM * (SharedBytes + 1024) - 1024;  // that a GPU must let a block have
    static_assert(Group == 1 ? Walk % Columns == 0 : Walk == Group * Columns);
    static_assert(D / Group % 64 == 0 && kGradientRows % Walk == 0 && StageBytes % 128 == 0);
};

// ------------------------------------------------------------------------------ the mask

// Rows of a tensor.
using Interval = Keys;

// Queries that see key j.
__device__ inline Interval queries_of_key(const BandOf<int> &band, int Nq, int j) {
    const int begin = clamp(j - band.last, 0, Nq);
    return {begin, clamp(j - band.first + 1, begin, Nq)};
}

// What the rows of one side of the scores see of the other side. Rows outside `rows` see nothing and may hold NaN.
template <Pass pass>
struct View {
    BandOf<int> band;
    int Nq;
    Interval rows, columns;  // that see, or are seen
    __device__ View(const Attention &a, int64_t b) : band(narrow(band_of(a, b))), Nq(a.Nq) {
        Interval queries = {0, 0}, keys = band.keys;
        if (!empty(keys)) {
            queries.begin = queries_of_key(band, Nq, keys.begin).begin;
            queries.end = queries_of_key(band, Nq, keys.end - 1).end;
        }
        rows = pass == Pass::dQ ? queries : keys, columns = pass == Pass::dQ ? keys : queries;
    }
    __device__ Interval of_row(int row) const {
        return pass == Pass::dQ ? keys_of_row(band, row) : queries_of_key(band, Nq, row);
    }
    // Columns that some of row0 <= row < row1 see.
    __device__ Interval of_any(int row0, int row1) const {
        const int first = max(row0, rows.begin), last = min(row1, rows.end) - 1;
        return first > last ? Interval{0, 0} : Interval{of_row(first).begin, of_row(last).end};
    }
    __device__ Interval of_all(int row0, int row1) const {
        if (row0 < rows.begin || row1 > rows.end) return {0, 0};
        return {of_row(row1 - 1).begin, of_row(row0).end};
    }
};

// ------------------------------------------------------------------------------ products

// S = A B^T: rows of the warp times Columns walked rows. Columns past d are zeros.
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

// The sums of the warp's rows and columns += A B, where A has 16 columns, in registers, and B 16 walked rows.
template <class T, class Tile>
__device__ void add_product(float (&sums)[Tile::M][Tile::X][4], const unsigned (&a)[Tile::M][4], unsigned B) {
#pragma unroll
    for (int x = 0; x < Tile::X / 2; ++x) {
        unsigned b[4];
        load_matrices_transposed(b, (B ^ x % 4 * 32) + 2 * (x / 4 * 64));
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
            mma<T>(sums[m][2 * x], a[m], b[0], b[1]);
            mma<T>(sums[m][2 * x + 1], a[m], b[2], b[3]);
        }
    }
}

// Operands of the products: 16 columns of P or dS, two accumulators side by side.
template <class T, class Tile>
__device__ void operand(unsigned (&a)[Tile::M][4], const float (&S)[Tile::M][Tile::N][4], int n) {
#pragma unroll
    for (int m = 0; m < Tile::M; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[m][e] = pack<T>(S[m][n + e / 2][e % 2 * 2], S[m][n + e / 2][e % 2 * 2 + 1]);
}

// ------------------------------------------------------------------------------ a block

// What a thread keeps: elements [m][.][2 * h + 0, 1] belong to row lane / 4 + 8 * r of the warp, r = 2 * m + h.
template <class Tile>
struct Sums {
    float of_dS[Tile::M][Tile::X][4] = {};                           // dK or dQ, before the scaling
    float of_P[Tile::walks_queries ? Tile::M : 1][Tile::X][4] = {};  // dV
};

// P and dS of a warp's scores, in place of S and dP. lse and D belong to the columns or to the rows.
template <class Tile>
__device__ void compute_P_dS(float (&S)[Tile::M][Tile::N][4], float (&dP)[Tile::M][Tile::N][4], float c,
                             const float *lse, const float *D, int lane) {
#pragma unroll
    for (int n = 0; n < Tile::N; ++n) {
        float2 lse_n, D_n;
        if constexpr (Tile::walks_queries)
            lse_n = *(const float2 *)(lse + 8 * n + lane % 4 * 2), D_n = *(const float2 *)(D + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int m = 0; m < Tile::M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 2 * m + e / 2;
                const float lse_e = !Tile::walks_queries ? lse[r] : e % 2 ? lse_n.y : lse_n.x;
                const float D_e = !Tile::walks_queries ? D[r] : e % 2 ? D_n.y : D_n.x;
                S[m][n][e] = exp2_fast(fmaf(S[m][n][e], c, -lse_e));
                dP[m][n][e] = S[m][n][e] * (dP[m][n][e] - D_e);
            }
    }
}

// P = dS = 0 where the mask hides a score. This thread has rows row0 + 8 r and columns column0 + 8 n + 0, 1.
template <class Tile, class View>
__device__ void hide(float (&P)[Tile::M][Tile::N][4], float (&dS)[Tile::M][Tile::N][4], const View &view, int row0,
                     int column0) {
#pragma unroll
    for (int r = 0; r < 2 * Tile::M; ++r) {
        const int row = row0 + 8 * r;
        const bool sees = view.rows.begin <= row && row < view.rows.end;
        const Interval seen = view.of_row(row);
        const int begin = seen.begin - column0, end = sees ? seen.end - column0 : begin;
#pragma unroll
        for (int n = 0; n < Tile::N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * n + e < begin || 8 * n + e >= end)
                    P[r / 2][n][r % 2 * 2 + e] = dS[r / 2][n][r % 2 * 2 + e] = 0.f;
    }
}

// The warps of a group.
template <class Tile>
__device__ void wait_for_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(32 * Tile::Group) : "memory");
}

// The products that end in sums. Each warp has an operand for its own columns. It leaves the operand in shared memory, as
// the registers of its lanes are, for the other warps of the group.
template <class T, class Tile>
__device__ void add_products(Sums<Tile> &sums, const float (&P)[Tile::M][Tile::N][4],
                             const float (&dS)[Tile::M][Tile::N][4], unsigned walked, uint4 *fragments, int group,
                             int part, int lane) {
    constexpr int M = Tile::M, Steps = Tile::Columns / 16, D = Tile::D;
    constexpr bool has_P = Tile::walks_queries;
    const auto fragment = [&](int of, int step, int m, int product) {
        return fragments + (((of * Steps + step) * M + m) * Tile::Products + product) * 32 + lane;
    };
#pragma unroll
    for (int step = 0; step < Steps; ++step) {
        unsigned p[M][4], ds[M][4];
        operand<T, Tile>(ds, dS, 2 * step);
        if constexpr (has_P) operand<T, Tile>(p, P, 2 * step);
        if constexpr (Tile::Group > 1) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                *fragment(part, step, m, 0) = *(const uint4 *)ds[m];
                if constexpr (has_P) *fragment(part, step, m, 1) = *(const uint4 *)p[m];
            }
        }
        const unsigned rows = walked + 2 * D * (part * Tile::Columns + 16 * step);
        if constexpr (has_P) add_product<T, Tile>(sums.of_P, p, rows + Tile::TileBytes);
        add_product<T, Tile>(sums.of_dS, ds, rows);
    }
    if constexpr (Tile::Group > 1) {
        wait_for_group<Tile>(group);
#pragma unroll 1
        for (int other = 1; other < Tile::Group; ++other) {
            const int of = (part + other) % Tile::Group;
#pragma unroll
            for (int step = 0; step < Steps; ++step) {
                unsigned p[M][4], ds[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    *(uint4 *)ds[m] = *fragment(of, step, m, 0);
                    if constexpr (has_P) *(uint4 *)p[m] = *fragment(of, step, m, 1);
                }
                const unsigned rows = walked + 2 * D * (of * Tile::Columns + 16 * step);
                if constexpr (has_P) add_product<T, Tile>(sums.of_P, p, rows + Tile::TileBytes);
                add_product<T, Tile>(sums.of_dS, ds, rows);
            }
        }
    }
}

// A result: rows of one head.
struct Result {
    void *first;
    int64_t stride;
    __device__ Result(void *tensor, const Strides &s, Dtype dtype, int64_t b, int64_t h, int row)
        : first((char *)tensor + (b * s.batch + h * s.head + row * s.row) * (dtype == Dtype::float32 ? 4 : 2)),
          stride(s.row) {}
};

// factor * sums to HBM. The usual case stages them in `tile`, which no warp reads any more: then a thread writes 16 bytes.
template <class T, class Tile>
__device__ void store_sums(const Gradient &g, const float (&sums)[Tile::M][Tile::X][4], float factor,
                           const Result &result, int count, T *tile, int warp_row, int part, int lane, bool aligned) {
    constexpr int D = Tile::D, Width = D / Tile::Group, Chunks = Width / 8, RowsAtOnce = 32 / Chunks;
    const bool is_staged = aligned && g.out_dtype != Dtype::float32;
#pragma unroll
    for (int r = 0; r < 2 * Tile::M; ++r) {
        const int row = warp_row + lane / 4 + 8 * r;
#pragma unroll
        for (int x = 0; x < Tile::X; ++x) {
            const float *sum = &sums[r / 2][x][r % 2 * 2];
            const float two[2] = {factor * sum[0], factor * sum[1]};
            const int column = part * Width + 8 * x + lane % 4 * 2;
            if (is_staged)
                *(unsigned *)(tile + swizzle<D, T>(row, part * Chunks + x) + lane % 4 * 2) = pack<T>(two[0], two[1]);
            else if (row < count && column < g.a.d && g.out_dtype == Dtype::float32)
                store<2>((float *)result.first + row * result.stride + column, two, aligned, g.a.d - column);
            else if (row < count && column < g.a.d)
                store<2>((T *)result.first + row * result.stride + column, two, aligned, g.a.d - column);
        }
    }
    if (!is_staged) return;
    __syncwarp();
    const int row0 = warp_row + lane / Chunks, chunk = part * Chunks + lane % Chunks;
    T *const to = (T *)result.first + row0 * result.stride + 8 * chunk;
    const int rows = 8 * chunk < g.a.d ? count - row0 : 0;
#pragma unroll
    for (int row = 0; row < Tile::WarpRows; row += RowsAtOnce)
        if (row < rows)
            *(uint4 *)(to + row * result.stride) = *(const uint4 *)(tile + swizzle<D, T>(row0 + row, chunk));
}

template <class T, class Tile>
__device__ void gradient_block(const Gradient &g, const GradientRows &rows, int64_t index, bool aligned) {
    constexpr int D = Tile::D, Own = Tile::Own, Walk = Tile::Walk, Threads = Tile::Threads, Group = Tile::Group;
    constexpr bool walks_queries = Tile::walks_queries;
    const Attention &a = g.a;
    extern __shared__ __align__(128) unsigned char shared[];
    T *const own = (T *)shared;
    unsigned char *const stages = shared + Tile::OwnBytes, *const all_fragments =
                                                               stages + Tile::Stages * Tile::StageBytes;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int group = warp / Group, part = warp % Group, warp_row = group * Tile::WarpRows;
    uint4 *const fragments = (uint4 *)(all_fragments + group * Group * Tile::FragmentBytes);

    // Which rows the block owns. The ones that see most, if causal, start first: the first keys, the last queries
    const int N = walks_queries ? a.Nk : a.Nq, tiles = (N + Own - 1) / Own;
    const int64_t heads = walks_queries ? a.Hkv : a.Hq, head = index / tiles, b = head / heads, h = head % heads;
    const int tile = (int)(index % tiles), row0 = (walks_queries ? tile : tiles - 1 - tile) * Own;
    const int shared_heads = (int)(a.Hq / a.Hkv);

    const View<Tile::pass> view(a, b);
    const Interval seen = view.of_any(row0, row0 + Own);
    const int first = seen.begin / Walk * Walk;
    const int row_warp = row0 + warp_row;
    const Interval seen_by_warp = view.of_any(row_warp, row_warp + Tile::WarpRows);
    const Interval by_all = view.of_all(row_warp, row_warp + Tile::WarpRows);

    const auto at = [](const void *tensor, const Strides &s, int64_t b, int64_t h, int64_t row) {
        return (const T *)tensor + b * s.batch + h * s.head + row * s.row;
    };
    const auto load_keys = [&](auto count, T *K, T *V, int64_t h_kv, int j0, Interval keys) {
        constexpr int Rows = decltype(count)::value;
        load_swizzled<Rows, D, Threads>(K, at(a.k, a.k_stride, b, h_kv, j0), a.k_stride.row, keys.end - j0, a.d,
                                        aligned, keys.begin - j0);
        load_swizzled<Rows, D, Threads>(V, at(a.v, a.v_stride, b, h_kv, j0), a.v_stride.row, keys.end - j0, a.d,
                                        aligned, keys.begin - j0);
    };
    const auto load_queries = [&](auto count, T *Q, T *dO, int64_t h, int i0, Interval queries) {
        constexpr int Rows = decltype(count)::value;
        load_swizzled<Rows, D, Threads>(Q, at(a.q, a.q_stride, b, h, i0), a.q_stride.row, queries.end - i0, a.d,
                                        aligned, queries.begin - i0);
        load_swizzled<Rows, D, Threads>(dO, at(g.do_, g.do_stride, b, h, i0), g.do_stride.row, queries.end - i0, a.d,
                                        aligned, queries.begin - i0);
    };
    using OwnRows = std::integral_constant<int, Own>;
    using WalkRows = std::integral_constant<int, Walk>;
    // Walked tiles from row column0 on, of the n-th head that the block walks
    const auto load_walked = [&](int n, int column0, int stage) {
        T *const to = (T *)(stages + stage * Tile::StageBytes);
        if constexpr (walks_queries) {
            const int64_t h_q = h * shared_heads + n;
            load_queries(WalkRows(), to, to + Walk * D, h_q, column0, view.columns);
            const float *const from =
                (threadIdx.x < Walk / 4 ? rows.lse : rows.D) + (b * a.Hq + h_q) * rows.head_stride;
            if (threadIdx.x < Walk / 2)
                copy16((unsigned)__cvta_generic_to_shared(to + 2 * Walk * D) + 16 * threadIdx.x,
                       from + column0 + threadIdx.x % (Walk / 4) * 4, true);
        } else {
            load_keys(WalkRows(), to, to + Walk * D, h / shared_heads, column0, view.columns);
        }
    };

    if constexpr (walks_queries)
        load_keys(OwnRows(), own, own + Own * D, h, row0, view.rows);
    else
        load_queries(OwnRows(), own, own + Own * D, h, row0, view.rows);
    if (Tile::Stages == 2 && !empty(seen)) load_walked(0, first, 0);
    float row_lse[2 * Tile::M], row_D[2 * Tile::M];
    if constexpr (!walks_queries) {
        const int64_t row = (b * a.Hq + h) * rows.head_stride + row_warp + lane / 4;
#pragma unroll
        for (int r = 0; r < 2 * Tile::M; ++r) row_lse[r] = rows.lse[row + 8 * r], row_D[r] = rows.D[row + 8 * r];
    }

    // A: matrices 1 and 3 lie 8 rows below. B: matrices 2 and 3 do; transposed B: matrices 1 and 3.
    const unsigned A = lane_address<D>(own, warp_row + lane % 16, lane / 16);
    const unsigned B0 = lane_address<D>((T *)stages, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned transposed0 = lane_address<D>((T *)stages, lane % 16, lane / 16) + part * (D / Group * 2);
    const float c = a.softmax_scale * kLog2e;
    Sums<Tile> sums;
    int n = 0, column0 = empty(seen) ? INT_MAX : first;
    const int walked_heads = walks_queries ? shared_heads : 1;
    for (int stage = 0; n < walked_heads && column0 < seen.end; stage ^= Tile::Stages - 1) {
        int next_n = n, next = column0 + Walk;
        if (next >= seen.end) ++next_n, next = first;
        if (Tile::Stages == 1) {
            __syncthreads();
            load_walked(n, column0, 0);
        }
        wait_for_tiles();
        if (Tile::Stages == 2 && next_n < walked_heads) load_walked(next_n, next, stage ^ 1);
        const unsigned bytes = stage * Tile::StageBytes;
        if (column0 < seen_by_warp.end && column0 + Walk > seen_by_warp.begin) {
#pragma unroll 1
            for (int group0 = 0; group0 < Walk; group0 += Group * Tile::Columns) {
                const int c0 = group0 + part * Tile::Columns, column = column0 + c0;
                float S[Tile::M][Tile::N][4] = {}, dP[Tile::M][Tile::N][4] = {};
                multiply<T, Tile>(S, A, B0 + bytes + 2 * D * c0);
                multiply<T, Tile>(dP, A + 2 * Own * D, B0 + bytes + Tile::TileBytes + 2 * D * c0);
                const float *const lse = (float *)(stages + bytes + 2 * Tile::TileBytes) + c0;
                compute_P_dS<Tile>(S, dP, c, walks_queries ? lse : row_lse, walks_queries ? lse + Walk : row_D, lane);
                if (column < by_all.begin || column + Tile::Columns > by_all.end)
                    hide<Tile>(S, dP, view, row_warp + lane / 4, column + lane % 4 * 2);
                add_products<T, Tile>(sums, S, dP, transposed0 + bytes + 2 * D * group0, fragments, group, part, lane);
            }
        }
        n = next_n, column0 = next;
    }
    wait_for_tiles();  // own tiles are overwritten
    const int count = N - row0;
    if constexpr (walks_queries) {
        store_sums<T, Tile>(g, sums.of_P, 1.f, Result(g.dv, g.dv_stride, g.out_dtype, b, h, row0), count, own + Own * D,
                            warp_row, part, lane, aligned);
        store_sums<T, Tile>(g, sums.of_dS, a.softmax_scale, Result(g.dk, g.dk_stride, g.out_dtype, b, h, row0), count,
                            own, warp_row, part, lane, aligned);
    } else {
        store_sums<T, Tile>(g, sums.of_dS, a.softmax_scale, Result(g.dq, g.dq_stride, g.out_dtype, b, h, row0), count,
                            own, warp_row, part, lane, aligned);
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    gradient_kernel(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, int64_t first_block,
                    bool aligned) {
    if constexpr (on_tensor_cores<T>()) gradient_block<T, Tile>(g, rows, first_block + blockIdx.x, aligned);
}

// ------------------------------------------------------------------------------ tiles, plan and launch

template <int Own, int Walk, int WarpRows, int Group, int Columns, int BlocksPerSM, int Stages>
struct Shape {
    template <Pass pass, int D>
    using Tile = GradientTile<pass, D, Own, Walk, WarpRows, Group, Columns, BlocksPerSM, Stages>;
};

// A tile for each pass.
template <int D, class OfKeys, class OfQueries>
struct Tiles {
    using Keys = typename OfKeys::template Tile<Pass::dK_dV, D>;
    using Queries = typename OfQueries::template Tile<Pass::dQ, D>;
    static constexpr int NeededBytes = std::max(Keys::NeededBytes, Queries::NeededBytes);
};

// In order of preference: rows that a block owns and walks at a time; rows of a warp, warps of a group, columns of a warp;
// blocks on a multiprocessor, stages. First the pass dK_dV, then dQ. Beside them: shared memory, and why it is here.
struct GradientKernels {
    using D64 = TileList<Tiles<64, Shape<128, 64, 32, 1, 32, 2, 2>, Shape<128, 64, 32, 1, 64, 2, 2>>,
                         Tiles<64, Shape<128, 32, 32, 1, 32, 2, 2>, Shape<128, 32, 32, 1, 32, 2, 2>>>;
    using D128 = TileList<Tiles<128, Shape<128, 64, 32, 2, 32, 1, 2>, Shape<128, 32, 32, 1, 32, 2, 2>>,
                          Tiles<128, Shape<64, 32, 32, 2, 16, 1, 2>, Shape<64, 32, 32, 1, 32, 1, 2>>,
                          Tiles<128, Shape<32, 32, 32, 2, 16, 1, 2>, Shape<64, 32, 32, 1, 32, 1, 2>>>;
    using D256 = TileList<Tiles<256, Shape<64, 64, 32, 4, 16, 1, 2>, Shape<128, 32, 32, 2, 16, 1, 2>>,
                          Tiles<256, Shape<32, 32, 16, 2, 16, 1, 1>, Shape<32, 32, 16, 2, 16, 1, 2>>,
                          Tiles<256, Shape<16, 32, 16, 2, 16, 1, 1>, Shape<16, 32, 16, 2, 16, 1, 1>>>;
};

template <class Tiles, class... Smaller>
Plan plan_tiles(const Gradient &g, const Device &device, TileList<Tiles, Smaller...>, int index = 0) {
    if constexpr (sizeof...(Smaller) > 0)
        if (Tiles::NeededBytes > device.shared_memory) return plan_tiles(g, device, TileList<Smaller...>(), index + 1);
    using Tile = typename Tiles::Keys;
    const int64_t blocks = g.a.B * g.a.Hkv * ((g.a.Nk + Tile::Own - 1) / Tile::Own);
    return {portable::kHalf,       index, Tile::Walk, Tile::Own, Tile::D, blocks, Tile::Threads, Tile::SharedBytes,
            gradient_rows_bytes(g)};
}

template <class T, class Tile>
cudaError_t launch_pass(const Gradient &g, const GradientRows &rows, int64_t heads, int64_t N, bool aligned,
                        CUstream_st *stream) {
    const auto kernel = gradient_kernel<T, Tile>;
    cudaError_t error = allow_shared_memory(kernel, Tile::SharedBytes);
    const int64_t blocks = g.a.B * heads * ((N + Tile::Own - 1) / Tile::Own), most = (int64_t(1) << 31) - 1;
    for (int64_t first = 0; first < blocks && error == cudaSuccess; first += most) {
        kernel<<<(int)std::min(blocks - first, most), Tile::Threads, Tile::SharedBytes, stream>>>(g, rows, first,
                                                                                                  aligned);
        error = cudaGetLastError();
    }
    return error;
}

template <class T>
const char *launch_passes(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Attention &a = g.a;
    const GradientRows rows = gradient_rows_in(g, workspace);
    if (const char *error = launch_gradient_rows(g, rows, stream)) return error;
    const int64_t out = element_size(g.out_dtype);
    const bool aligned = is_aligned(a.q, a.q_stride, 2, a.d) && is_aligned(a.k, a.k_stride, 2, a.d) &&
                         is_aligned(a.v, a.v_stride, 2, a.d) && is_aligned(g.do_, g.do_stride, 2, a.d) &&
                         is_aligned(g.dq, g.dq_stride, out, a.d) && is_aligned(g.dk, g.dk_stride, out, a.d) &&
                         is_aligned(g.dv, g.dv_stride, out, a.d);
    return why_not(with_tiles_for<GradientKernels>(a.d, [&](auto list) {
        return with_tile(plan.tile, list, [&](auto tiles) {
            using Tiles = decltype(tiles);
            const cudaError_t error = launch_pass<T, typename Tiles::Keys>(g, rows, a.Hkv, a.Nk, aligned, stream);
            return error ? error : launch_pass<T, typename Tiles::Queries>(g, rows, a.Hq, a.Nq, aligned, stream);
        });
    }));
}

}  // namespace

namespace portable {

Plan plan_half_backward(const Gradient &g, const Device &device) {
    return with_tiles_for<GradientKernels>(g.a.d, [&](auto list) { return plan_tiles(g, device, list); });
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return g.a.dtype == Dtype::float16 ? launch_passes<__half>(g, plan, workspace, stream)
                                       : launch_passes<__nv_bfloat16>(g, plan, workspace, stream);
}

}  // namespace portable
}  // namespace minimal_attn
