// rows_tile.cuh: a tile of S^T = Kj Qi^T and one of dP^T = Vj dOi^T, by a block of 256 threads, for large_rows.cu and
// bias_gradient.cu. The scores have the bits that backward kernels have. In add_product each 64 columns of d are loaded
// behind one __syncthreads (all have read the ones before) and multiplied behind wait_for_tiles (they have arrived).
//
// Uses half_gradient.cuh: multiply; tf32.cuh: multiply_rows, multiply_rows_double; mma.cuh: load_swizzled,
// lane_address; common.cuh: wait_for_tiles.
#pragma once
#include "portable/half_gradient.cuh"
#include "portable/tf32.cuh"

namespace minimal_attn {
namespace {

struct RowsTile {
    static constexpr int D = 64, Br = 64, Bc = 64, Threads = 256;  // D: columns in shared memory at a time
    static constexpr int KeyWarps = 2, QueryWarps = 4;
    static constexpr int M = Bc / KeyWarps / 16, N = Br / QueryWarps / 8;  // a warp's accumulators of S^T, 16 x 8 each
    static constexpr int Columns = 2 * N, Keys = 2 * M;                    // queries and keys of a thread
};
template <class T>
constexpr int kRowsBytes = (RowsTile::Br + RowsTile::Bc) * RowsTile::D * sizeof(T);  // 32 KB in float32

// Whether tensor cores multiply T, float32 as TF32s. Else FMA units do.
template <class T>
__device__ constexpr bool has_products() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return std::is_same_v<T, __half>;
#else
    return true;
#endif
}

// C += A B^T on FMA units: rows from key0 and from query0 on of swizzled tiles.
template <class T>
__device__ void add_by_fma(float (&C)[RowsTile::M][RowsTile::N][4], const T *key_tile, int key0, const T *query_tile,
                           int query0, int d) {
    constexpr int D = RowsTile::D, Chunk = 16 / sizeof(T);
    const int lane = threadIdx.x % 32;
    const auto at = [](const T *tile, int row, int x) {
        return (float)tile[swizzle<D, T>(row, x / Chunk) + x % Chunk];
    };
#pragma unroll 1
    for (int x = 0; x < min(d, D); ++x) {
        float k[RowsTile::Keys], q[RowsTile::Columns];
#pragma unroll
        for (int r = 0; r < RowsTile::Keys; ++r) k[r] = at(key_tile, key0 + 8 * r + lane / 4, x);
#pragma unroll
        for (int c = 0; c < RowsTile::Columns; ++c) q[c] = at(query_tile, query0 + c / 2 * 8 + lane % 4 * 2 + c % 2, x);
#pragma unroll
        for (int r = 0; r < RowsTile::Keys; ++r)
#pragma unroll
            for (int c = 0; c < RowsTile::Columns; ++c) {
                float &sum = C[r / 2][c / 2][r % 2 * 2 + c % 2];
                sum = fmaf(k[r], q[c], sum);
            }
    }
}

// Rows of a head of a (B, H, N, d) tensor, of which `count` exist.
template <class T>
struct HeadRows {
    const T *first;
    int64_t stride;
    int count;
    __device__ HeadRows(const void *x, const Strides &s, int64_t b, int64_t h, int row, int end)
        : first((const T *)x + b * s.batch + h * s.head + row * s.row), stride(s.row), count(end - row) {}
};

// C += A B^T: this warp's keys of K or V, and its queries of Q or dO.
template <class T, class Sum>
__device__ void add_product(Sum (&C)[RowsTile::M][RowsTile::N][4], const HeadRows<T> &keys, const HeadRows<T> &queries,
                            int d, bool aligned) {
    constexpr int D = RowsTile::D, Threads = RowsTile::Threads;
    extern __shared__ __align__(128) unsigned char shared[];
    T *const key_tile = (T *)shared, *const query_tile = key_tile + RowsTile::Bc * D;
    const int warp = broadcast_lane0(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int key0 = warp / RowsTile::QueryWarps * 16 * RowsTile::M;
    const int query0 = warp % RowsTile::QueryWarps * 8 * RowsTile::N;
#pragma unroll 1
    for (int x0 = 0; x0 < d; x0 += D) {
        __syncthreads();
        load_swizzled<RowsTile::Bc, D, Threads>(key_tile, keys.first + x0, keys.stride, keys.count, d - x0, aligned);
        load_swizzled<RowsTile::Br, D, Threads>(query_tile, queries.first + x0, queries.stride, queries.count, d - x0,
                                                aligned);
        wait_for_tiles();
        const unsigned A = lane_address<D>(key_tile, key0 + lane % 16, lane / 16);
        const unsigned B = lane_address<D>(query_tile, query0 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
        if constexpr (!has_products<T>())
            add_by_fma<T>(C, key_tile, key0, query_tile, query0, d - x0);
        else if constexpr (std::is_same_v<Sum, double>)
            multiply_rows_double<D>(C, key_tile, key0, query_tile, query0, d - x0);
        else if constexpr (std::is_same_v<T, float>)
            multiply_rows<D>(C, A, B, d - x0);
        else
            multiply<T, RowsTile>(C, A, B);
    }
}

}  // namespace
}  // namespace minimal_attn
