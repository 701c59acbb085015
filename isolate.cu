// isolate.cu: with ranges, a hidden Inf or NaN reaches no row of o. This kernel runs after the forward kernel, and
// computes the rows that one has reached again, from the keys that each sees. docs/ranges.md has more.
//
//     block      a tile of 64 queries
//     warp       some of the heads, one row at a time
//     lane       of a row, each 32nd column; in compute_alone also one of 32 keys
//
// Uses ranges.h: ranges_of, keys_of_row; scores.h: unscaled, sees_by_terms; flash.h: KeyRows, end_of_row; device.h:
// row_max, row_sum, launch_all, launch_overlapping, wait_for_kernel_before, why_not.
#include "device.h"
#include "ranges.h"
#include "scores.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMostColumns = kMostD / 32;  // of a lane

template <class T>
__device__ T *row_of(void *tensor, const Strides &stride, int64_t b, int64_t h, int i) {
    return (T *)tensor + b * stride.batch + h * stride.head + i * stride.row;
}
template <class T>
__device__ const T *row_of(const void *tensor, const Strides &stride, int64_t b, int64_t h, int i) {
    return row_of<const T>(const_cast<void *>(tensor), stride, b, h, i);
}

// Whether a row of d numbers is finite. A warp looks at it.
template <class T>
__device__ bool is_finite(const T *row, int d) {
    bool all = true;
#pragma unroll
    for (int x = 0; x < kMostColumns; ++x)
        if (const int c = 32 * x + threadIdx.x % 32; c < d) all &= isfinite((float)row[c]);
    return __all_sync(~0u, all);
}

// Steps 8 to 13 of Algorithm 1 for one row, by one warp. It writes o; l and m don't depend on V, and stay.
template <class T, class O>
__device__ void compute_alone(const Attention &a, const Ranges &ranges, int64_t b, int64_t h, int i) {
    const int64_t h_kv = h / (a.Hq / a.Hkv), bhi = (b * a.Hq + h) * a.Nq + i;
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv), V(a, a.v, a.v_stride, b, h_kv);
    const T *const q = row_of<T>(a.q, a.q_stride, b, h, i);
    const Keys keys = keys_of_row(ranges, i);
    const int lane = threadIdx.x % 32;
    float Oi[kMostColumns] = {}, mi = -INFINITY, li = 0.f;
    for (int j0 = keys.begin; j0 < keys.end; j0 += 32) {  // j is j0 + lane
        const int count = min(keys.end - j0, 32);
        float Sij = 0.f;
        if (lane < count)
            for (int c = 0; c < a.d; ++c) Sij = fmaf((float)q[c], (float)K[j0 + lane][c], Sij);
        Sij = lane < count ? a.softmax_scale * unscaled<T>(a, Sij, b, h, i, j0 + lane) : -INFINITY;
        const float mi_new = fmaxf(mi, row_max<32>(Sij)), origin = mi_new == -INFINITY ? 0.f : mi_new;
        float Pij = lane < count ? expf(Sij - origin) : 0.f;
        const float alpha = expf(mi - origin);
        mi = mi_new, li = alpha * li + row_sum<32>(Pij);
        if (has_dropout(a)) Pij *= DropoutOfHead(a, b, h).Zij(i, j0 + lane);
#pragma unroll
        for (int x = 0; x < kMostColumns; ++x) Oi[x] *= alpha;
        for (int n = 0; n < count; ++n) {
            const float P_n = __shfl_sync(~0u, Pij, n);
            const T *const v = V[j0 + n];
#pragma unroll
            for (int x = 0; x < kMostColumns; ++x)
                if (32 * x + lane < a.d_v) Oi[x] = fmaf(P_n, (float)v[32 * x + lane], Oi[x]);
        }
    }
    const RowEnd end =
        end_of_row(sees_by_terms(a, true, li), li, mi, a.o_in ? a.l_in[bhi] : 0.f, a.o_in ? a.m_in[bhi] : -INFINITY);
    const float *const o_in = a.o_in && end.reads_o_in ? row_of<float>(a.o_in, a.o_in_stride, b, h, i) : nullptr;
    O *const o = row_of<O>(a.o, a.o_stride, b, h, i);
#pragma unroll
    for (int x = 0; x < kMostColumns; ++x)
        if (const int c = 32 * x + lane; c < a.d_v)
            o[c] = (O)(end.weight_Oi * Oi[x] + (o_in ? end.weight_o_in * o_in[c] : 0.f));
}

// Of one head's rows from i to end, which have met the same tiles of V, computes again those that only a hidden Inf or
// NaN has reached: o isn't finite, but q and the keys that the row sees are.
template <class T, class O>
__device__ void isolate(const Attention &a, const Ranges &ranges, int64_t b, int64_t h, int i, int end) {
    const int64_t h_kv = h / (a.Hq / a.Hkv);
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv), V(a, a.v, a.v_stride, b, h_kv);
    const auto is_key_finite = [&](int j) { return is_finite(K[j], a.d) && is_finite(V[j], a.d_v); };
    // The first and the last key with an Inf or NaN. A row that sees neither of them mostly sees none.
    const Keys any = ranges.tiles[i / kRangeTile].any;
    int first = any.begin;
    while (first < any.end && is_key_finite(first)) ++first;
    int last = max(first, any.end - 1);  // if the NaN lies behind `any`, both are any.end, which no row sees
    while (last > first && is_key_finite(last)) --last;
    for (; i < end; ++i) {
        const Keys keys = keys_of_row(ranges, i);
        const auto sees = [&](int j) { return keys.begin <= j && j < keys.end; };
        if (empty(keys) || sees(first) || sees(last)) continue;
        if (is_finite(row_of<O>(a.o, a.o_stride, b, h, i), a.d_v) ||
            !is_finite(row_of<T>(a.q, a.q_stride, b, h, i), a.d))
            continue;
        compute_alone<T, O>(a, ranges, b, h, i);
    }
}

template <class T, class O>
__global__ void __launch_bounds__(kThreads)
    isolate_rows(const __grid_constant__ Attention a, int rows_alike, int blocks_of_tile, int64_t first_block) {
    wait_for_kernel_before();
    const int64_t block = first_block + blockIdx.x, n = block / blocks_of_tile, b = n / range_tiles(a);
    const Ranges ranges = ranges_of(a, b);
    const int i0 = (int)(n % range_tiles(a)) * kRangeTile, i1 = min(i0 + kRangeTile, a.Nq);
    const int64_t first_head = block % blocks_of_tile * kWarps + threadIdx.x / 32;
    for (int64_t h = first_head; h < a.Hq; h += blocks_of_tile * kWarps)
        for (int i = i0; i < i1; ++i) {
            if (empty(keys_of_row(ranges, i))) continue;
            const int end = min(i / rows_alike * rows_alike + rows_alike, i1);  // of the rows that met the same tiles
            if (!is_finite(row_of<O>(a.o, a.o_stride, b, h, i), a.d_v)) {
                if (!is_finite(row_of<T>(a.q, a.q_stride, b, h, i), a.d)) continue;  // tells nothing of other rows
                isolate<T, O>(a, ranges, b, h, i, end);
            }
            i = end - 1;
        }
}

template <class T, class O>
cudaError_t launch(const Attention &a, int rows_alike, CUstream_st *stream) {
    const int blocks_of_tile = (int)std::min<int64_t>((a.Hq + kWarps - 1) / kWarps, 16);
    return launch_all(a.B * range_tiles(a) * blocks_of_tile, kMostBlocks, [&](int64_t first, int grid) {
        return launch_overlapping(isolate_rows<T, O>, grid, kThreads, 0, stream, a, rows_alike, blocks_of_tile, first);
    });
}

template <class T>
cudaError_t launch(const Attention &a, int rows_alike, CUstream_st *stream) {
    return a.o_dtype == Dtype::float32 ? launch<T, float>(a, rows_alike, stream) : launch<T, T>(a, rows_alike, stream);
}

}  // namespace

const char *isolate_rows_cuda(const Attention &a, int rows_alike, CUstream_st *stream) {
    return why_not(a.dtype == Dtype::float32   ? launch<float, float>(a, rows_alike, stream)
                   : a.dtype == Dtype::float16 ? launch<__half>(a, rows_alike, stream)
                                               : launch<__nv_bfloat16>(a, rows_alike, stream));
}

}  // namespace minimal_attn
