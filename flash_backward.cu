// flash_backward.cu: Algorithm 4 of FlashAttention (arXiv:2205.14135), the backward pass, as it is printed. Read it after
// flash.cu: comments that begin with a number are the paper's steps.
//
//     P = exp(S - lse), S = softmax_scale * Q K^T     computed again, a tile of Br queries x Bc keys at a time
//     dV = P^T dO,  dP = dO V^T,  D = rowsum(dO o O),  dS = P o (dP - D)           o: number by number
//     dQ = softmax_scale * dS K,  dK = softmax_scale * dS^T Q
//
// Launch. Grid: one block of 256 threads for each key head of each batch. It walks the query heads that share this key
// head. So dK and dV are sums of one block: no atomics, and the same bits on every run.
//
// What lives where. HBM keeps Q, K, V, O, dO, lse, and between two tiles dQ, in float32. The shared memory of a block has
// (float32, where D is d rounded up to a multiple of 4):
//     Qi, dOi               Br x D     rows are padded by 1 number, so that rows and columns are read without conflicts
//     Kj, Vj, dKj, dVj      Bc x D     likewise
//     Pij; dPij, then dSij  Br x Bc    likewise
//     m_i, log_l_i, Di      Br
// For d = 64 on an H100 these are 131 KB: Br = Bc = 64.
//
// Which barrier orders what:
//     in normalize_rows  Sij, then m_i and l_i, are complete             -> the next line reads or overwrites them
//     before step 7     step 5 is done, dKj and dVj are written to HBM   -> they are initialised again
//     before step 10    all reads of the last Qi, dOi, m_i, Pij, dSij    -> these are overwritten
//     after step 10     Kj, Vj, Qi, dOi, m_i are loaded                  -> step 11 reads them
//     after step 13     Pij is complete                                  -> steps 16 and 20 read it
//     after step 19     dPij and Di are complete                         -> step 20 reads them
//     after step 20     dSij is complete                                 -> steps 21 and 22 read it
//     before step 24    dKj and dVj are complete                         -> they are read
//     before step 26    dQ is complete                                   -> it is read
// In steps 16, 21 and 22 the same thread always reads and writes the same numbers of dVj, dQ and dKj.
//
// The contract (flash.h) adds to the paper:
//     a mask (steps 6, 9, 12), the gradient of lse (step 19), any Nq, Nk and d, several query heads for one key head
// One number lse = m + log l for each row replaces l and m. Where it is large, a float32 is too coarse for it: there
// normalize_rows computes m and l again. Steps 1, 14, 15, 18 are dropout, which is missing.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device.h"
#include "flash.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = 8;  // threads that share a row of dOi o Oi, neighbours in a warp

MINIMAL_ATTN_HOST_DEVICE constexpr int up_to_4s(int n) { return (n + 3) / 4 * 4; }

// What step 2 chooses, and how the shared memory of a block is laid out for it.
struct Tiles {
    int Br, Bc, D;
    MINIMAL_ATTN_HOST_DEVICE int floats() const { return (2 * Br + 4 * Bc) * (D + 1) + 2 * Br * (Bc + 1) + 3 * Br; }
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
// Their rows and columns are far apart, so that neighbouring threads read neighbours. Sums of 32 terms are added up: the
// error of one long sum would be several times as large.
template <class Use>
__device__ void multiply(int rows, int columns, int n, const Matrix &A, const Matrix &B, const Use &use) {
    const int down = (rows + 3) / 4, across = (columns + 3) / 4;
    for (int patch = threadIdx.x; patch < down * across; patch += kThreads) {
        const int row = patch / across, column = patch % across;
        float AB[4][4] = {};
#pragma unroll 1
        for (int y0 = 0; y0 < n; y0 += 32) {
            float sum[4][4] = {}, a[4], b[4];
#pragma unroll 2
            for (int y = y0; y < min(y0 + 32, n); ++y) {
#pragma unroll
                for (int r = 0; r < 4; ++r) a[r] = A.at(row + r * down, y), b[r] = B.at(y, column + r * across);
                for (int r = 0; r < 4; ++r)
                    for (int c = 0; c < 4; ++c) sum[r][c] = fmaf(a[r], b[c], sum[r][c]);
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

// A row's P = exp(softmax_scale (QK - m) - log_l). m is a score before the scaling. Where lse is small, m = 0 and log_l is
// lse. In HBM, one for each row.
struct RowState {
    float m, log_l;
};

// Sets the RowState of rows i0 <= i < i0 + rows of a query head. Only where lse is large, and covers these keys alone, are
// scores computed: steps 5 to 11 of Algorithm 1, without O. m_i and l_i are in shared memory.
template <class T>
__device__ void normalize_rows(const Gradient &g, const Band &band, const HeadRows<const T> &Q,
                               const HeadRows<const T> &K, int i0, int rows, int Bc, const Matrix &Qi, const Matrix &Kj,
                               const Matrix &Sij, float *m_i, float *l_i, const float *lse, RowState *states) {
    const Attention &a = g.a;
    const float sign = a.softmax_scale < 0.f ? -1.f : 1.f;  // a negative scale negates scores
    bool any_large = false;
    __syncthreads();
    for (int row = threadIdx.x; row < rows; row += kThreads) {
        const float x = lse[i0 + row], m = is_large(x) && a.softmax_scale != 0.f ? x / a.softmax_scale : 0.f;
        states[i0 + row] = {m, fmaf(-a.softmax_scale, m, x)};
        any_large |= m != 0.f, m_i[row] = -INFINITY, l_i[row] = 0.f;
    }
    if (!__syncthreads_or(any_large) || !g.is_complete) return;
    for_numbers(up_to_4s(rows), a.d, [&](int row, int x) { Qi.at(row, x) = row < rows ? (float)Q.at(i0 + row, x) : 0.f; });
    const Keys seen = keys_of_any(band, i0, i0 + rows);
    for (int j0 = seen.begin; j0 < seen.end; j0 += Bc) {
        const int keys = min(Bc, seen.end - j0);
        for_numbers(up_to_4s(keys), a.d,
                    [&](int row, int x) { Kj.at(row, x) = row < keys ? (float)K.at(j0 + row, x) : 0.f; });
        __syncthreads();
        multiply(rows, keys, a.d, Qi, Kj.transposed(), [&](int row, int key, float QK) {
            const Keys seen_by_row = keys_of_row(band, i0 + row);
            const bool is_seen = seen_by_row.begin <= j0 + key && j0 + key < seen_by_row.end;
            Sij.at(row, key) = is_seen ? sign * QK : -INFINITY;
        });
        __syncthreads();
        for (int row = threadIdx.x / kRowLanes; row < up_to_4s(rows); row += kThreads / kRowLanes) {
            const int lane = threadIdx.x % kRowLanes;
            float m = -INFINITY, l = 0.f;
            for (int key = lane; key < keys && row < rows; key += kRowLanes) m = fmaxf(m, Sij.at(row, key));
            m = fmaxf(row_max<kRowLanes>(m), row < rows ? m_i[row] : -INFINITY);
            for (int key = lane; key < keys && row < rows && m > -INFINITY; key += kRowLanes)
                l += expf(sign * a.softmax_scale * (Sij.at(row, key) - m));
            l = row_sum<kRowLanes>(l);
            __syncwarp();
            if (lane > 0 || row >= rows || m == -INFINITY) continue;
            l_i[row] = l_i[row] * expf(sign * a.softmax_scale * (m_i[row] - m)) + l, m_i[row] = m;
        }
        __syncthreads();
    }
    for (int row = threadIdx.x; row < rows; row += kThreads)
        if (is_large(lse[i0 + row])) states[i0 + row] = {sign * m_i[row], logf(l_i[row])};
}

// ------------------------------------------------------------------------------ Algorithm 4

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    algorithm_4(const __grid_constant__ Gradient g, float *dQ_tensor, const __grid_constant__ Strides dQ_stride,
                RowState *all_states, const __grid_constant__ Tiles tiles, int64_t first_head) {
    const Attention &a = g.a;
    const int Br = tiles.Br, Bc = tiles.Bc, D = tiles.D;
    extern __shared__ float shared[];
    float *free = shared;
    const auto take = [&](int rows, int columns) {
        const Matrix taken = {free, columns + 1, 1};
        free += rows * (columns + 1);
        return taken;
    };
    const Matrix Qi = take(Br, D), dOi = take(Br, D), Kj = take(Bc, D), Vj = take(Bc, D), dKj = take(Bc, D);
    const Matrix dVj = take(Bc, D), Pij = take(Br, Bc), dSij = take(Br, Bc);  // dPij is where dSij is
    float *const m_i = free, *const log_l_i = m_i + Br, *const Di = log_l_i + Br;

    // What belongs to the block's key head: query heads h0 <= h < h1
    const int64_t key_head = first_head + blockIdx.x, b = key_head / a.Hkv, h_kv = key_head % a.Hkv;
    const int64_t h0 = h_kv * (a.Hq / a.Hkv), h1 = h0 + a.Hq / a.Hkv;
    const HeadRows<const T> K(a.k, a.k_stride, b, h_kv), V(a.v, a.v_stride, b, h_kv);
    const Results<T> dK(g.dk, g.dk_stride, b, h_kv, g.out_dtype), dV(g.dv, g.dv_stride, b, h_kv, g.out_dtype);
    const Band band = band_of(a, b);  // the mask, see flash.h

    // 2. Block sizes: tiles_of, below
    // 3., 4. Divide Q, O, dO, lse into Tr tiles of Br rows, which begin at i0, K and V into Tc of Bc keys, at j0
    // 5. Initialise dQ = 0, dK = 0, dV = 0 in HBM
    for (int64_t h = h0; h < h1; ++h)
        for_numbers(a.Nq, a.d, [&](int i, int x) { HeadRows<float>(dQ_tensor, dQ_stride, b, h).at(i, x) = 0.f; });
    for_numbers(a.Nk, a.d, [&](int j, int x) { dK.set(j, x, 0.f), dV.set(j, x, 0.f); });

    for (int64_t h = h0; h < h1; ++h)
        for (int i0 = 0; i0 < a.Nq; i0 += Br)
            normalize_rows(g, band, HeadRows<const T>(a.q, a.q_stride, b, h), K, i0, min(Br, a.Nq - i0), Bc, Qi, Kj, Pij,
                           m_i, log_l_i, g.lse + (b * a.Hq + h) * a.Nq, all_states + (b * a.Hq + h) * a.Nq);

    // 6. for 1 <= j <= Tc, among the keys that some query sees
    const Keys seen = keys_of_any(band, 0, a.Nq);
    for (int j0 = seen.begin; j0 < seen.end; j0 += Bc) {
        const int keys = min(Bc, seen.end - j0);
        __syncthreads();
        // 7. Load Kj, Vj. Rows past the last key are zeros: memory there may hold anything
        // 8. Initialise dKj = 0, dVj = 0
        for_numbers(up_to_4s(keys), a.d, [&](int row, int x) {
            Kj.at(row, x) = row < keys ? (float)K.at(j0 + row, x) : 0.f;
            Vj.at(row, x) = row < keys ? (float)V.at(j0 + row, x) : 0.f;
            dKj.at(row, x) = dVj.at(row, x) = 0.f;
        });

        // 9. for 1 <= i <= Tr, in each query head that shares the key head
        for (int64_t h = h0; h < h1; ++h) {
            const int64_t head = b * a.Hq + h;
            const HeadRows<const T> Q(a.q, a.q_stride, b, h), O(g.o, g.o_stride, b, h), dO(g.do_, g.do_stride, b, h);
            const HeadRows<float> dQ(dQ_tensor, dQ_stride, b, h);
            for (int i0 = 0; i0 < a.Nq; i0 += Br) {
                const int rows = min(Br, a.Nq - i0);
                const Keys seen_by_i = keys_of_any(band, i0, i0 + rows);
                if (seen_by_i.end <= j0 || seen_by_i.begin >= j0 + keys) continue;  // the mask hides all of Sij

                // 10. Load Qi, dOi, m_i, log_l_i; Oi is read in step 19, dQi in step 21. Rows without a key are zeros
                __syncthreads();
                for_numbers(up_to_4s(rows), a.d, [&](int row, int x) {
                    const bool counts = row < rows && !empty(keys_of_row(band, i0 + row));
                    Qi.at(row, x) = counts ? (float)Q.at(i0 + row, x) : 0.f;
                    dOi.at(row, x) = counts ? (float)dO.at(i0 + row, x) : 0.f;
                });
                for (int row = threadIdx.x; row < rows; row += kThreads) {
                    const RowState state = all_states[head * a.Nq + i0 + row];
                    m_i[row] = state.m, log_l_i[row] = state.log_l;
                }
                __syncthreads();

                // 11. Sij = softmax_scale * Qi Kj^T
                // 12. The mask: Sij = -inf where it hides the key
                // 13. Pij = exp(Sij - lse_i), at most 1
                multiply(rows, keys, a.d, Qi, Kj.transposed(), [&](int row, int key, float QK) {
                    const Keys seen_by_row = keys_of_row(band, i0 + row);
                    const bool is_seen = seen_by_row.begin <= j0 + key && j0 + key < seen_by_row.end;
                    const float exponent = a.softmax_scale * (QK - m_i[row]) - log_l_i[row];
                    Pij.at(row, key) = is_seen ? expf(exponent > 0.f ? 0.f : exponent) : 0.f;
                });
                __syncthreads();

                // 16. dVj = dVj + Pij^T dOi
                multiply(keys, a.d, rows, Pij.transposed(), dOi,
                         [&](int key, int x, float PdO) { dVj.at(key, x) += PdO; });
                // 17. dPij = dOi Vj^T
                multiply(rows, keys, a.d, dOi, Vj.transposed(),
                         [&](int row, int key, float dP) { dSij.at(row, key) = dP; });
                // 19. Di = rowsum(dOi o Oi), less the gradient of lse
                const int lane = threadIdx.x % kRowLanes;
                for (int row = threadIdx.x / kRowLanes; row < up_to_4s(rows); row += kThreads / kRowLanes) {
                    float sum = 0.f;
                    for (int x = lane; x < a.d && row < rows; x += kRowLanes)
                        sum = fmaf(dOi.at(row, x), (float)O.at(i0 + row, x), sum);
                    sum = row_sum<kRowLanes>(sum);
                    if (g.dlse && row < rows) sum -= g.dlse[head * a.Nq + i0 + row];
                    if (lane == 0) Di[row] = sum;
                }
                __syncthreads();

                // 20. dSij = Pij o (dPij - Di). Where Pij = 0 it is 0, even if a hidden number is NaN
                for_numbers(rows, keys, [&](int row, int key) {
                    const float p = Pij.at(row, key);
                    dSij.at(row, key) = p == 0.f ? 0.f : p * (dSij.at(row, key) - Di[row]);
                });
                __syncthreads();

                // 21. dQi = dQi + softmax_scale * dSij Kj, to HBM
                multiply(rows, a.d, keys, dSij, Kj,
                         [&](int row, int x, float dSK) { dQ.at(i0 + row, x) += a.softmax_scale * dSK; });
                // 22. dKj = dKj + softmax_scale * dSij^T Qi
                multiply(keys, a.d, rows, dSij.transposed(), Qi,
                         [&](int key, int x, float dSQ) { dKj.at(key, x) += a.softmax_scale * dSQ; });
            }  // 23. end for
        }
        // 24. dKj, dVj to HBM
        __syncthreads();
        for_numbers(keys, a.d,
                    [&](int key, int x) { dK.set(j0 + key, x, dKj.at(key, x)), dV.set(j0 + key, x, dVj.at(key, x)); });
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
    const int D = up_to_4s(a.d), most = std::min(64, up_to_4s(std::max({a.Nq, a.Nk, 1})));
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
