// isolate.cu: an Inf or NaN of one document reaches no other. Forward kernels multiply whole tiles of V, and where documents
// meet in a tile a hidden key's Pij is 0, but 0 times NaN is NaN. This kernel runs behind them. It looks at tiles of queries
// that have a border alone, and there at one row of those that have met the same tiles of V, in all columns. Where that row
// isn't finite, it computes all of them again, each of the keys that it sees. docs/ranges.md has more.
#include "device.h"
#include "ranges.h"

namespace minimal_attn {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMostColumns = 8;  // of a lane: d is at most 256

// Row i of o, a warp's: use(c, a reference to column c), for columns of this lane.
template <class O, class Use>
__device__ void for_columns(const Attention &a, int64_t b, int64_t h, int i, const Use &use) {
    O *const o = (O *)a.o + b * a.o_stride.batch + h * a.o_stride.head + i * a.o_stride.row;
#pragma unroll
    for (int x = 0; x < kMostColumns; ++x)
        if (const int c = 32 * x + threadIdx.x % 32; c < a.d) use(x, c, o[c]);
}

// Steps 8 to 13 for one row, by one warp. l and m stay: V has no part in them.
template <class T, class O>
__device__ void compute_alone(const Attention &a, const Ranges &ranges, int64_t b, int64_t h, int i) {
    const int64_t h_kv = h / (a.Hq / a.Hkv), bhi = (b * a.Hq + h) * a.Nq + i;
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv), V(a, a.v, a.v_stride, b, h_kv);
    const T *const q = (const T *)a.q + b * a.q_stride.batch + h * a.q_stride.head + i * a.q_stride.row;
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
    const Strides &stride = a.o_in_stride;
    for_columns<O>(a, b, h, i, [&](int x, int c, O &o) {
        float sum = end.weight_Oi * Oi[x];
        if (a.o_in && end.reads_o_in)
            sum += end.weight_o_in * a.o_in[b * stride.batch + h * stride.head + i * stride.row + c];
        o = (O)sum;
    });
}

// A block has a tile of 64 queries, a warp some of the heads.
template <class T, class O>
__global__ void __launch_bounds__(kThreads)
    isolate_rows(const __grid_constant__ Attention a, int rows_alike, int blocks_of_tile, int64_t first_block) {
    wait_for_kernel_before();
    const int64_t block = first_block + blockIdx.x, n = block / blocks_of_tile, b = n / range_tiles(a);
    const Ranges ranges = ranges_of(a, b);
    const int tile = (int)(n % range_tiles(a)), i0 = tile * kRangeTile;
    if (!ranges.tiles[tile].has_border) return;
    const int64_t first_head = block % blocks_of_tile * kWarps + threadIdx.x / 32;
    for (int64_t h = first_head; h < a.Hq; h += blocks_of_tile * kWarps)
        for (int i = i0; i < min(i0 + kRangeTile, a.Nq);) {
            const bool is_blind = empty(keys_of_row(ranges, i));
            bool is_finite = true;
            if (!is_blind) for_columns<O>(a, b, h, i, [&](int, int, O &o) { is_finite &= isfinite((float)o); });
            const int end =
                is_blind ? i + 1 : i / rows_alike * rows_alike + rows_alike;  // rows that this one speaks for
            if (!__all_sync(~0u, is_finite))
                for (; i < min(end, a.Nq); ++i)
                    if (!empty(keys_of_row(ranges, i))) compute_alone<T, O>(a, ranges, b, h, i);
            i = end;
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
