// flash.cu: Algorithm 1 of FlashAttention (Dao, Fu, Ermon, Rudra, Re 2022, arXiv:2205.14135) as it is printed.
// Read this file first, with the paper beside it: comments that begin with a number are the paper's steps.
//
//     O = softmax(softmax_scale * Q K^T + mask) V, a tile of Br queries x Bc keys at a time
//
// Launch. Grid: one block for each query head h of each batch b. A block has 256 threads. In both
// products of a tile a thread computes patches of 4 x 4 numbers; in the softmax 8 threads work on one row.
//
// What lives where. HBM keeps Q, K and V, and between two tiles O, l and m. The shared memory of a block has (float32,
// where D is d rounded up to a multiple of 4):
//     Qi               Br x D     rows are padded by 4 numbers, so that neighbouring rows begin in different banks
//     Kj, transposed   D x Bc     so that both products read their right operand by rows
//     Vj               Bc x D
//     Sij, then Pij    Br x Bc    rows are padded, too
//     li (float64), mi, and two factors of step 12, Br each
// For d = 64 on an H100 these are 103 KB: Br = 64, Bc = 112. Registers hold a thread's patch of Sij, Pij Vj and Oi.
//
// Which barrier orders what:
//     before step 6    step 2 is done, and all reads of the last Vj   -> O, l, m are read; Kj, Vj are overwritten
//     after step 8     Kj, Vj, Qi, li, mi are loaded, Pij is read     -> Sij is written
//     after step 9     Sij is complete                                -> its rows are read
//     after step 11    Pij and the factors are complete               -> step 12 reads them
//     before step 16   O, l and m are complete in HBM                 -> they are read
// Between steps 6 and 16 the same thread always reads and writes the same numbers of O, l and m in HBM.
//
// The contract (flash.h) adds to the paper:
//     softmax_scale, in step 9
//     a mask: steps 5 and 7 skip tiles, 10 hides scores, 11 and 12 change no row that sees no key of the tile
//     an earlier state (O, l, m), with which step 2 begins
//     dropout, in step 10
//     rows that see keys, but with scores of -inf alone: steps 10 and 11, and O is NaN in step 16
//     any Nq, Nk and d; several query heads for one key head
//     tiles of a multiple of 4 rows: step 1 rounds M / 4d down, not up, since they must fit with their padding
//
// What FlashAttention-2 changes (see portable/): the loop over i becomes the outer one. Its tiles are spread over the
// grid, so one head fills many multiprocessors. Oi, li and mi stay in registers, and Oi is divided by li once.
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
constexpr int kRowLanes = 8;     // threads that share a row of Sij, neighbours in a warp
constexpr float kHidden = -1.f;  // factor_PV of a row that sees no key of the tile: Oi stays as it is

MINIMAL_ATTN_HOST_DEVICE constexpr int up_to_4s(int n) { return (n + 3) / 4 * 4; }

// What step 1 chooses, and how the shared memory of a block is laid out for it.
struct Tiles {
    int Br, Bc, D;
    MINIMAL_ATTN_HOST_DEVICE int Q_stride() const { return D + 4; }
    MINIMAL_ATTN_HOST_DEVICE int S_stride() const { return Bc + 4; }
    MINIMAL_ATTN_HOST_DEVICE int floats() const { return Br * (Q_stride() + S_stride() + 5) + 2 * Bc * D; }
};

// O, l and m in HBM between two tiles. O and m are the results themselves if those are float32 and wanted. Else they
// are part of the workspace. l always is, in float64: a float32 sum of a thousand tiles may be wrong by 1e-5.
struct State {
    float *O;
    Strides O_stride;
    double *l;
    float *m;
};

// ------------------------------------------------------------------------------ HBM

// The rows of one head of a (B, H, N, d) tensor in HBM.
template <class T>
struct HeadRows {
    T *first;
    int64_t stride;
    __device__ HeadRows(T *tensor, const Strides &s, int64_t b, int64_t h)
        : first(tensor + b * s.batch + h * s.head), stride(s.row) {}
    __device__ T *operator[](int i) const { return first + i * stride; }
};

// Four neighbours of a row.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    T x[4];
};
using Floats = Four<float>;

__device__ Floats &floats_at(float *shared) { return *(Floats *)shared; }

// Where fewer than four exist, `count` of them are read or written; further ones are 0.
template <class T>
__device__ Floats load4(const T *from, int count, bool aligned) {
    Four<T> four;
    Floats floats;
    if (aligned && count >= 4) four = *(const Four<T> *)from;
    for (int c = 0; c < 4; ++c) {
        if (!aligned && c < count) four.x[c] = from[c];
        floats.x[c] = c < count ? (float)four.x[c] : 0.f;
    }
    return floats;
}

template <class T>
__device__ void store4(T *to, const Floats &floats, int count, bool aligned) {
    Four<T> four;
    for (int c = 0; c < 4; ++c) {
        four.x[c] = (T)floats.x[c];
        if (!aligned && c < count) to[c] = four.x[c];
    }
    if (aligned && count >= 4) *(Four<T> *)to = four;
}

// ------------------------------------------------------------------------------ how the threads share a tile

// Calls use(row, x, step) for each patch of a tile, in one thread. Its columns are x .. x + 3, its Height rows are row,
// row + step, ..: far apart, so that neighbouring threads read neighbouring rows, which lie in different banks.
template <int Height, class Use>
__device__ void for_patches(int rows, int columns, const Use &use) {
    const int step = (rows + Height - 1) / Height, across = (columns + 3) / 4;
#pragma unroll(Height == 1 ? 4 : 1)
    for (int patch = threadIdx.x; patch < step * across; patch += kThreads)
        use(patch / across, patch % across * 4, step);
}

// A patch of the product of A and B in shared memory, sums of n terms: four rows of A, A_step apart, four columns of B.
// Sums of 32 terms are added up, since rounding costs one long sum several times as much.
struct Patch {
    Floats row[4];
};
__device__ Patch multiply(float *A, int A_step, float *B, int B_stride, int n) {
    Patch AB = {};
    for (int x0 = 0; x0 < n; x0 += 32) {
        Patch sum = {}, a, b;
#pragma unroll 2
        for (int x = x0; x < min(x0 + 32, n); x += 4) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                a.row[r] = floats_at(&A[r * A_step + x]);
                b.row[r] = floats_at(&B[(x + r) * B_stride]);
            }
            for (int y = 0; y < 4; ++y)
                for (int r = 0; r < 4; ++r)
                    for (int c = 0; c < 4; ++c) sum.row[r].x[c] = fmaf(a.row[r].x[y], b.row[y].x[c], sum.row[r].x[c]);
        }
        for (int r = 0; r < 4; ++r)
            for (int c = 0; c < 4; ++c) AB.row[r].x[c] += sum.row[r].x[c];
    }
    return AB;
}

// ------------------------------------------------------------------------------ Algorithm 1

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    algorithm_1(const __grid_constant__ Attention a, const __grid_constant__ State state,
                const __grid_constant__ Tiles tiles, bool aligned, int64_t first_head) {
    const int Br = tiles.Br, Bc = tiles.Bc, D = tiles.D, Q_stride = tiles.Q_stride(), S_stride = tiles.S_stride();
    extern __shared__ __align__(16) float shared[];
    float *const Qi = shared, *const Kj_T = Qi + Br * Q_stride, *const Vj = Kj_T + D * Bc, *const Sij = Vj + Bc * D;
    double *const li = (double *)(Sij + Br * S_stride);
    float *const mi = (float *)(li + Br), *const factor_Oi = mi + Br, *const factor_PV = factor_Oi + Br;

    // What belongs to the block's head
    const int64_t head = first_head + blockIdx.x, b = head / a.Hq, h = head % a.Hq, h_kv = h / (a.Hq / a.Hkv);
    const HeadRows<const T> Q((const T *)a.q, a.q_stride, b, h);
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv), V(a, a.v, a.v_stride, b, h_kv);
    const HeadRows<float> O(state.O, state.O_stride, b, h);
    double *const l = state.l + head * a.Nq;
    float *const m = state.m + head * a.Nq;
    const AnyMask mask = any_mask_of(a, b);  // flash.h, ranges.h

    // 1. Block sizes: tiles_of, below
    // 2. Initialise O = 0, l = 0, m = -inf in HBM, or go on with an earlier state
    const HeadRows<const float> O_in(a.o_in, a.o_in_stride, b, h);
    const float *const l_in = a.l_in + head * a.Nq, *const m_in = a.m_in + head * a.Nq;
    for (int i0 = 0; i0 < a.Nq; i0 += Br)
        for_patches<1>(min(Br, a.Nq - i0), a.d_v, [&](int row, int x, int) {
            const int i = i0 + row;
            // l_in = 0: no key has counted so far. Then a row that sees a key starts anew; any other keeps O and m.
            const bool goes_on = a.o_in && (l_in[i] != 0.f || empty(keys_of_row(mask, i)));
            store4(O[i] + x, load4(O_in[i] + x, goes_on ? a.d_v - x : 0, aligned), a.d_v - x, aligned);
            if (x == 0) l[i] = goes_on ? l_in[i] : 0.f, m[i] = goes_on ? m_in[i] : -INFINITY;
        });

    // 3., 4. Divide Q, O, l, m into Tr tiles of Br rows; tile i begins at row i0. Divide K, V into Tc tiles of Bc keys;
    // tile j begins at key j0
    // 5. for 1 <= j <= Tc, among the keys that some query sees
    const Keys seen = keys_of_any(mask, 0, a.Nq);
    for (int j0 = seen.begin; j0 < seen.end; j0 += Bc) {
        const int keys = min(Bc, seen.end - j0), keys_and_zeros = up_to_4s(keys);
        __syncthreads();
        // 6. Load Kj, Vj. The rows past the last key are zeros: there Pij = 0, but 0 times NaN would be NaN.
        for_patches<1>(keys_and_zeros, D, [&](int row, int x, int) {
            const Floats k = load4(K[j0 + row] + x, row < keys ? a.d - x : 0, aligned);
            floats_at(&Vj[row * D + x]) = load4(V[j0 + row] + x, row < keys ? a.d_v - x : 0, aligned);
            for (int c = 0; c < 4; ++c) Kj_T[(x + c) * Bc + row] = k.x[c];
        });

        // 7. for 1 <= i <= Tr
        for (int i0 = 0; i0 < a.Nq; i0 += Br) {
            const int rows = min(Br, a.Nq - i0);
            const Keys seen_by_i = keys_of_any(mask, i0, i0 + rows);
            if (seen_by_i.end <= j0 || seen_by_i.begin >= j0 + keys) continue;  // the mask hides all of Sij

            // 8. Load Qi, li, mi. Each thread loads its part of Oi in step 12.
            for_patches<1>(up_to_4s(rows), D, [&](int row, int x, int) {
                floats_at(&Qi[row * Q_stride + x]) = load4(Q[i0 + row] + x, row < rows ? a.d - x : 0, aligned);
            });
            for (int row = threadIdx.x; row < rows; row += kThreads) li[row] = l[i0 + row], mi[row] = m[i0 + row];
            __syncthreads();

            // 9. Sij = softmax_scale * Qi Kj^T, or what scores.h makes of it
            for_patches<4>(rows, keys, [&](int row, int x, int step) {
                Patch S = multiply(&Qi[row * Q_stride], step * Q_stride, &Kj_T[x], Bc, D);
#pragma unroll
                for (int r = 0; r < 4; ++r) {
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        S.row[r].x[c] =
                            a.softmax_scale * unscaled<T>(a, S.row[r].x[c], b, h, i0 + row + r * step, j0 + x + c);
                    floats_at(&Sij[(row + r * step) * S_stride + x]) = S.row[r];
                }
            });
            __syncthreads();

            const int lane = threadIdx.x % kRowLanes;
            for (int row = threadIdx.x / kRowLanes; row < up_to_4s(rows); row += kThreads / kRowLanes) {
                // The mask: of this tile the row sees the keys begin <= j < end
                const Keys seen_by_row = keys_of_row(mask, i0 + row);
                const int begin = max(seen_by_row.begin - j0, 0);
                const int end = row < rows ? min(seen_by_row.end - j0, keys) : 0;
                // 10. mij = rowmax(Sij), Pij = exp(Sij - mij), lij = rowsum(Pij). If all scores are -inf, Pij = 0.
                float *const S = &Sij[row * S_stride];
                float mij = -INFINITY, lij = 0.f;
                for (int j = begin + lane; j < end; j += kRowLanes) mij = fmaxf(mij, S[j]);
                mij = row_max<kRowLanes>(mij);
                for (int j = lane; j < keys_and_zeros; j += kRowLanes) {
                    S[j] = j >= begin && j < end ? expf(S[j] - (mij == -INFINITY ? 0.f : mij)) : 0.f;
                    lij += S[j];
                }
                lij = row_sum<kRowLanes>(lij);
                // Dropout (dropout.h): Pij = Pij o Zij, which lij doesn't count
                if (has_dropout(a)) {
                    const DropoutOfHead head(a, b, h);
                    for (int j = lane; j < keys; j += kRowLanes) S[j] *= head.Zij(i0 + row, j0 + j);
                }
                if (lane > 0) continue;
                // 11. mi_new = max(mi, mij), li_new = exp(mi - mi_new) li + exp(mij - mi_new) lij
                const float mi_new = fmaxf(mi[row], mij), origin = mi_new == -INFINITY ? 0.f : mi_new;
                const float alpha = expf(mi[row] - origin), beta = expf(mij - origin);
                const double old_l = alpha * li[row], li_new = old_l + (double)beta * lij;
                // The factors of step 12. If all scores so far are -inf, li_new is 0, and so is Oi until step 16.
                const float divisor = li_new == 0. ? INFINITY : (float)li_new;
                factor_Oi[row] = (float)old_l / divisor;
                factor_PV[row] = begin < end ? beta / divisor : kHidden;
                if (begin < end) li[row] = li_new, mi[row] = mi_new;
            }
            __syncthreads();

            // 12. Oi = (exp(mi - mi_new) li Oi + exp(mij - mi_new) Pij Vj) / li_new, to HBM
            for_patches<4>(rows, a.d_v, [&](int row, int x, int step) {
                const auto count = [&](int at) { return factor_PV[at] == kHidden ? 0 : a.d_v - x; };
                Patch Oi;
                for (int r = 0, at = row; r < 4; ++r, at += step) Oi.row[r] = load4(O[i0 + at] + x, count(at), aligned);
                const Patch PV = multiply(&Sij[row * S_stride], step * S_stride, &Vj[x], D, keys_and_zeros);
                for (int r = 0, at = row; r < 4; ++r, at += step) {
                    for (int c = 0; c < 4; ++c)
                        Oi.row[r].x[c] = fmaf(factor_Oi[at], Oi.row[r].x[c], factor_PV[at] * PV.row[r].x[c]);
                    store4(O[i0 + at] + x, Oi.row[r], count(at), aligned);
                }
            });
            // 13. li = li_new, mi = mi_new, to HBM
            for (int row = threadIdx.x; row < rows; row += kThreads) l[i0 + row] = li[row], m[i0 + row] = mi[row];
        }  // 14. end for
    }  // 15. end for

    // 16. Return O in the wanted dtype, l, m and lse. If all visible scores of a row are -inf, O is NaN
    __syncthreads();
    for (int i0 = 0; i0 < a.Nq; i0 += Br)
        for_patches<1>(min(Br, a.Nq - i0), a.d_v, [&](int row, int x, int) {
            const int i = i0 + row, count = a.d_v - x;
            const bool is_nan = l[i] == 0. && sees_by_terms(a, !empty(keys_of_row(mask, i)), 0.f);
            const Floats Oi = is_nan ? Floats{NAN, NAN, NAN, NAN} : load4(O[i] + x, count, aligned);
            if (x == 0) store_l_m_lse(a, b, h, i, (float)l[i], m[i]);
            if (a.o_dtype == Dtype::float32)
                store4(HeadRows<float>((float *)a.o, a.o_stride, b, h)[i] + x, Oi, count, aligned);
            else
                store4(HeadRows<T>((T *)a.o, a.o_stride, b, h)[i] + x, Oi, count, aligned);
        });
    pad_lse(a, b, h, a.Nq, threadIdx.x);
}

// ------------------------------------------------------------------------------ the launch

// 1. The paper's Bc = ceil(M / 4d), Br = min(ceil(M / 4d), d): then Qi, Kj, Vj and Sij have about a quarter of M each.
// Here M / 4d is rounded down, to a multiple of 4, so that they have at most that. Tiles are smaller where the padding
// wouldn't fit, and no larger than Nq and Nk ask for.
Tiles tiles_of(const Attention &a, int M) {
    const int D = up_to_4s(most_columns(a));
    int Bc = std::max(M / (4 * D) / 4 * 4, 4);
    while (Bc > 4 && Tiles{std::min(Bc, D), Bc, D}.floats() > M) Bc -= 4;
    return {std::min({Bc, D, up_to_4s(a.Nq)}), std::min(Bc, up_to_4s(std::max(a.Nk, 1))), D};
}

template <class T>
const char *launch(const Attention &a, const Plan &plan, const State &state, CUstream_st *stream) {
    const Tiles tiles = {plan.Br, plan.Bc, plan.D};
    const int64_t element = sizeof(T);
    const bool aligned = is_aligned(a.q, a.q_stride, element, a.d) && is_aligned(a.k, a.k_stride, element, a.d) &&
                         is_aligned(a.v, a.v_stride, element, a.d_v) && is_aligned(a.o_in, a.o_in_stride, 4, a.d_v) &&
                         is_aligned(a.o, a.o_stride, element_size(a.o_dtype), a.d_v);
    return launch_blocks(algorithm_1<T>, plan, stream, a, state, tiles, aligned);
}

}  // namespace

Plan plan_paper(const Attention &a, const Device &device) {
    // M, in floats, lets two blocks share a multiprocessor: one computes while the other waits for HBM or at a barrier.
    // If tiles would then have fewer than 48 keys (d > 128 on an H100), M is all that a block may have.
    const int reserved = 1024;  // bytes of each block that the system takes
    int M = (device.shared_memory / 2 - reserved) / 4;
    if (tiles_of(a, M).Bc < std::min(48, a.Nk)) M = device.shared_memory / 4;
    const Tiles tiles = tiles_of(a, M);
    const int64_t rows = a.B * a.Hq * a.Nq;
    const int64_t workspace = rows * ((a.o_dtype == Dtype::float32 ? 0 : 4 * tiles.D) + 8 + (a.m ? 0 : 4));
    return {"Algorithm 1", 0, tiles.Br, tiles.Bc, tiles.D, a.B * a.Hq, kThreads, tiles.floats() * 4, workspace};
}

const char *launch_paper(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    const int64_t rows = a.B * a.Hq * a.Nq, head = int64_t(a.Nq) * plan.D;
    State state = {(float *)a.o, a.o_stride};
    if (a.o_dtype != Dtype::float32) {
        state.O = (float *)workspace, state.O_stride = {a.Hq * head, head, plan.D};
        workspace = state.O + rows * plan.D;
    }
    state.l = (double *)workspace;
    state.m = a.m ? a.m : (float *)(state.l + rows);
    if (a.dtype == Dtype::float32) return launch<float>(a, plan, state, stream);
    if (a.dtype == Dtype::float16) return launch<__half>(a, plan, state, stream);
    return launch<__nv_bfloat16>(a, plan, state, stream);
}

}  // namespace minimal_attn
