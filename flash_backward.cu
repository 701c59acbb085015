// flash_backward.cu: Algorithm 4 of FlashAttention (arXiv:2205.14135), the backward pass, as it is printed. Read it
// after flash.cu: comments that begin with a number are the paper's steps.
//
//     P = exp(S - lse), S = softmax_scale * Q K^T     computed again, a tile of Br queries x Bc keys at a time
//     dV = P^T dO,  dP = dO V^T,  D = rowsum(dO o O),  dS = P o (dP - D)           o: number by number
//     dQ = softmax_scale * dS K,  dK = softmax_scale * dS^T Q
//
// Launch. Grid: one block of 256 threads for each key head of each batch. It walks the query heads that share this key
// head. So dK and dV are sums of one block: no atomics, and the same bits on every run.
//
// What lives where. HBM keeps Q, K, V, O, dO, lse, a RowState for each row and, between two tiles, dQ in float32. The
// shared memory of a block has (float32 except m_i; D is d rounded up to a multiple of 4):
//     Qi, dOi               Br x D     rows are padded by 1 number, so that rows and columns are read without conflicts
//     Kj, Vj, dKj, dVj      Bc x D     likewise
//     Pij; slopes, then dSij Br x Bc   likewise
//     m_i, in float64       Br         of RowState, as log_l_i, Di and Di_low are
//     log_l_i, Di, Di_low   Br each
// For d = 64 on an H100 these are 131 KB: Br = Bc = 64.
//
// Which barrier orders what:
//     in normalize_rows tiles are loaded; Sij, m_i, Pij are complete     -> the next lines read them
//     before step 6     normalize_rows is done, RowStates are in HBM     -> step 10 reads them
//     before step 7     step 5 is done, dKj and dVj are written to HBM   -> they are initialised again
//     before step 10    all reads of the last Qi, dOi, m_i, Pij, dSij    -> these are overwritten
//     after step 10     Kj, Vj, Qi, dOi, m_i are loaded                  -> step 11 reads them
//     after step 13     Pij is complete                                  -> step 20 reads it
//     after step 19     Di is complete                                   -> step 20 reads it
//     after step 15     Pij o Zij and dSij are complete                  -> steps 16, 21 and 22 read them
//     before step 24    dKj and dVj are complete                         -> they are read
//     before step 26    dQ is complete                                   -> it is read
// In steps 16, 21 and 22 the same thread always reads and writes the same numbers of dVj, dQ and dKj.
//
// The contract (flash.h) adds to the paper:
//     a mask (steps 6, 9, 12), scores that change (11, 20: scores.h), the gradient of lse (step 19), any Nq, Nk and d,
//     several query heads for one key head
// One number lse = m + log l for each row replaces l and m. Where it is large, normalize_rows computes m and l again.
// Step 1, the state of a random generator, is the seed of dropout.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device.h"
#include "flash.h"
#include "ranges.h"
#include "scores.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = 8;  // threads that share a row of dOi o Oi, neighbours in a warp

MINIMAL_ATTN_HOST_DEVICE constexpr int up_to_4s(int n) { return (n + 3) / 4 * 4; }

// What step 2 chooses, and how the shared memory of a block is laid out for it.
struct Tiles {
    int Br, Bc, D;
    MINIMAL_ATTN_HOST_DEVICE int floats() const { return (2 * Br + 4 * Bc) * (D + 1) + 2 * Br * (Bc + 1) + 5 * Br; }
};

// The rows of one head of a (B, H, N, d) tensor in HBM.
template <class T>
struct HeadRows {
    T *first;
    int64_t stride;
    __device__ HeadRows(const void *tensor, const Strides &s, int64_t b, int64_t h)
        : first((T *)tensor + b * s.batch + h * s.head), stride(s.row) {}
    __device__ T &at(int64_t i, int x) const { return first[i * stride + x]; }
};

// Rows of dQ, dK or dV, in T or float32.
template <class T>
struct Results {
    HeadRows<T> halves;
    HeadRows<float> floats;
    bool are_floats;
    __device__ Results(void *tensor, const Strides &s, int64_t b, int64_t h, Dtype dtype)
        : halves(tensor, s, b, h), floats(tensor, s, b, h), are_floats(dtype == Dtype::float32) {}
    __device__ void set(int64_t i, int x, float value) const {
        if (are_floats)
            floats.at(i, x) = value;
        else
            halves.at(i, x) = (T)value;
    }
};

// ------------------------------------------------------------------------------ how the threads share a tile

// A matrix in shared memory.
struct Matrix {
    float *first;
    int row, column;  // strides
    __device__ float &at(int r, int c) const { return first[r * row + c * column]; }
    __device__ Matrix transposed() const { return {first, column, row}; }
};

// use(row, column) for each number of rows x columns, in one thread each.
template <class Use>
__device__ void for_numbers(int rows, int columns, const Use &use) {
    for (int64_t at = threadIdx.x; at < (int64_t)rows * columns; at += kThreads) use(at / columns, at % columns);
}

// use(row, column, number) for each number of the product A B, a sum of n terms. A thread computes patches of 4 x 4.
// Their rows and columns are far apart, so that neighbouring threads read neighbours. Sums of 32 terms are added up:
// the error of one long sum would be several times as large.
template <class Sum = float, class Use>
__device__ void multiply(int rows, int columns, int n, const Matrix &A, const Matrix &B, const Use &use) {
    const int down = (rows + 3) / 4, across = (columns + 3) / 4;
    for (int patch = threadIdx.x; patch < down * across; patch += kThreads) {
        const int row = patch / across, column = patch % across;
        Sum AB[4][4] = {};
#pragma unroll 1
        for (int y0 = 0; y0 < n; y0 += 32) {
            Sum sum[4][4] = {}, a[4], b[4];
#pragma unroll 2
            for (int y = y0; y < min(y0 + 32, n); ++y) {
#pragma unroll
                for (int r = 0; r < 4; ++r) a[r] = A.at(row + r * down, y), b[r] = B.at(y, column + r * across);
                for (int r = 0; r < 4; ++r)
                    for (int c = 0; c < 4; ++c) sum[r][c] = fma(a[r], b[c], sum[r][c]);
            }
            for (int r = 0; r < 4; ++r)
                for (int c = 0; c < 4; ++c) AB[r][c] += sum[r][c];
        }
#pragma unroll
        for (int rc = 0; rc < 16; ++rc) {
            const int at_row = row + rc / 4 * down, at_column = column + rc % 4 * across;
            if (at_row < rows && at_column < columns) use(at_row, at_column, AB[rc / 4][rc % 4]);
        }
    }
}

// ------------------------------------------------------------------------------ rows with a large lse

// The tiles of a block in shared memory. Pij is first Sij, dSij first dPij. m_i is float64.
struct Shared {
    double *m_i;
    Matrix Qi, dOi, Kj, Vj, dKj, dVj, Pij, dSij;
    float *log_l_i, *Di, *Di_low;
};

// In HBM, of a row: P = exp(softmax_scale (S - m) - log_l), with m a score before the scaling. Where lse is not large,
// m = 0 and log_l is lse. D + D_low is what normalize_rows has computed; for other rows step 19 computes D.
struct RowState {
    double m;
    float log_l, D, D_low;
};

template <class T>
__device__ void load(const Matrix &tile, const HeadRows<const T> &tensor, int first, int rows, int d) {
    for_numbers(up_to_4s(rows), d,
                [&](int row, int x) { tile.at(row, x) = row < rows ? (float)tensor.at(first + row, x) : 0.f; });
}

// Whether terms hide all keys of a row from it (scores.h).
__device__ bool is_blind(const Gradient &g, int64_t at) { return has_terms(g.a) && g.lse[at] == -INFINITY; }

// Sets the RowState of the rows i0 <= i < i0 + rows of a query head where lse is large: steps 5 to 11 of Algorithm 1
// over all keys, and D = rowsum(P o dP). Scores and sums are float64: rounding a large score to float32 changes P too
// much.
template <class T>
__device__ void normalize_rows(const Gradient &g, const AnyMask &mask, const HeadRows<const T> (&Q_dO_K_V)[4],
                               int64_t b, int64_t h, int i0, int rows, int Bc, const Shared &shared, const float *lse,
                               const float *dlse, RowState *states) {
    constexpr int kGroups = kThreads / kRowLanes, kRows = 64 / kGroups;  // of lanes that share a row; rows of a group
    const Attention &a = g.a;
    const HeadRows<const T> &Q = Q_dO_K_V[0], &dO = Q_dO_K_V[1], &K = Q_dO_K_V[2], &V = Q_dO_K_V[3];
    const int group = threadIdx.x / kRowLanes, lane = threadIdx.x % kRowLanes;
    const double scale = a.softmax_scale;
    double m[kRows], l[kRows] = {}, D[kRows] = {};
    for (double &x : m) x = -INFINITY;  // of sign * score
    const float sign = scale < 0. ? -1.f : 1.f;
    const auto sum_of_group = [](double x) {
        const unsigned lanes = ((1u << kRowLanes) - 1) << threadIdx.x % 32 / kRowLanes * kRowLanes;
        for (int other = 1; other < kRowLanes; other *= 2) x += __shfl_xor_sync(lanes, x, other);
        return x;
    };
    // use(row, n) for each of this thread's rows, the n-th; in all lanes of a warp
    const auto for_rows = [&](const auto &use) {
        for (int n = 0; n < kRows; ++n)
            if (n * kGroups < up_to_4s(rows)) use(group + n * kGroups, n);
    };
    const auto is_seen = [&](int row, int key) {
        const Keys seen = keys_of_row(mask, i0 + row);
        return seen.begin <= key && key < seen.end;
    };
    load(shared.Qi, Q, i0, rows, a.d), load(shared.dOi, dO, i0, rows, a.d_v);
    const Keys seen = keys_of_any(mask, i0, i0 + rows);
    for (int j0 = seen.begin; j0 < seen.end; j0 += Bc) {
        const int keys = min(Bc, seen.end - j0);
        load(shared.Kj, K, j0, keys, a.d), load(shared.Vj, V, j0, keys, a.d_v);
        __syncthreads();
        multiply(rows, keys, a.d_v, shared.dOi, shared.Vj.transposed(),
                 [&](int row, int key, float dP) { shared.dSij.at(row, key) = dP; });
        multiply(rows, keys, a.d, shared.Qi, shared.Kj.transposed(), [&](int row, int key, float QK) {
            const float S = sign * unscaled<T>(a, QK, b, h, i0 + row, j0 + key);
            shared.Pij.at(row, key) = is_seen(row, j0 + key) ? S : -INFINITY;
        });
        __syncthreads();
        const auto max_of_row = [&](int row) {
            float largest = -INFINITY;
            for (int key = lane; key < keys && row < rows; key += kRowLanes)
                largest = fmaxf(largest, shared.Pij.at(row, key));
            return row_max<kRowLanes>(largest);
        };
        for_rows([&](int row, int) {
            const float near_m = max_of_row(row);
            if (lane == 0 && row < rows) shared.m_i[row] = near_m == -INFINITY ? 0. : near_m;
        });
        __syncthreads();
        // Again in float64, less the maximum of the float32 scores: the difference is small enough for a float32.
        // Scores beyond 1e9 need a second subtraction, of what the float64 maximum is more.
        for (int subtraction = 0; subtraction < 2; ++subtraction) {
            multiply<double>(rows, keys, a.d, shared.Qi, shared.Kj.transposed(), [&](int row, int key, double QK) {
                const double S = sign * unscaled<T>(a, QK, b, h, i0 + row, j0 + key) - shared.m_i[row];
                shared.Pij.at(row, key) = is_seen(row, j0 + key) ? (float)S : -INFINITY;
            });
            __syncthreads();
            for_rows([&](int row, int) {
                const float more = max_of_row(row);
                if (subtraction == 0 && lane == 0 && more > -INFINITY) shared.m_i[row] += more;
            });
            __syncthreads();
        }
        const DropoutOfHead dropout(a, b, h);
        for_rows([&](int row, int n) {
            const float mij = max_of_row(row);
            if (mij == -INFINITY) return;  // all lanes of the row
            double sum = 0., sum_dP = 0.;
            for (int key = lane; key < keys && row < rows; key += kRowLanes) {
                const float S = shared.Pij.at(row, key), p = expf(sign * a.softmax_scale * (S - mij));
                sum += p;
                if (S > -INFINITY)  // a hidden dP may be NaN
                    sum_dP +=
                        (double)(has_dropout(a) ? p * dropout.Zij(i0 + row, j0 + key) : p) * shared.dSij.at(row, key);
            }
            const double of_tile = shared.m_i[row] + mij, m_new = fmax(m[n], of_tile);
            const double alpha = exp(sign * scale * (m[n] - m_new)), beta = exp(sign * scale * (of_tile - m_new));
            m[n] = m_new, l[n] = alpha * l[n] + beta * sum_of_group(sum);
            D[n] = alpha * D[n] + beta * sum_of_group(sum_dP);
        });
    }
    for_rows([&](int row, int n) {
        if (lane > 0 || row >= rows || l[n] == 0. || !is_large(a, lse[row])) return;
        const double D_of_row = D[n] / l[n] - (dlse ? dlse[row] : 0.f);
        states[row] = {sign * m[n], (float)log(l[n]), (float)D_of_row, (float)(D_of_row - (float)D_of_row)};
    });
}

// Computes the RowStates of rows i0 <= i < i0 + rows of query head h. `states` points to the head's first RowState. All
// threads of the block call it.
template <class T>
__device__ void set_row_states(const Gradient &g, const AnyMask &mask, int64_t b, int64_t h, int i0, int rows, int Bc,
                               const Shared &shared, RowState *states) {
    const Attention &a = g.a;
    const int64_t h_kv = h / (a.Hq / a.Hkv), at = (b * a.Hq + h) * a.Nq + i0;
    bool any_large = false;
    for (int row = threadIdx.x; row < rows; row += kThreads) {
        const float lse = is_blind(g, at + row) ? INFINITY : g.lse[at + row];  // then P = 0
        const bool large = is_large(a, lse);
        any_large |= large;
        // All members are named: else nvcc leaves some unset (findings/nvcc_conditional_aggregate.sh)
        states[i0 + row] = large ? RowState{(double)lse / a.softmax_scale, 0.f, 0.f, 0.f} : RowState{0., lse, 0.f, 0.f};
    }
    if (__syncthreads_or(any_large) && g.is_complete)
        normalize_rows<T>(g, mask,
                          {{a.q, a.q_stride, b, h},
                           {g.do_, g.do_stride, b, h},
                           {a.k, a.k_stride, b, h_kv},
                           {a.v, a.v_stride, b, h_kv}},
                          b, h, i0, rows, Bc, shared, g.lse + at, g.dlse ? g.dlse + at : nullptr, states + i0);
    __syncthreads();
}

// ------------------------------------------------------------------------------ Algorithm 4

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    algorithm_4(const __grid_constant__ Gradient g, float *dQ_tensor, const __grid_constant__ Strides dQ_stride,
                RowState *all_states, const __grid_constant__ Tiles tiles, int64_t first_head) {
    const Attention &a = g.a;
    const int Br = tiles.Br, Bc = tiles.Bc, D = tiles.D;
    extern __shared__ double shared_memory[];
    Shared shared;
    shared.m_i = shared_memory;
    float *free = (float *)(shared_memory + Br);
    const auto take = [&](int rows, int columns) {
        const Matrix taken = {free, columns + 1, 1};
        free += rows * (columns + 1);
        return taken;
    };
    for (Matrix *tile : {&shared.Qi, &shared.dOi}) *tile = take(Br, D);
    for (Matrix *tile : {&shared.Kj, &shared.Vj, &shared.dKj, &shared.dVj}) *tile = take(Bc, D);
    for (Matrix *tile : {&shared.Pij, &shared.dSij}) *tile = take(Br, Bc);
    shared.log_l_i = free, shared.Di = free + Br, shared.Di_low = free + 2 * Br;
    double *const m_i = shared.m_i;
    float *const log_l_i = shared.log_l_i, *const Di = shared.Di, *const Di_low = shared.Di_low;
    const Matrix &Qi = shared.Qi, &dOi = shared.dOi, &Kj = shared.Kj, &Vj = shared.Vj, &dKj = shared.dKj;
    const Matrix &dVj = shared.dVj, &Pij = shared.Pij, &dSij = shared.dSij;

    // What belongs to the block's key head: query heads h0 <= h < h1
    const int64_t key_head = first_head + blockIdx.x, b = key_head / a.Hkv, h_kv = key_head % a.Hkv;
    const int64_t h0 = h_kv * (a.Hq / a.Hkv), h1 = h0 + a.Hq / a.Hkv;
    const HeadRows<const T> K(a.k, a.k_stride, b, h_kv), V(a.v, a.v_stride, b, h_kv);
    const Results<T> dK(g.dk, g.dk_stride, b, h_kv, g.out_dtype), dV(g.dv, g.dv_stride, b, h_kv, g.out_dtype);
    const AnyMask mask = any_mask_of(a, b);  // flash.h, ranges.h

    // 2. Block sizes: tiles_of, below
    // 3., 4. Divide Q, O, dO, lse into Tr tiles of Br rows, which begin at i0, K and V into Tc of Bc keys, at j0
    // 5. Initialise dQ = 0, dK = 0, dV = 0 in HBM
    for (int64_t h = h0; h < h1; ++h)
        for_numbers(a.Nq, a.d, [&](int i, int x) { HeadRows<float>(dQ_tensor, dQ_stride, b, h).at(i, x) = 0.f; });
    for_numbers(a.Nk, a.d, [&](int j, int x) { dK.set(j, x, 0.f); });
    for_numbers(a.Nk, a.d_v, [&](int j, int x) { dV.set(j, x, 0.f); });

    // A float32 is too coarse for a large lse
    for (int64_t h = h0; h < h1; ++h)
        for (int i0 = 0; i0 < a.Nq; i0 += Br)
            set_row_states<T>(g, mask, b, h, i0, min(Br, a.Nq - i0), Bc, shared, all_states + (b * a.Hq + h) * a.Nq);

    // 6. for 1 <= j <= Tc, among the keys that some query sees
    const Keys seen = keys_of_any(mask, 0, a.Nq);
    for (int j0 = seen.begin; j0 < seen.end; j0 += Bc) {
        const int keys = min(Bc, seen.end - j0);
        __syncthreads();
        // 7. Load Kj, Vj. Rows past the last key are zeros: memory there may hold anything
        // 8. Initialise dKj = 0, dVj = 0
        load(Kj, K, j0, keys, a.d), load(Vj, V, j0, keys, a.d_v);
        for_numbers(up_to_4s(keys), D, [&](int row, int x) { dKj.at(row, x) = dVj.at(row, x) = 0.f; });

        // 9. for 1 <= i <= Tr, in each query head that shares the key head
        for (int64_t h = h0; h < h1; ++h) {
            const int64_t head = b * a.Hq + h;
            const HeadRows<const T> Q(a.q, a.q_stride, b, h), O(g.o, g.o_stride, b, h), dO(g.do_, g.do_stride, b, h);
            const HeadRows<float> dQ(dQ_tensor, dQ_stride, b, h);
            for (int i0 = 0; i0 < a.Nq; i0 += Br) {
                const int rows = min(Br, a.Nq - i0);
                const Keys seen_by_i = keys_of_any(mask, i0, i0 + rows);
                if (seen_by_i.end <= j0 || seen_by_i.begin >= j0 + keys) continue;  // the mask hides all of Sij

                // 10. Load Qi, dOi, m_i, log_l_i; Oi is read in step 19, dQi in step 21. Rows without a key are zeros
                __syncthreads();
                for_numbers(up_to_4s(rows), D, [&](int row, int x) {
                    const bool counts =
                        row < rows && !empty(keys_of_row(mask, i0 + row)) && !is_blind(g, head * a.Nq + i0 + row);
                    Qi.at(row, x) = counts && x < a.d ? (float)Q.at(i0 + row, x) : 0.f;
                    dOi.at(row, x) = counts && x < a.d_v ? (float)dO.at(i0 + row, x) : 0.f;
                });
                bool any_large = false;
                for (int row = threadIdx.x; row < rows; row += kThreads) {
                    const RowState state = all_states[head * a.Nq + i0 + row];
                    m_i[row] = state.m, log_l_i[row] = state.log_l, Di[row] = state.D, Di_low[row] = state.D_low;
                    any_large |= state.m != 0.;
                }
                any_large = __syncthreads_or(any_large);

                // 11. Sij = softmax_scale * Qi Kj^T. dSij keeps the slopes of scores that change (scores.h) for step 20
                // 12. The mask: Sij = -inf where it hides the key
                // 13. Pij = exp(Sij - lse_i), at most 1
                // In float64 for large rows alone: the float32 scores of others have the bits of the forward pass
                const auto set_P = [&](int row, int key, auto QK) {
                    if ((m_i[row] != 0.) != std::is_same_v<decltype(QK), double>) return;
                    const Keys seen_by_row = keys_of_row(mask, i0 + row);
                    const bool is_seen = seen_by_row.begin <= j0 + key && j0 + key < seen_by_row.end;
                    const auto t = capped(a, QK);
                    const auto S = has_terms(a) ? whole(a, t, TermsOfRow(a, b, h, i0 + row).of_key<T>(j0 + key)) : t;
                    const float exponent = a.softmax_scale * (S - (decltype(QK))m_i[row]) - log_l_i[row];
                    dSij.at(row, key) = slope_in(a, (float)t);
                    Pij.at(row, key) = is_seen ? expf(exponent > 0.f ? 0.f : exponent) : 0.f;
                };
                multiply(rows, keys, a.d, Qi, Kj.transposed(), set_P);
                if (any_large) multiply<double>(rows, keys, a.d, Qi, Kj.transposed(), set_P);
                __syncthreads();

                // 19. Di = rowsum(dOi o Oi), less the gradient of lse, unless normalize_rows has it
                const int lane = threadIdx.x % kRowLanes;
                for (int row = threadIdx.x / kRowLanes; row < up_to_4s(rows); row += kThreads / kRowLanes) {
                    float sum = 0.f;
                    for (int x = lane; x < a.d_v && row < rows; x += kRowLanes)
                        sum = fmaf(dOi.at(row, x), (float)O.at(i0 + row, x), sum);
                    sum = row_sum<kRowLanes>(sum);
                    if (g.dlse && row < rows) sum -= g.dlse[head * a.Nq + i0 + row];
                    if (lane == 0 && (row >= rows || m_i[row] == 0. || !g.is_complete)) Di[row] = sum;
                }
                __syncthreads();

                // 14. Zij: dropout.h
                // 17., 18. dPij = dOi Vj^T o Zij, here since dSij holds the slopes
                // 20. dSij = Pij o (dPij - Di). Where Pij = 0 it is 0, even if a hidden number is NaN
                // 15. Pij = Pij o Zij, after its last use without
                const DropoutOfHead dropout(a, b, h);
                multiply(rows, keys, a.d_v, dOi, Vj.transposed(), [&](int row, int key, float dP) {
                    float &p = Pij.at(row, key);
                    const float Z = has_dropout(a) ? dropout.Zij(i0 + row, j0 + key) : 1.f;
                    dSij.at(row, key) = p == 0.f ? 0.f : p * (Z * dP - Di[row] - Di_low[row]) * dSij.at(row, key);
                    p *= Z;
                });
                __syncthreads();

                // 16. dVj = dVj + Pij^T dOi
                multiply(keys, a.d_v, rows, Pij.transposed(), dOi,
                         [&](int key, int x, float PdO) { dVj.at(key, x) += PdO; });
                // 21. dQi = dQi + softmax_scale * dSij Kj, to HBM. scores.scale is the caller's softmax_scale
                multiply(rows, a.d, keys, dSij, Kj,
                         [&](int row, int x, float dSK) { dQ.at(i0 + row, x) += a.scores.scale * dSK; });
                // 22. dKj = dKj + softmax_scale * dSij^T Qi
                multiply(keys, a.d, rows, dSij.transposed(), Qi,
                         [&](int key, int x, float dSQ) { dKj.at(key, x) += a.scores.scale * dSQ; });
            }  // 23. end for
        }
        // 24. dKj, dVj to HBM
        __syncthreads();
        for_numbers(keys, a.d, [&](int key, int x) { dK.set(j0 + key, x, dKj.at(key, x)); });
        for_numbers(keys, a.d_v, [&](int key, int x) { dV.set(j0 + key, x, dVj.at(key, x)); });
    }  // 25. end for

    // 26. Return dQ, dK, dV: dQ in the dtype that the caller wants
    __syncthreads();
    for (int64_t h = h0; h < h1 && dQ_tensor != g.dq; ++h)
        for_numbers(a.Nq, a.d, [&](int i, int x) {
            Results<T>(g.dq, g.dq_stride, b, h, g.out_dtype)
                .set(i, x, HeadRows<float>(dQ_tensor, dQ_stride, b, h).at(i, x));
        });
}

// ------------------------------------------------------------------------------ the launch

// 2. Bc = ceil(M / 4d), Br = min(ceil(M / 4d), d). Six tiles of d columns and two of scores share M. So Br = Bc is the
// largest multiple of 4 that fits, at most 64: a patch of Sij a thread.
Tiles tiles_of(const Attention &a, int M) {
    const int D = up_to_4s(most_columns(a)), most = std::min(64, up_to_4s(std::max({a.Nq, a.Nk, 1})));
    int B = most;
    while (B > 4 && Tiles{B, B, D}.floats() > M) B -= 4;
    return {B, B, D};
}

template <class T>
const char *launch(const Gradient &g, const Plan &plan, float *dQ, const Strides &dQ_stride, RowState *states,
                   CUstream_st *stream) {
    const Tiles tiles = {plan.Br, plan.Bc, plan.D};
    return launch_blocks(algorithm_4<T>, plan, stream, g, dQ, dQ_stride, states, tiles);
}

}  // namespace

Plan plan_paper_backward(const Gradient &g, const Device &device) {
    const Attention &a = g.a;
    const Tiles tiles = tiles_of(a, device.shared_memory / 4);
    const int64_t rows = a.B * a.Hq * a.Nq;
    const int64_t workspace = rows * (sizeof(RowState) + (g.out_dtype == Dtype::float32 ? 0 : 4 * a.d));
    return {kPaperBackward, 0, tiles.Br, tiles.Bc, tiles.D, a.B * a.Hkv, kThreads, tiles.floats() * 4, workspace};
}

const char *launch_paper_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const int64_t d = g.a.d, head = g.a.Nq * d;
    const bool is_result = g.out_dtype == Dtype::float32;
    RowState *const states = (RowState *)workspace;
    float *const dQ = (float *)(is_result ? g.dq : states + g.a.B * g.a.Hq * g.a.Nq);
    const Strides dQ_stride = is_result ? g.dq_stride : Strides{g.a.Hq * head, head, d};
    if (g.a.dtype == Dtype::float32) return launch<float>(g, plan, dQ, dQ_stride, states, stream);
    if (g.a.dtype == Dtype::float16) return launch<__half>(g, plan, dQ, dQ_stride, states, stream);
    return launch<__nv_bfloat16>(g, plan, dQ, dQ_stride, states, stream);
}

}  // namespace minimal_attn
