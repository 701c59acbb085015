// bias_sums.cuh: what the kernels of a bias's gradient share. A block owns a tile of the bias's numbers, and adds up
// the pairs of queries and keys that share one of them, over batches, heads, rows or keys.
#pragma once
#include "portable/common.cuh"

namespace minimal_attn {
namespace {

// The block's own one of n, or all n where the bias is broadcast.
struct Part {
    int begin, end;
    template <class Index, class Number>
    __device__ Part(Index &index, int64_t stride, const Number &n) {
        begin = stride ? (int)(index % n) : 0, end = stride ? begin + 1 : (int)n;
        if (stride) index = index / n;
    }
};

// Kahan's sum: a number may be shared by thousands of tiles.
struct Sum {
    float sum = 0.f, lost = 0.f;
    __device__ void add(float x) {
        const float y = x - lost, next = sum + y;
        lost = (next - sum) - y, sum = next;
    }
};

// Sums of the tile that begins at i0 and j0, in shared memory, to HBM: over all rows or keys where these are broadcast.
// Rows are padded by one number. All threads of the block call it.
template <class T, int Queries, int PaddedKeys>
__device__ void store_sums(const Gradient &g, const float (&sums)[Queries][PaddedKeys], int64_t b, int64_t h, int i0,
                           int j0) {
    constexpr int Keys = PaddedKeys - 1;
    const auto store = [&](int64_t to, float sum) {
        if (g.dbias_dtype == Dtype::float32)
            ((float *)g.dbias)[to] = sum;
        else
            convert(sum, ((T *)g.dbias)[to]);
    };
    const PairStrides &stride = g.dbias_stride;
    const int rows = stride.row ? min(Queries, g.a.Nq - i0) : 1, keys = stride.key ? min(Keys, g.a.Nk - j0) : 1;
    const int64_t head = b * stride.batch + h * stride.head;
    if (stride.row && stride.key) {  // the usual case: none is broadcast. A thread has 8 keys of a query
        const bool is_dense = stride.key == 1 && g.dbias_dtype != Dtype::float32 && sizeof(T) == 2 && keys == Keys &&
                              ((uintptr_t)g.dbias / 2 | (head + j0) | stride.row) % 8 == 0;
        for (int at = threadIdx.x; at < rows * (Keys / 8); at += blockDim.x) {
            const int row = at / (Keys / 8), key = at % (Keys / 8) * 8;
            const int64_t to = head + (i0 + row) * stride.row + (j0 + key) * stride.key;
            alignas(16) T eight[8];
#pragma unroll
            for (int x = 0; x < 8; ++x) convert(sums[row][key + x], eight[x]);
            if (is_dense) {
                *(uint4 *)((T *)g.dbias + to) = *(const uint4 *)eight;
            } else {
#pragma unroll
                for (int x = 0; x < 8; ++x)
                    if (key + x < keys) store(to + x * stride.key, sums[row][key + x]);
            }
        }
        return;
    }
    for (int at = threadIdx.x; at < rows * keys; at += blockDim.x) {
        const int row = at / keys, key = at % keys;
        Sum all;
        for (int x = stride.row ? row : 0; x < (stride.row ? row + 1 : Queries); ++x)
            for (int y = stride.key ? key : 0; y < (stride.key ? key + 1 : Keys); ++y) all.add(sums[x][y]);
        store(head + (i0 + row) * stride.row + (j0 + key) * stride.key, all.sum);
    }
}

}  // namespace
}  // namespace minimal_attn
