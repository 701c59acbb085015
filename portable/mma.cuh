// mma.cuh: the tensor-core instructions of this folder. mma.sync multiplies, ldmatrix loads operands from shared
// memory. The rows of a tile are swizzled: the eight rows that ldmatrix reads together lie in different banks.
//
// A warp multiplies fragments of 16 x 16 (A) and 16 x 8 (B) and adds to one of 16 x 8 (C). Lane l holds
//
//     C[4]     row l / 4 (0, 1) and l / 4 + 8 (2, 3), columns l % 4 * 2 + 0, 1
//     A[4]     the same places, as pairs: columns 0 to 7 in A[0], A[1], columns 8 to 15 in A[2], A[3]
//     B[2]     column l / 4; rows l % 4 * 2 + 0, 1 in B[0], 8 more in B[1]
//
// so two C side by side, rounded to pairs, are one A: Pij never leaves the registers. For TF32 A is 16 x 8, B is 8 x 8,
// and a register of A or B holds one number where the table has a pair.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device.h"

namespace minimal_attn {
namespace {

// C += A B
template <class T>
__device__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, __half>)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // Turing: float16 alone, 8 columns of A at a time
    const unsigned b[2] = {b0, b1};
#pragma unroll
    for (int k = 0; k < 2; ++k)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

// C += A B of TF32s, float32s whose last 13 bits are ignored
__device__ inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four matrices of 8 x 8 pairs of bytes, or of 8 x 4 float32s. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(unsigned (&x)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

__device__ inline void load_matrices_transposed(unsigned (&x)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

// Where a tile with rows of D elements has the first element of a chunk of 16 bytes. Eight neighbouring rows have a
// chunk in eight different places: all 32 banks.
template <int D, class T>
__device__ int swizzle(int row, int chunk) {
    return row * D + (chunk ^ row % 8) * (16 / sizeof(T));
}

// This lane's address of row `row` and chunk `chunk`, for load_matrices. The other addresses follow from it: 8 rows
// further down add 8 * D elements, two chunks further right are an XOR with 32 bytes, eight chunks add 128.
template <int D, class T>
__device__ unsigned lane_address(const T *tile, int row, int chunk) {
    return (unsigned)__cvta_generic_to_shared(tile + swizzle<D, T>(row, chunk));
}

// 16 bytes to shared memory, or zeros. From sm_80 on the copy is asynchronous: wait_for_tiles waits for it.
__device__ inline void copy16(unsigned to, const void *from, bool exists) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
#else
    const uint4 x = exists ? *(const uint4 *)from : uint4{};
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
#endif
}

struct EachRow {
    __device__ bool operator()(int) const { return true; }
};

// Loads a tile of Rows x D into shared memory, swizzled, with zeros where row < first, row >= rows, column >= d or not
// is_read(row). Rows of Vj past seqlens_k must be zeros, since Pij = 0 times NaN is NaN.
template <int Rows, int D, int Threads, class T, class IsRead = EachRow>
__device__ void load_swizzled(T *tile, const T *source, int64_t stride, int rows, int d, bool aligned, int first = 0,
                              const IsRead &is_read = IsRead()) {
    constexpr int Chunk = 16 / sizeof(T), Chunks = D / Chunk, RowsAtOnce = Threads / Chunks;
    static_assert(Rows % RowsAtOnce == 0 && (RowsAtOnce & (RowsAtOnce - 1)) == 0);
    // What follows is computed for each tile: kept, it would take the registers into which d 128 loads operands ahead.
    const unsigned thread = D == 128 ? opaque(threadIdx.x) : threadIdx.x;
    const int row0 = thread / Chunks, chunk = thread % Chunks;
    const unsigned to = lane_address<D>(tile, row0, chunk);
    const T *const from = source + row0 * stride + Chunk * chunk;
    const int count = Chunk * chunk < d ? rows - row0 : 0, skipped = first > 0 ? first - row0 : 0;
    if (aligned) {
#pragma unroll
        for (int row = 0; row < Rows; row += RowsAtOnce)
            copy16((to + row * D * (int)sizeof(T)) ^ row % 8 * 16, from + row * stride,
                   (row >= skipped && row < count) & is_read(row0 + row));
    } else {
#pragma unroll 1
        for (int row = 0; row < Rows; row += RowsAtOnce)
#pragma unroll 1
            for (int x = 0; x < Chunk; ++x) {
                const bool exists = row >= skipped && row < count && Chunk * chunk + x < d && is_read(row0 + row);
                tile[swizzle<D, T>(row0 + row, chunk) + x] = exists ? from[row * stride + x] : T(0.f);
            }
    }
}

// A thread's part of the accumulators, as one array.
template <int M, int N>
__device__ float (&flat(float (&C)[M][N][4])) [M * N * 4] { return reinterpret_cast<float (&)[M * N * 4]>(C); }

}  // namespace
}  // namespace minimal_attn
