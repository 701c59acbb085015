// gradient_rows.cu: the kernel that computes log2_l and D of each row before a backward pass. It is bound by memory.
#include "portable/gradient_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.h"
#include "ranges.h"
#include "scores.h"

namespace minimal_attn {
namespace {

// Eight neighbouring threads share kCount rows, kStep apart, so that enough loads are in flight.
constexpr int kThreads = 256, kLanes = 8, kStep = kThreads / kLanes, kCount = 2, kRows = kCount * kStep;
static_assert(kGradientRows % kRows == 0 && kCount <= kLanes);

template <class T, int N>
struct alignas(N * sizeof(T)) Chunk {
    T x[N];
};

// Loads what nothing reads again, so not into the L1 cache: 53 us instead of 57 for 16384 tokens of 16 heads, d 128, on
// an H100.
template <class T, int N>
__device__ Chunk<T, N> load_once(const T *from) {
    if constexpr (N == 1) {
        return {*from};
    } else {
        uint4 x;
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
            : "l"(from));
        return *(const Chunk<T, N> *)&x;
    }
}

// Adds this thread's products of rowsum(dO o O) to sum, N columns at a time. O and dO point to its first row.
template <int N, class T>
__device__ void add_products(float (&sum)[kCount], const bool (&is_seen)[kCount], int d, const T *O, int64_t O_row,
                             const T *dO, int64_t dO_row) {
#pragma unroll 1
    for (int x = threadIdx.x % kLanes * N; x < d; x += N * kLanes) {
        Chunk<T, N> o[kCount] = {}, d_o[kCount] = {};
#pragma unroll
        for (int r = 0; r < kCount; ++r)
            if (is_seen[r]) {
                o[r] = load_once<T, N>(O + r * kStep * O_row + x);
                d_o[r] = load_once<T, N>(dO + r * kStep * dO_row + x);
            }
#pragma unroll
        for (int r = 0; r < kCount; ++r)
#pragma unroll
            for (int n = 0; n < N; ++n) sum[r] = fmaf((float)o[r].x[n], (float)d_o[r].x[n], sum[r]);
    }
}

template <class T, class Mask>
__global__ void __launch_bounds__(kThreads)
    fill_rows(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, bool aligned) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const Attention &a = g.a;
    const unsigned blocks = rows.head_stride / kRows, head = blockIdx.x / blocks, lane = threadIdx.x % kLanes;
    const int b = head / unsigned(a.Hq), h = head % unsigned(a.Hq);
    const int i0 = blockIdx.x % blocks * kRows + threadIdx.x / kLanes;
    const Mask mask = mask_of<Mask>(a, b);
    const auto sees_key = [&](int i) {
        const bool sees = i < a.Nq && !empty(keys_of_row(mask, i));
        if (!kIsGeneral<Mask> || !has_terms(a)) return sees;
        return sees && g.lse[int64_t(head) * a.Nq + i] != -INFINITY;  // else terms hide all of its keys
    };
    float sum[kCount] = {};
    bool is_seen[kCount];
#pragma unroll
    for (int r = 0; r < kCount; ++r) is_seen[r] = sees_key(i0 + r * kStep);
    // A row's sum is stored by one of its threads, which reads lse before anything else waits for memory.
    const int i = i0 + lane * kStep;
    const bool stores = lane < kCount, counts = stores && sees_key(i);
    const int64_t dense = int64_t(head) * a.Nq + i;  // the row in lse and dlse
    const float log2_l = log2_l_of<T>(a, counts ? g.lse[dense] : INFINITY);
    const float dlse = counts && g.dlse ? g.dlse[dense] : 0.f;
    const T *const O = (const T *)g.o + b * g.o_stride.batch + h * g.o_stride.head + i0 * g.o_stride.row;
    const T *const dO = (const T *)g.do_ + b * g.do_stride.batch + h * g.do_stride.head + i0 * g.do_stride.row;
    if (aligned)
        add_products<16 / sizeof(T)>(sum, is_seen, a.d_v, O, g.o_stride.row, dO, g.do_stride.row);
    else
        add_products<1>(sum, is_seen, a.d_v, O, g.o_stride.row, dO, g.do_stride.row);
    float D = 0.f;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
        const float whole = row_sum<kLanes>(sum[r]);
        if (lane == r) D = D_of_dS<T>(whole - dlse);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *rows.tile_counter = *rows.any_large = 0;
    if (!stores) return;
    const int64_t padded = head * rows.head_stride + i;
    if (rows.m) rows.m[padded] = 0.f;
    rows.log2_l[padded] = log2_l, rows.D[padded] = D;
}

template <class T>
cudaError_t fill(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    const bool aligned =
        is_aligned(g.o, g.o_stride, sizeof(T), g.a.d_v) && is_aligned(g.do_, g.do_stride, sizeof(T), g.a.d_v);
    // No GPU has memory for as many rows as would make the grid too large.
    const unsigned blocks = g.a.B * g.a.Hq * rows.head_stride / kRows;
    return with_mask_and_scores(g.a, [&](auto mask) {
        return launch_overlapping(fill_rows<T, decltype(mask)>, blocks, kThreads, 0, stream, g, rows, aligned);
    });
}

// The workspace: log2_l, D, then m or `large`, then the two ints.
int64_t bytes_of_m_or_large(const Gradient &g) {
    const int64_t of_row = g.a.dtype == Dtype::float32 ? sizeof(LargeRow) : sizeof(float);
    return g.a.B * g.a.Hq * padded_rows(g.a) * of_row;
}

}  // namespace

int64_t gradient_rows_bytes(const Gradient &g) {
    const int64_t rows = g.a.B * g.a.Hq * padded_rows(g.a);
    return (rows * 8 + bytes_of_m_or_large(g) + 8 + 255) / 256 * 256;
}

GradientRows gradient_rows_in(const Gradient &g, void *workspace) {
    const int64_t rows = g.a.B * g.a.Hq * padded_rows(g.a);
    float *const log2_l = (float *)workspace, *const D = log2_l + rows, *const m_or_large = D + rows;
    const bool is_float32 = g.a.dtype == Dtype::float32;
    float *const m = is_float32 ? nullptr : m_or_large;
    LargeRow *const large = is_float32 ? (LargeRow *)m_or_large : nullptr;
    int *const counter = (int *)((char *)m_or_large + bytes_of_m_or_large(g));
    return {m, log2_l, D, large, padded_rows(g.a), counter, counter + 1};
}

const char *launch_gradient_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream) {
    if (g.a.dtype == Dtype::float32) return why_not(fill<float>(g, rows, stream));
    if (g.a.dtype == Dtype::float16) return why_not(fill<__half>(g, rows, stream));
    return why_not(fill<__nv_bfloat16>(g, rows, stream));
}

}  // namespace minimal_attn
