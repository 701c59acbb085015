// tf32_backward.cu: the gradients of attention in float32, on the tensor cores as in tf32.cu. docs/backward.md has the
// budget and what was tried.
//
//     P = exp(S - lse),  dS = P o (dP - D)        lse and D: gradient_rows.h
//
// A block owns a tile of keys, Kj and Vj, and walks the queries that see some of them, the last first, in all query
// heads that share the key head. It keeps dKj and dVj in registers, and adds each dQi to dQ in HBM when it is its turn
// (ordered_dq.cuh).
//
//     role        | warps              | registers               | does
//     every warp  | Tile::Threads / 32 | dKj, dVj; Sij^T, dPij^T | loads a part of each tile; computes WarpKeys rows of
//                 |                    | or dQi: up to 255       | Sij^T, dPij^T, dKj, dVj, and a part of each dQi
//
//     shared memory | size         | written               | read
//     Kj, Vj        | Bc x D each  | once                  | Kj by all; Vj by the warp of its rows
//     Qi, dOi       | Br x D each  | for each tile         | by all
//     dSij          | Br x Bc      | by the warps of Kj    | by all
//     lse_i, Di     | Br each      | with dOi              | by all
//     block         | 1            | once                  | for each tile of queries, since registers are scarce
//
//     barrier                        | of       | then
//     wait_for_tiles, for each tile  | block    | Qi, dOi, lse_i and Di have arrived; all warps have read dSij
//     __syncthreads, after dVj       | block    | dSij is complete; dOi, lse_i, Di are read: the next ones may load
//     __syncthreads, after dKj       | block    | all warps have read Qi: the next one overwrites it
//     wait_for_turn, in HBM          | one warp | this warp of the block of the keys before has added its part of dQi
//
// General kernels: scores.h has what changes a score, dropout.h has Zij, the factor of a weight.
#include "portable/gradient_rows.h"
#include "portable/gradient_view.cuh"
#include "portable/ordered_dq.cuh"
#include "portable/tf32.cuh"

namespace minimal_attn {
namespace {

// A warp has WarpKeys keys of the tile: all of their scores, and WarpColumns columns of dKj and dVj. For dQi it has
// WarpQueries queries, and as many columns as there are for each warp.
template <int D_, int Br_, int Bc_, int WarpKeys_, int WarpColumns_, int WarpQueries_, int BlocksPerSM_>
struct BackwardTile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, WarpKeys = WarpKeys_, WarpColumns = WarpColumns_;
    static constexpr int WarpQueries = WarpQueries_, BlocksPerSM = BlocksPerSM_;
    static constexpr int KeyWarps = Bc / WarpKeys, Warps = KeyWarps * (D / WarpColumns), Threads = 32 * Warps;
    static constexpr int QueryWarps = Br / WarpQueries, WarpColumnsOfdQ = D / (Warps / QueryWarps);
    static constexpr int M = WarpKeys / 16, N = Br / 8, X = WarpColumns / 8;  // a warp's accumulators, 16 x 8 each
    static constexpr int MQ = WarpQueries / 16, XQ = WarpColumnsOfdQ / 8;     // of dQi
    static constexpr int XAtOnce = 4 / M, XQAtOnce = std::min(4 / MQ, XQ);    // of these, read at once
    static constexpr int Groups = D == 64 ? 2 : 1;  // of which so many are summed side by side
    static constexpr int Floats = 2 * (Bc + Br) * D + Br * Bc + 2 * Br;
    static constexpr int SharedBytes = Floats * 4 + 128;                           // and KeyBlock
    static constexpr int RangeBytes = Br * sizeof(Keys);                           // more of it, with ranges
    static constexpr int NeededBytes = BlocksPerSM * (SharedBytes + 1024) - 1024;  // that a GPU must let a block have
    static_assert(Br % 16 == 0 && Bc % 32 == 0 && X % XAtOnce == 0 && XQ % XQAtOnce == 0);
};

constexpr int kQueriesOfSum = 32;        // queries or keys whose products are one sum on tensor cores
constexpr int kTilesOfRegisterSum = 64;  // tiles of queries after which dKj and dVj are added to HBM

// The 2 XAtOnce neighbouring numbers of a row that a group of accumulators of multiply_columns has.
template <int XAtOnce>
__device__ void row_of_group(float (&row)[2 * XAtOnce], const float (*group)[4], int r, float scale) {
#pragma unroll
    for (int y = 0; y < 2 * XAtOnce; ++y) row[y] = scale * group[y % XAtOnce][r * 2 + y / XAtOnce];
}

// dK or dV of the block's keys, this warp's part, to HBM. If `adds`, an earlier part of the sum is there.
template <class Tile, class Mask>
__device__ void store_gradient(const KeyBlock<Mask> &block, const float (&sum)[Tile::M][Tile::X][4], void *tensor,
                               const Strides &stride, int d, int row0, int column0, float scale, bool adds,
                               bool aligned) {
    constexpr int XAtOnce = Tile::XAtOnce;
    const int lane = opaque(threadIdx.x) % 32;
    float *const head = (float *)tensor + block.b * stride.batch + block.h_kv * stride.head;
#pragma unroll
    for (int r = 0; r < 2 * Tile::M; ++r) {
        const int j = block.j0 + row0 + lane / 4 + 8 * r;
        if (j >= block.j1) continue;
#pragma unroll
        for (int x = 0; x < Tile::X; x += XAtOnce) {
            float row[2 * XAtOnce];
            row_of_group<XAtOnce>(row, &sum[r / 2][x], r % 2, scale);
#pragma unroll
            for (int y = 0; y < 2 * XAtOnce; y += 4) {
                const int column = column0 + 8 * x + lane % 4 * 2 * XAtOnce + y;
                if (column >= d) continue;
                float *const to = head + j * stride.row + column;
                const int count = min(4, d - column);
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (adds && c < count) row[y + c] += to[c];
                store<4>(to, &row[y], aligned, count);
            }
        }
    }
}

// Whether one of Count rows is large. All lanes of a warp ask.
template <int Count>
__device__ bool any_is_large(const float *lse) {
    bool any = false;
    for (int row = threadIdx.x % 32; row < Count; row += 32) any |= lse[row] == kLarge;
    return __any_sync(~0u, any);
}

// S^T and dP^T of a warp's keys and the queries of a tile. All lanes have the addresses of their rows.
struct Operands {
    unsigned K, V, Q, dO;
};
template <int D, int M, int N>
__device__ void multiply_scores(float (&S)[M][N][4], float (&dP)[M][N][4], const Operands &of, const Attention &a) {
    multiply_rows<D>(S, of.K, of.Q, a.d);
    multiply_rows<D>(dP, of.V, of.dO, a.d_v);
}

// min(x, bound), and NaN where x is.
__device__ float at_most(float bound, float x) { return x > bound ? bound : x; }

// Which pairs a thread has: of head h in batch b, queries from i and keys from j on.
struct Pairs {
    int64_t b, h;
    int i, j;
    __device__ float term(const Attention &a, int query, int key) const {
        return TermsOfRow(a, b, h, i + query).of_key<float>(j + key);
    }
    __device__ float Z(const DropoutOfHead &dropout, int query, int key) const {
        return dropout.Zij(i + query, j + key);
    }
};

// What large_scores returns, through memory: so S and dP of the loop stay in registers.
template <class Tile>
struct LargeScores {
    float S[Tile::M][Tile::N][4], dP[Tile::M][Tile::N][4];
};

// multiply_scores for a tile with large rows. In their columns S becomes log2(P) / c, from S as Score<float>, and D is
// subtracted from dP: there Di is 0. A general kernel also changes S, and multiplies dP - D by the slopes. `rows`
// points to query i0. Inlined, the code pushed the loop out of the instruction cache: (16, 12, 64, 64) was 13 % slower.
template <class Tile, bool is_general>
__device__ __noinline__ void large_scores(LargeScores<Tile> &results, const Operands &operands, const float *lse_i,
                                          float c, const LargeRow *rows, const float *K_tile, const float *Q_tile,
                                          int warp_key, const Attention &a, const Pairs &of) {
    float S[Tile::M][Tile::N][4] = {}, dP[Tile::M][Tile::N][4] = {};
    multiply_scores<Tile::D>(S, dP, operands, a);
    Score<float> exact[Tile::M][Tile::N][4] = {};
    if constexpr (kFastFloat64) multiply_rows_double<Tile::D>(exact, K_tile, warp_key, Q_tile, 0, a.d);
#pragma unroll
    for (int x = 0; x < Tile::M * Tile::N * 4; ++x) {
        const int m = x / 4 / Tile::N, n = x / 4 % Tile::N, e = x % 4;
        const int row = 8 * n + threadIdx.x % 4 * 2 + e % 2;
        float s = S[m][n][e], dp = dP[m][n][e];
        if (lse_i[row] == kLarge) {
            const LargeRow *const large = rows + row;
            Score<float> exact_s = kFastFloat64 ? exact[m][n][e] : (Score<float>)s;
            if constexpr (is_general) exact_s = capped(a, exact_s);
            const float slope = is_general ? slope_in(a, (float)exact_s) : 1.f;
            if (is_general && has_dropout(a)) dp *= of.Z({a, of.b, of.h}, 8 * n + e % 2, 16 * m + e / 2 * 8);
            if (is_general && has_terms(a)) exact_s = whole(a, exact_s, of.term(a, 8 * n + e % 2, 16 * m + e / 2 * 8));
            const float from_m = exact_s - (Score<float>)__ldcg(&large->m);
            s = at_most(0.f, fmaf(from_m, c, -__ldcg(&large->log2_l))) / c;
            dp = (fmaf(dp, kUndoTruncation, -__ldcg(&large->D)) - __ldcg(&large->D_low)) / kUndoTruncation;
            if constexpr (is_general) dp *= slope;
        }
        results.S[m][n][e] = s, results.dP[m][n][e] = dp;
    }
}

// Which queries see a key, counted from query i0 + row0. With ranges shared memory has those of the tile's queries.
template <class Mask>
struct QueriesOfKey {
    int begin, end;
    __device__ QueriesOfKey(const BandOf<int> &band, int key, int i0, int row0, const Keys *) {
        const bool exists = band.keys.begin <= key && key < band.keys.end;
        begin = key - band.last - i0 - row0, end = exists ? key - band.first + 1 - i0 - row0 : INT_MIN;
    }
    __device__ bool see(int i) const { return !(i < begin || i >= end); }
};
template <>
struct QueriesOfKey<Ranges> {
    const Keys *of_rows;
    int key;
    __device__ QueriesOfKey(const Ranges &, int key, int, int row0, const Keys *of_tile)
        : of_rows(of_tile + row0), key(key) {}
    __device__ bool see(int i) const { return of_rows[i].begin <= key && key < of_rows[i].end; }
};
template <>
struct QueriesOfKey<General> : QueriesOfKey<Ranges> {
    using QueriesOfKey<Ranges>::QueriesOfKey;
};

// Sij^T and dPij^T become Pij^T o Zij^T and dSij^T: the warp's keys from j0 on, the queries from i0 on. dSij goes to
// shared memory, too, with the keys of each eight in the order 0, 2, 4, 6, 1, 3, 5, 7.
template <class Tile, class Mask>
__device__ void compute_P_dS(float (&S)[Tile::M][Tile::N][4], float (&dP)[Tile::M][Tile::N][4], const float *lse_i,
                             const float *Di, const float *dS_tile, float c, const Mask &mask, const Keys *of_tile,
                             int i0, int j0, int warp_key, bool masked, const Attention &a, const Pairs &of) {
    const int lane = opaque(threadIdx.x) % 32, row0 = lane % 4 * 2;  // this thread has rows row0 + 8 n + 0, 1 of Sij
    const DropoutOfHead dropout(a, of.b, of.h);
    unsigned to[2];
#pragma unroll
    for (int y = 0; y < 2; ++y)
        to[y] = lane_address<Tile::Bc>(dS_tile, row0 + y, warp_key / 4 + lane / 4 % 2) + lane / 8 * 4;
#pragma unroll
    for (int m = 0; m < Tile::M; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = j0 + lane / 4 + 16 * m + 8 * r;
            const QueriesOfKey<Mask> queries(mask, key, i0, row0, of_tile);
#pragma unroll
            for (int n = 0; n < Tile::N; ++n) {
                const float2 lse = *(const float2 *)(lse_i + row0 + 8 * n), D = *(const float2 *)(Di + row0 + 8 * n);
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    float &s = S[m][n][2 * r + y], &dp = dP[m][n][2 * r + y], slope = 1.f;
                    const bool drops = kIsGeneral<Mask> && has_dropout(a);
                    const float Z = drops ? of.Z(dropout, 8 * n + y, 16 * m + 8 * r) : 1.f;
                    if (kIsGeneral<Mask> && (y ? lse.y : lse.x) != kLarge) {
                        s = capped(a, s), slope = slope_in(a, s);
                        if (drops) dp *= Z;
                        if (has_terms(a)) s = whole(a, s, of.term(a, 8 * n + y, 16 * m + 8 * r));
                    }
                    const bool is_hidden = kIsGeneral<Mask> && s == -INFINITY;  // then dP may be inf
                    s = exp2_fast(fmaf(s, c, -(y ? lse.y : lse.x)));
                    if (masked && !queries.see(8 * n + y)) s = 0.f;
                    dp = s * fmaf(dp, kUndoTruncation, -(y ? D.y : D.x));
                    if constexpr (kIsGeneral<Mask>)
                        dp = is_hidden || (masked && !queries.see(8 * n + y)) ? 0.f : dp * slope;
                    if (drops) s *= Z;
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"((to[y] ^ (4 * m + 2 * r) * 16) + 8 * n * Tile::Bc * 4),
                                 "f"(dp)
                                 : "memory");
                }
            }
        }
}

// dVj += Pij^T dOi, or dKj += dSij^T Qi
template <class Tile>
__device__ void add_product(float (&sum)[Tile::M][Tile::X][4], const float (&A)[Tile::M][Tile::N][4], const float *tile,
                            int column0, int d) {
    constexpr int D = Tile::D, XAtOnce = Tile::XAtOnce, K = std::min(kQueriesOfSum / 8, Tile::N);
    const int lane = opaque(threadIdx.x) % 32;
    const unsigned B[2] = {lane_address_columns<D, XAtOnce>(tile, lane, 0, column0),
                           lane_address_columns<D, XAtOnce>(tile, lane, 1, column0)};
#pragma unroll
    for (int x0 = 0; x0 < Tile::X; x0 += Tile::Groups * XAtOnce) {
        if (column0 + 8 * x0 >= d) break;
#pragma unroll
        for (int n0 = 0; n0 < Tile::N; n0 += K) {
            const unsigned rows[2] = {B[0] + 8 * n0 * D * 4, B[1] + 8 * n0 * D * 4};
            multiply_columns<D, Tile::M, K, XAtOnce, Tile::Groups, false>(
                rows, x0,
                [&](int k, int m, unsigned (&hi)[4], unsigned (&lo)[4]) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) split(A[m][n0 + k][e % 2 * 2 + e / 2], hi[e], lo[e]);
                },
                [&](int m, int x, int e, float value) { sum[m][x0 + x][e] += value; });
        }
    }
}

// dQ += softmax_scale dSij Kj: the warp's part of a tile that begins at dQ and has `rows` rows
template <class Tile>
__device__ void add_dQ(const Attention &a, const float *dS_tile, const float *K_tile, float *dQ, int64_t stride,
                       int rows, int warp, bool aligned, const int *added, int turn) {
    constexpr int D = Tile::D, Bc = Tile::Bc, MQ = Tile::MQ, XAtOnce = Tile::XQAtOnce,
                  Groups = std::min(Tile::Groups, Tile::XQ / XAtOnce), K = kQueriesOfSum / 8;
    const int lane = opaque(threadIdx.x) % 32, row0 = warp % Tile::QueryWarps * Tile::WarpQueries;
    const int column0 = warp / Tile::QueryWarps * Tile::WarpColumnsOfdQ;
    const unsigned dS = lane_address<Bc>(dS_tile, row0 + lane % 16, lane / 16);
    const unsigned Kj[2] = {lane_address_columns<D, XAtOnce>(K_tile, lane, 0, column0),
                            lane_address_columns<D, XAtOnce>(K_tile, lane, 1, column0)};
#pragma unroll
    for (int x0 = 0; x0 < Tile::XQ; x0 += Groups * XAtOnce) {
        float sum[MQ][Groups * XAtOnce][4] = {};
        if (column0 + 8 * x0 < a.d)
#pragma unroll 1
            for (int key = 0; key < Bc; key += kQueriesOfSum) {
                const unsigned rows_K[2] = {Kj[0] + key * D * 4, Kj[1] + key * D * 4};
                multiply_columns<D, MQ, K, XAtOnce, Groups, false>(
                    rows_K, x0,
                    [&](int k, int m, unsigned (&hi)[4], unsigned (&lo)[4]) {
                        unsigned A[4];
                        load_matrices(A, (dS ^ 32 * k) + key * 4 + 16 * m * Bc * 4);
#pragma unroll
                        for (int e = 0; e < 4; ++e) split(__uint_as_float(A[e]), hi[e], lo[e]);
                    },
                    [&](int m, int x, int e, float value) { sum[m][x][e] += value; });
            }
        if (x0 == 0) wait_for_turn(added, turn);
#pragma unroll
        for (int r = 0; r < 2 * MQ; ++r) {
            const int i = row0 + lane / 4 + 8 * r;
            if (i >= rows) continue;
#pragma unroll
            for (int x = 0; x < Groups * XAtOnce; x += XAtOnce) {
                float row[2 * XAtOnce];
                row_of_group<XAtOnce>(row, &sum[r / 2][x], r % 2, a.scores.scale * kUndoTruncation);
#pragma unroll
                for (int y = 0; y < 2 * XAtOnce; y += 4) {
                    const int column = column0 + 8 * (x0 + x) + lane % 4 * 2 * XAtOnce + y;
                    if (column < a.d) add_to_dQ(dQ + i * stride + column, &row[y], aligned, min(4, a.d - column));
                }
            }
        }
    }
}

template <class Tile, class Mask>
__device__ void backward_block(const Gradient &g, const GradientRows &gradient_rows, const Turns &turns, bool aligned) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, Threads = Tile::Threads, M = Tile::M, N = Tile::N;
    constexpr bool is_ranges = kIsRanges<Mask>;
    let_next_kernel_start();
    wait_for_kernel_before();
    const Attention &a = g.a;
    extern __shared__ __align__(128) float shared[];
    float *const K_tile = shared, *const V_tile = K_tile + Bc * D, *const Q_tile = V_tile + Bc * D;
    float *const dO_tile = Q_tile + Br * D, *const dS_tile = dO_tile + Br * D;
    float *const lse_i = dS_tile + Br * Bc, *const Di = lse_i + Br;
    Keys *const of_tile = (Keys *)(Di + Br);  // of each query, with ranges
    KeyBlock<Mask> &block = *(KeyBlock<Mask> *)(Di + Br + (is_ranges ? 2 * Br : 0));
    if (threadIdx.x == 0) block = key_block_of<Mask>(a, atomicAdd(turns.next_block, 1), Br, Bc);
    __syncthreads();
    zero_padding(a, block, Bc, g.dk, g.dk_stride, a.d);
    zero_padding(a, block, Bc, g.dv, g.dv_stride, a.d_v);
    if (block.j0 >= block.j1) return;

    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int warp_key = warp % Tile::KeyWarps * Tile::WarpKeys, column0 = warp / Tile::KeyWarps * Tile::WarpColumns;
    const float c = a.softmax_scale * kLog2e;

    // Step s is tile tiles.end - 1 - s % n of query head h0 + s / n, where n tiles see a key of this tile.
    const int n = block.tiles.end - block.tiles.begin, group = (int)(a.Hq / a.Hkv), steps = n * group;
    const auto head_of = [&](int step) { return block.h_kv * group + step / n; };
    const auto tile_of = [&](int step) { return block.tiles.end - 1 - step % n; };
    // Of a band the next step is step + 1, and the loop's code is as short as that.
    int next_step = 0, index = -1;
    const auto next_of = [&](int step) { return is_ranges ? next_step : step + 1; };
    const auto nth = [&](int step) { return is_ranges ? index : step; };
    const auto load = [&](float *tile, const void *tensor, const Strides &stride, int columns, int step) {
        const int i0 = block.queries.begin + tile_of(step) * Br;
        const float *const rows =
            (const float *)tensor + block.b * stride.batch + head_of(step) * stride.head + i0 * stride.row;
        // Rows of blind queries may hold NaN. Mostly there are none, and no load waits for ranges.
        const auto is_read = [&, all_are = !tile_has_blind_query(block.mask, i0)](int row) {
            return all_are || !empty(keys_of_row(block.mask, i0 + row));
        };
        const int64_t at = (block.b * a.Hq + head_of(step)) * gradient_rows.head_stride + i0;
        load_swizzled<Br, D, Threads>(tile, rows, stride.row, block.queries.end - i0, columns, aligned, 0,
                                      read_by_terms<Mask>(a, gradient_rows.log2_l + at, is_read));
    };
    const auto load_Q = [&](int step) { load(Q_tile, a.q, a.q_stride, a.d, step); };
    const auto load_dO = [&](int step) {
        load(dO_tile, g.do_, g.do_stride, a.d_v, step);
        const int i0 = block.queries.begin + tile_of(step) * Br;
        const int64_t at = (block.b * a.Hq + head_of(step)) * gradient_rows.head_stride + i0;
        for (int row = threadIdx.x; row < Br; row += Threads) {
            const bool exists = i0 + row < block.queries.end;
            const int source = exists ? row : 0;
            __pipeline_memcpy_async(lse_i + row, gradient_rows.log2_l + at + source, 4, exists ? 0 : 4);
            __pipeline_memcpy_async(Di + row, gradient_rows.D + at + source, 4, exists ? 0 : 4);
            if constexpr (is_ranges) __pipeline_memcpy_async(of_tile + row, block.mask.rows + i0 + row, sizeof(Keys));
        }
    };
    const auto load_keys = [&](float *tile, const void *tensor, const Strides &stride, int columns) {
        const float *const rows =
            (const float *)tensor + block.b * stride.batch + block.h_kv * stride.head + block.j0 * stride.row;
        load_swizzled<Bc, D, Threads>(tile, rows, stride.row, block.j1 - block.j0, columns, aligned);
    };
    const int first = step_from<Br>(block, 0, steps, tile_of);
    if (first < steps)
        load_keys(K_tile, a.k, a.k_stride, a.d), load_keys(V_tile, a.v, a.v_stride, a.d_v), load_Q(first),
            load_dO(first);

    const bool may_be_large = __ldcg(gradient_rows.any_large);
    float dK[M][Tile::X][4] = {}, dV[M][Tile::X][4] = {};
    int *last_added = nullptr;
    for (int step = first; step < steps; step = next_of(step)) {
        if (is_ranges) next_step = step_from<Br>(block, step + 1, steps, tile_of), ++index;
        const int i0 = block.queries.begin + tile_of(step) * Br, i1 = min(i0 + Br, block.queries.end);
        wait_for_tiles();
        if (last_added) pass_turn(last_added);  // here, since its additions have arrived: passing waits for them

        // Whether the warp's keys are seen, and by all of the queries
        const Keys seen_by_any = keys_of_any(block.mask, i0, i1), seen_by_all = keys_of_all(block.mask, i0, i1);
        const int j0 = block.j0 + warp_key;
        const bool is_seen = j0 < seen_by_any.end && j0 + Tile::WarpKeys > seen_by_any.begin;
        // Behind the last query dO = 0. But a term may make P inf there, and inf times 0 is NaN: so it is hidden.
        const bool is_short = kIsGeneral<Mask> && i1 < i0 + Br;
        const bool masked = is_short || j0 < seen_by_all.begin || j0 + Tile::WarpKeys > seen_by_all.end;
        const Pairs of = {block.b, head_of(step), i0 + (int)threadIdx.x % 4 * 2, j0 + (int)threadIdx.x % 32 / 4};
        float S[M][N][4] = {}, dP[M][N][4] = {};
        if (is_seen) {
            // A is rows of Kj or Vj, B rows of Qi or dOi
            const int lane = opaque(threadIdx.x) % 32, A_row = warp_key + lane % 16, B_row = lane / 16 * 8 + lane % 8;
            const Operands operands = {
                lane_address<D>(K_tile, A_row, lane / 16), lane_address<D>(V_tile, A_row, lane / 16),
                lane_address<D>(Q_tile, B_row, lane / 8 % 2), lane_address<D>(dO_tile, B_row, lane / 8 % 2)};
            if (__builtin_expect(may_be_large && any_is_large<Br>(lse_i), false)) {
                const int64_t row = (block.b * a.Hq + head_of(step)) * gradient_rows.head_stride + i0;
                LargeScores<Tile> results;
                large_scores<Tile, kIsGeneral<Mask>>(results, operands, lse_i, c, gradient_rows.large + row, K_tile,
                                                     Q_tile, warp_key, a, of);
#pragma unroll
                for (int x = 0; x < M * N * 4; ++x) {
                    S[x / 4 / N][x / 4 % N][x % 4] = results.S[x / 4 / N][x / 4 % N][x % 4];
                    dP[x / 4 / N][x / 4 % N][x % 4] = results.dP[x / 4 / N][x / 4 % N][x % 4];
                }
            } else {
                multiply_scores<D>(S, dP, operands, a);
            }
        }
        compute_P_dS<Tile>(S, dP, lse_i, Di, dS_tile, c, block.mask, of_tile, i0, j0, warp_key, masked, a, of);
        if (is_seen) add_product<Tile>(dV, S, dO_tile, column0, a.d_v);
        __syncthreads();
        if (next_of(step) < steps) load_dO(next_of(step));
        if (is_seen) add_product<Tile>(dK, dP, Q_tile, column0, a.d);
        __syncthreads();
        if (next_of(step) < steps) load_Q(next_of(step));

        // dQi. Tiles of keys before this one that see it have their turns first
        const int64_t h = head_of(step), Tr = (a.Nq + Br - 1) / Br;
        float *const dQ = (float *)g.dq + block.b * g.dq_stride.batch + h * g.dq_stride.head + i0 * g.dq_stride.row;
        int *const added = turns.added + ((block.b * a.Hq + h) * Tr + tile_of(step)) * Tile::Warps + warp;
        const int turn = block.index - (seen_by_any.begin - block.mask.keys.begin) / Bc;
        add_dQ<Tile>(a, dS_tile, K_tile, dQ, g.dq_stride.row, i1 - i0, warp, aligned, added, turn);
        last_added = added;

        const bool is_last = next_of(step) == steps;
        if (is_last || (nth(step) + 1) % kTilesOfRegisterSum == 0) {
            const bool adds = nth(step) >= kTilesOfRegisterSum;
            store_gradient<Tile>(block, dK, g.dk, g.dk_stride, a.d, warp_key, column0, a.scores.scale * kUndoTruncation,
                                 adds, aligned);
            store_gradient<Tile>(block, dV, g.dv, g.dv_stride, a.d_v, warp_key, column0, kUndoTruncation, adds,
                                 aligned);
#pragma unroll
            for (int x = 0; x < M * Tile::X * 4; ++x)
                dK[x / 4 / Tile::X][x / 4 % Tile::X][x % 4] = dV[x / 4 / Tile::X][x / 4 % Tile::X][x % 4] = 0.f;
        }
    }
    if (last_added) pass_turn(last_added);
    if (first == steps) {
        store_gradient<Tile>(block, dK, g.dk, g.dk_stride, a.d, warp_key, column0, 1.f, false, aligned);
        store_gradient<Tile>(block, dV, g.dv, g.dv_stride, a.d_v, warp_key, column0, 1.f, false, aligned);
    }
}

struct BackwardKernels;

template <class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    tf32_backward_kernel(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows,
                         const __grid_constant__ Turns turns, bool aligned) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    if constexpr (is_needed<BackwardKernels, Tile>())
        backward_block<Tile, Mask>(g, rows, turns, aligned);
    else
        __trap();
#endif
}

// Tiles in order of preference: D, Br, Bc; keys, columns and queries of a warp; blocks on a multiprocessor. Beside
// each: shared memory, and TFLOP/s on an H100 at 16k tokens and N 2048. An A100 has 163 KB, an RTX 3090 or L4 99.
struct BackwardKernels {
    static constexpr bool LastForFewQueries = false;
    using D64 = TileList<BackwardTile<64, 64, 64, 16, 64, 32, 2>,      // 81 KB: 45
                         BackwardTile<64, 32, 128, 16, 64, 16, 1>>;    // 96 KB; one fits 99 KB
    using D128 = TileList<BackwardTile<128, 32, 64, 16, 128, 32, 2>,   // 104 KB: 48
                          BackwardTile<128, 16, 128, 16, 128, 16, 1>,  // 152 KB: 37; fits an A100
                          BackwardTile<128, 16, 64, 16, 128, 16, 1>>;  // 84 KB; fits 99 KB
    using D256 = TileList<BackwardTile<256, 32, 64, 16, 128, 32, 1>,   // 200 KB: 35
                          BackwardTile<256, 32, 32, 16, 128, 32, 1>,   // 132 KB: 25; fits an A100
                          BackwardTile<256, 16, 32, 16, 128, 16, 1>>;  // 98 KB; fits 99 KB
    using D512 = D256;                                                 // never taken (portable.h)
};

template <class Tile, class... Smaller>
Plan plan_backward(const Gradient &g, const Device &device, TileList<Tile, Smaller...>, int index = 0) {
    const Attention &a = g.a;
    if constexpr (sizeof...(Smaller) > 0)
        if (Tile::NeededBytes + (has_ranges(a) ? Tile::BlocksPerSM * Tile::RangeBytes : 0) > device.shared_memory)
            return plan_backward(g, device, TileList<Smaller...>(), index + 1);
    const int64_t blocks = a.B * a.Hkv * ((a.Nk + Tile::Bc - 1) / Tile::Bc);
    const int64_t turns = a.B * a.Hq * ((a.Nq + Tile::Br - 1) / Tile::Br) * Tile::Warps;
    const int64_t workspace = gradient_rows_bytes(g) + 256 + turns * (int64_t)sizeof(int);
    return {portable::kTf32Backward,
            index,
            Tile::Br,
            Tile::Bc,
            Tile::D,
            blocks,
            Tile::Threads,
            Tile::SharedBytes + (has_ranges(a) ? Tile::RangeBytes : 0),
            workspace,
            device.multiprocessors};
}

template <class Tile>
cudaError_t launch_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Attention &a = g.a;
    const auto is = [&](const void *tensor, const Strides &stride, int d) { return is_aligned(tensor, stride, 4, d); };
    const bool aligned = has_aligned_inputs(a) && is(g.do_, g.do_stride, a.d_v) && is(g.dq, g.dq_stride, a.d) &&
                         is(g.dk, g.dk_stride, a.d) && is(g.dv, g.dv_stride, a.d_v);
    char *const rest = (char *)workspace + gradient_rows_bytes(g);
    const int64_t count = a.B * a.Hq * ((a.Nq + Tile::Br - 1) / Tile::Br) * Tile::Warps;
    const Turns turns = {(unsigned long long *)rest, (int *)(rest + 256), count};
    // It doesn't overlap: beside the end of large_rows.cu its blocks spread unevenly, and it took twice as long.
    begin_kernel<<<4 * plan.multiprocessors, 256, 0, stream>>>(g, turns);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    return launch_all(plan.grid, kMostBlocks, [&](int64_t, int grid) {  // blocks number themselves
        return with_mask_and_scores(a, [&](auto mask) {
            return launch_overlapping(tf32_backward_kernel<Tile, decltype(mask)>, grid, Tile::Threads,
                                      plan.shared_memory, stream, g, gradient_rows_in(g, workspace), turns, aligned);
        });
    });
}

}  // namespace

namespace portable {

Plan plan_tf32_backward(const Gradient &g, const Device &device) {
    return with_tiles_for<BackwardKernels>(most_columns(g.a),
                                           [&](auto tiles) { return plan_backward(g, device, tiles); });
}

const char *launch_tf32_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const GradientRows rows = gradient_rows_in(g, workspace);
    const char *error = launch_gradient_rows(g, rows, stream);
    if (!error) error = launch_large_rows(g, rows, stream);
    if (error) return error;
    return why_not(with_tiles_for<BackwardKernels>(most_columns(g.a), [&](auto tiles) {
        return with_tile(plan.tile, tiles,
                         [&](auto tile) { return launch_backward<decltype(tile)>(g, plan, workspace, stream); });
    }));
}

}  // namespace portable
}  // namespace minimal_attn
