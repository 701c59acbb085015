// gradient_rows.cu: lse, D and counters before a backward pass, and dq = scale * dQ after it. Both are bound by
// memory: eight neighbouring threads share a row, and each reads 16 bytes at a time.
#include "portable/gradient_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 256, kLanes = 8, kRows = kThreads / kLanes;  // of a block; rows of one head
static_assert(kGradientRows % kRows == 0 && kRows == kCounterRows);

template <class T>
struct alignas(16) Chunk {
    static constexpr int N = 16 / sizeof(T);
    T x[N];
};

// Where this thread is: row i of head h in batch b, of all rows with their padding.
struct Place {
    int64_t b, h, row;
    int i, lane;
    __device__ Place(const Attention &a, int64_t head_stride) {
        const int64_t first = blockIdx.x * int64_t(kRows), head = first / head_stride;
        b = head / a.Hq, h = head % a.Hq;
        i = (int)(first - head * head_stride) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
        row = first + threadIdx.x / kLanes;
    }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_rows(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, bool aligned) {
    constexpr int N = Chunk<T>::N;
    const Attention &a = g.a;
    const Place at(a, rows.head_stride);
    const bool counts = at.i < a.Nq && !empty(keys_of_row(band_of(a, at.b), at.i));
    const T *const O = (const T *)g.o + at.b * g.o_stride.batch + at.h * g.o_stride.head + at.i * g.o_stride.row;
    const T *const dO = (const T *)g.do_ + at.b * g.do_stride.batch + at.h * g.do_stride.head + at.i * g.do_stride.row;
    float sum = 0.f;
    if (counts && aligned) {
#pragma unroll 4
        for (int x = N * at.lane; x < a.d; x += N * kLanes) {
            const Chunk<T> o = *(const Chunk<T> *)(O + x), d_o = *(const Chunk<T> *)(dO + x);
#pragma unroll
            for (int n = 0; n < N; ++n) sum = fmaf((float)o.x[n], (float)d_o.x[n], sum);
        }
    } else if (counts) {
        for (int x = at.lane; x < a.d; x += kLanes) sum = fmaf((float)O[x], (float)dO[x], sum);
    }
    sum = row_sum<kLanes>(sum);
    if (threadIdx.x == 0) rows.counters[blockIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) rows.counters[gridDim.x] = 0;
    if (at.lane != 0) return;
    const int64_t dense = (at.b * a.Hq + at.h) * a.Nq + at.i;  // the row in lse and dlse
    if (counts && g.dlse) sum -= g.dlse[dense];
    rows.lse[at.row] = counts ? g.lse[dense] * kLog2e : INFINITY;
    rows.D[at.row] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) convert_rows(const __grid_constant__ Gradient g, const float *dQ,
                                                         int64_t head_stride, int D, float scale, bool aligned) {
    constexpr int N = Chunk<T>::N;
    const Place at(g.a, head_stride);
    if (at.i >= g.a.Nq) return;
    const bool counts = !empty(keys_of_row(band_of(g.a, at.b), at.i));
    T *const dq = (T *)g.dq + at.b * g.dq_stride.batch + at.h * g.dq_stride.head + at.i * g.dq_stride.row;
    const float *const from = dQ + at.row * D;
    if (aligned) {
#pragma unroll 4
        for (int x = N * at.lane; x < g.a.d; x += N * kLanes) {
            Chunk<T> to;
#pragma unroll
            for (int n = 0; n < N; n += 4) {
                const float4 four = counts ? *(const float4 *)(from + x + n) : float4{};
                to.x[n] = (T)(scale * four.x), to.x[n + 1] = (T)(scale * four.y);
                to.x[n + 2] = (T)(scale * four.z), to.x[n + 3] = (T)(scale * four.w);
            }
            *(Chunk<T> *)(dq + x) = to;
        }
    } else {
        for (int x = at.lane; x < g.a.d; x += kLanes) dq[x] = (T)(counts ? scale * from[x] : 0.f);
    }
}

// One block for each kRows rows: their memory would be beyond any GPU's before the grid is.
unsigned blocks_of(const Attention &a) { return (unsigned)(a.B * a.Hq * padded_rows(a) / kRows); }

template <class T>
cudaError_t fill(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    const bool aligned =
        is_aligned(g.o, g.o_stride, sizeof(T), g.a.d) && is_aligned(g.do_, g.do_stride, sizeof(T), g.a.d);
    fill_rows<T><<<blocks_of(g.a), kThreads, 0, stream>>>(g, rows, aligned);
    return cudaGetLastError();
}

template <class T>
cudaError_t convert(const Gradient &g, const float *dQ, int D, float scale, CUstream_st *stream) {
    const bool aligned = is_aligned(g.dq, g.dq_stride, sizeof(T), g.a.d);
    convert_rows<T><<<blocks_of(g.a), kThreads, 0, stream>>>(g, dQ, padded_rows(g.a), D, scale, aligned);
    return cudaGetLastError();
}

}  // namespace

int64_t gradient_rows_bytes(const Gradient &g) {
    const int64_t rows = g.a.B * g.a.Hq * padded_rows(g.a);
    return (rows * 2 + rows / kCounterRows + 1 + 63) / 64 * 256;
}

GradientRows gradient_rows_in(const Gradient &g, void *workspace) {
    const int64_t rows = g.a.B * g.a.Hq * padded_rows(g.a);
    float *const lse = (float *)workspace;
    return {lse, lse + rows, padded_rows(g.a), (int *)(lse + 2 * rows)};
}

const char *launch_gradient_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    if (g.a.dtype == Dtype::float32) return why_not(fill<float>(g, rows, stream));
    if (g.a.dtype == Dtype::float16) return why_not(fill<__half>(g, rows, stream));
    return why_not(fill<__nv_bfloat16>(g, rows, stream));
}

const char *launch_convert_dq(const Gradient &g, const float *dQ, int D, float scale, CUstream_st *stream) {
    if (g.out_dtype == Dtype::float32) return why_not(convert<float>(g, dQ, D, scale, stream));
    if (g.out_dtype == Dtype::float16) return why_not(convert<__half>(g, dQ, D, scale, stream));
    return why_not(convert<__nv_bfloat16>(g, dQ, D, scale, stream));
}

}  // namespace minimal_attn
