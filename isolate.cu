// isolate.cu: an Inf or NaN of one document reaches no other. Forward kernels multiply whole tiles of V. A hidden key's Pij
// is 0, but 0 times NaN is NaN. This kernel runs behind them. It looks at one row of those that have met the same tiles of
// V: o isn't finite there if they have met a NaN, in all columns that it was in. Then it computes these rows again, each of
// the keys that it sees, but for those that see an Inf or NaN themselves. docs/ranges.md has more.
#include "device.h"
#include "ranges.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMostColumns = 8;  // of a lane: d is at most 256

template <class T>
__device__ T *row_of(void *tensor, const Strides &stride, int64_t b, int64_t h, int i) {
    return (T *)tensor + b * stride.batch + h * stride.head + i * stride.row;
}
template <class T>
__device__ const T *row_of(const void *tensor, const Strides &stride, int64_t b, int64_t h, int i) {
    return row_of<const T>(const_cast<void *>(tensor), stride, b, h, i);
}

// Of a row of d numbers, by a warp.
template <class T>
__device__ bool is_finite(const T *row, int d) {
    bool all = true;
#pragma unroll
    for (int x = 0; x < kMostColumns; ++x)
        if (const int c = 32 * x + threadIdx.x % 32; c < d) all &= isfinite((float)row[c]);
    return __all_sync(~0u, all);
}

// Steps 8 to 13 for one row, by one warp. l and m stay: V has no part in them.
template <class T, class O>
__device__ void compute_alone(const Attention &a, const Ranges &ranges, int64_t b, int64_t h, int i) {
    const int64_t h_kv = h / (a.Hq / a.Hkv), bhi = (b * a.Hq + h) * a.Nq + i;
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv), V(a, a.v, a.v_stride, b, h_kv);
    const T *const q = row_of<T>(a.q, a.q_stride, b, h, i);
    const Keys keys = keys_of_row(ranges, i);
    const int lane = threadIdx.x % 32;
    float Oi[kMostColumns] = {}, mi = -INFINITY, li = 0.f;
    for (int j0 = keys.begin; j0 < keys.end; j0 += 32) {  // lane n has key j0 + n
        const int count = min(keys.end - j0, 32);
        float S = 0.f;
        if (lane < count)
            for (int c = 0; c < a.d; ++c) S = fmaf((float)q[c], (float)K[j0 + lane][c], S);
        S = lane < count ? a.softmax_scale * S : -INFINITY;
        const float m = fmaxf(mi, row_max<32>(S)), origin = m == -INFINITY ? 0.f : m;
        const float P = lane < count ? expf(S - origin) : 0.f, alpha = expf(mi - origin);
        mi = m, li = alpha * li + row_sum<32>(P);
#pragma unroll
        for (int x = 0; x < kMostColumns; ++x) Oi[x] *= alpha;
        for (int n = 0; n < count; ++n) {
            const float Pij = __shfl_sync(~0u, P, n);
            const T *const v = V[j0 + n];
#pragma unroll
            for (int x = 0; x < kMostColumns; ++x)
                if (32 * x + lane < a.d) Oi[x] = fmaf(Pij, (float)v[32 * x + lane], Oi[x]);
        }
    }
    const RowEnd end = end_of_row(true, li, mi, a.o_in ? a.l_in[bhi] : 0.f, a.o_in ? a.m_in[bhi] : -INFINITY);
    const float *const o_in = a.o_in && end.reads_o_in ? row_of<float>(a.o_in, a.o_in_stride, b, h, i) : nullptr;
    O *const o = row_of<O>(a.o, a.o_stride, b, h, i);
#pragma unroll
    for (int x = 0; x < kMostColumns; ++x)
        if (const int c = 32 * x + lane; c < a.d)
            o[c] = (O)(end.weight_Oi * Oi[x] + (o_in ? end.weight_o_in * o_in[c] : 0.f));
}

// Rows from i to end of one head, which have met the same tiles of V, where o isn't finite.
template <class T, class O>
__device__ void isolate(const Attention &a, const Ranges &ranges, int64_t b, int64_t h, int i, int end) {
    const int64_t h_kv = h / (a.Hq / a.Hkv);
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv), V(a, a.v, a.v_stride, b, h_kv);
    const auto is_good = [&](int j) { return is_finite(K[j], a.d) && is_finite(V[j], a.d); };
    // Mostly a row that sees a bad key sees the first or the last one.
    const Keys any = ranges.tiles[i / kRangeTile].any;
    int first = any.begin;
    while (first < any.end && is_good(first)) ++first;
    int last = max(first, any.end - 1);  // no row sees any.end: then all keys are good, and the bad ones behind them
    while (last > first && is_good(last)) --last;
    for (; i < end; ++i) {
        const Keys keys = keys_of_row(ranges, i);
        const auto sees = [&](int j) { return keys.begin <= j && j < keys.end; };
        if (empty(keys) || sees(first) || sees(last)) continue;
        if (is_finite(row_of<O>(a.o, a.o_stride, b, h, i), a.d) || !is_finite(row_of<T>(a.q, a.q_stride, b, h, i), a.d))
            continue;
        compute_alone<T, O>(a, ranges, b, h, i);
    }
}

// A block has a tile of 64 queries, a warp some of the heads.
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
            const int end = min(i / rows_alike * rows_alike + rows_alike, i1);  // of the rows that this one speaks for
            if (!is_finite(row_of<O>(a.o, a.o_stride, b, h, i), a.d)) {
                if (!is_finite(row_of<T>(a.q, a.q_stride, b, h, i), a.d)) continue;  // it speaks for itself alone
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
