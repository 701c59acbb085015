// tf32.cuh: products of float32 matrices on tensor cores, for tf32.cu and tf32_backward.cu. Tensor cores multiply
// TF32s, which have 11 bits, so a float32 is a sum hi + lo of two, and a product is hi hi + hi lo + lo hi.
//
// Operands are split in registers: hi and lo in shared memory would take twice the reads. Tensor cores truncate sums,
// so a sum is short, and float32 additions, which round, join the sums.
#pragma once
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

// Tensor cores truncate sums: on an H100 dP, dV, dK and dQ would be 0.7 to 1.1 times 2^-23 too small on average. Other
// GPUs take the same factor.
constexpr float kUndoTruncation = 1 + 0x1p-23f;

// Whether tensor cores multiply float64 about as fast as float32: by data sheets of the A100, H100 and B200; elsewhere
// float64 has 1/64 of float32's speed.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr bool kFastFloat64 = true;
#else
constexpr bool kFastFloat64 = false;
#endif

// The type of the scores of large rows (gradient_rows.h). For float32 it is float64 where a GPU multiplies that fast:
// rounding a large score to float32 changes P too much.
template <class T>
using Score = std::conditional_t<std::is_same_v<T, float> && kFastFloat64, double, float>;

// Two operands that add up to x: hi is x rounded to 11 bits. lo is exact, and tensor cores ignore its last bit or none.
__device__ void split(float x, unsigned &hi, unsigned &lo) {
    hi = __float_as_uint(x) + 0x1000;  // tensor cores ignore the last 13 bits
    lo = __float_as_uint(x - __uint_as_float(hi & 0xffffe000));
}

// C += A B^T: 16 M rows of a tile with the first 8 N rows of another, both of D columns. A sum has 16 columns, and in
// each eight the small products come first. Columns past d are zeros; 32 that all are zeros are skipped.
// A: matrices 1 and 3 of lane_address lie 8 rows below. B: matrices 2 and 3 do.
template <int D, int M, int N>
__device__ void multiply_rows(float (&C)[M][N][4], unsigned A, unsigned B, int d) {
#pragma unroll 1
    for (int x0 = 0; x0 < min(d, D); x0 += 32)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum[M][N][4] = {};
#pragma unroll
            for (int x = 2 * half; x < 2 * half + 2; ++x) {
                unsigned a_hi[M][4], a_lo[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    unsigned a[4];
                    load_matrices(a, (A ^ 32 * x) + 4 * (x0 + 16 * m * D));
#pragma unroll
                    for (int e = 0; e < 4; ++e) split(__uint_as_float(a[e]), a_hi[m][e], a_lo[m][e]);
                }
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    unsigned b[4], b_hi[2][2], b_lo[2][2];
                    load_matrices(b, (B ^ 32 * x) + 4 * (x0 + 8 * n * D));
#pragma unroll
                    for (int e = 0; e < 4; ++e) split(__uint_as_float(b[e]), b_hi[e / 2][e % 2], b_lo[e / 2][e % 2]);
#pragma unroll
                    for (int y = 0; y < 2 * M; ++y) mma_tf32(sum[y % M][n + y / M], a_lo[y % M], b_hi[y / M]);
#pragma unroll
                    for (int y = 0; y < 2 * M; ++y) mma_tf32(sum[y % M][n + y / M], a_hi[y % M], b_lo[y / M]);
#pragma unroll
                    for (int y = 0; y < 2 * M; ++y) mma_tf32(sum[y % M][n + y / M], a_hi[y % M], b_hi[y / M]);
                }
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) C[m][n][e] += sum[m][n][e];
        }
}

// The same in float64: rows from A_row on of a swizzled tile, and from B_row on of another.
template <int D, int M, int N>
__device__ void multiply_rows_double(double (&C)[M][N][4], const float *A, int A_row, const float *B, int B_row,
                                     int d) {
#if __CUDA_ARCH__ >= 800
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int x = 0; x < min(d, D); x += 4) {
        const auto at = [&](const float *tile, int row) -> double {
            return tile[swizzle<D, float>(row + lane / 4, x / 4) + lane % 4];
        };
        double a[M][2], b[N];
#pragma unroll
        for (int m = 0; m < M; ++m) a[m][0] = at(A, A_row + 16 * m), a[m][1] = at(A, A_row + 16 * m + 8);
#pragma unroll
        for (int n = 0; n < N; ++n) b[n] = at(B, B_row + 8 * n);
#pragma unroll
        for (int y = 0; y < 2 * M * N; ++y) {
            double *const c = &C[y / 2 / N][y / 2 % N][y % 2 * 2];
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+d"(c[0]), "+d"(c[1])
                         : "d"(a[y / 2 / N][y % 2]), "d"(b[y / 2 % N]));
        }
    }
#endif
}

__device__ void load_floats(float (&x)[4], unsigned address) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address));
}

__device__ void load_floats(float (&x)[2], unsigned address) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address));
}

// Where this lane reads B of multiply_columns: row 2 (lane % 4) + y, and the lane's columns of the first group, which
// begins at column0.
template <int D, int XAtOnce>
__device__ unsigned lane_address_columns(const float *tile, int lane, int y, int column0 = 0) {
    const int row = lane % 4 * 2 + y, column = column0 + lane / 4 * XAtOnce;
    return lane_address<D>(tile, row, column / 4) + column % 4 * 4;
}

// A B: 16 M rows, Groups x XAtOnce eights of columns from 8 x0 on, a sum over K eights of rows of B, whose rows have D
// columns. One load reads a lane's XAtOnce neighbouring columns, one for each accumulator. of_A gives A in the order 0,
// 2, 4, 6, 1, 3, 5, 7 of each eight: so an accumulator is an operand. If Apart, hi hi has a sum of its own.
template <int D, int M, int K, int XAtOnce, int Groups, bool Apart, class OfA, class Add>
__device__ void multiply_columns(const unsigned (&B)[2], int x0, const OfA &of_A, const Add &add) {
    float large[M][Groups * XAtOnce][4] = {}, apart[M][Groups * XAtOnce][4] = {};
    auto &small = Apart ? apart : large;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        unsigned a_hi[M][4], a_lo[M][4];
        if (!Apart)
#pragma unroll
            for (int m = 0; m < M; ++m) of_A(k, m, a_hi[m], a_lo[m]);
#pragma unroll
        for (int g = 0; g < Groups * XAtOnce; g += XAtOnce) {
            float b[2][XAtOnce];
#pragma unroll
            for (int y = 0; y < 2; ++y)
                load_floats(b[y], (B[y] ^ 32 * (x0 + g) % 128) + 8 * k * D * 4 + 32 * (x0 + g) / 128 * 128);
            if (Apart)
#pragma unroll
                for (int m = 0; m < M; ++m) of_A(k, m, a_hi[m], a_lo[m]);
            unsigned b_hi[XAtOnce][2], b_lo[XAtOnce][2];
#pragma unroll
            for (int x = 0; x < XAtOnce; ++x)
#pragma unroll
                for (int y = 0; y < 2; ++y) split(b[y][x], b_hi[x][y], b_lo[x][y]);
#pragma unroll
            for (int y = 0; y < XAtOnce * M; ++y) mma_tf32(small[y % M][g + y / M], a_lo[y % M], b_hi[y / M]);
            if (Apart)
#pragma unroll
                for (int y = 0; y < XAtOnce * M; ++y) mma_tf32(large[y % M][g + y / M], a_hi[y % M], b_hi[y / M]);
#pragma unroll
            for (int y = 0; y < XAtOnce * M; ++y) mma_tf32(small[y % M][g + y / M], a_hi[y % M], b_lo[y / M]);
            if (!Apart)
#pragma unroll
                for (int y = 0; y < XAtOnce * M; ++y) mma_tf32(large[y % M][g + y / M], a_hi[y % M], b_hi[y / M]);
        }
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int x = 0; x < Groups * XAtOnce; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) add(m, x, e, Apart ? large[m][x][e] + small[m][x][e] : large[m][x][e]);
}

}  // namespace
}  // namespace minimal_attn
