// gradient.h: what the backward kernels of half types have in common.
#pragma once
#include "hopper/backward.h"
#include "hopper/epilogue.h"
#include "hopper/products.h"

namespace minimal_attn::hopper {

// dQ, dK or dV: the rows of one head, in T or float32.
struct GradientTile {
    void *tensor;
    int64_t offset, row_stride;  // of the head's first row, in elements
    Dtype dtype;
    bool aligned;  // rows begin and end at multiples of 16 bytes
};

// Stores rows i and i + 8 of factor * x, x an accumulator. Row r of the two is stored if r < rows - i, and 0 if it
// doesn't count.
template <class T, int Count, class Counts>
__device__ void store_gradient(const GradientTile &to, int i, int rows, int d, const float (&x)[Count], float factor,
                               const Counts &counts) {
    const int64_t at = to.offset + i * to.row_stride;
    const auto columns = [&](int r) { return i + 8 * r < rows ? d : 0; };
    const bool are_counted[2] = {counts(i), counts(i + 8)};
    if (to.dtype != Dtype::float32) {
        store_pairs<T, Count>((T *)to.tensor + at, to.row_stride, to.aligned, columns, [&](int r) {
            return [&, r](int n) {
                return are_counted[r] ? pack<T>(factor * x[4 * n + 2 * r], factor * x[4 * n + 2 * r + 1]) : 0;
            };
        });
        return;
    }
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        store_row<Count / 2>((float *)to.tensor + at + 8 * r * to.row_stride + first, columns(r) - first, to.aligned,
                             [&](int n) {
                                 const float *const two = &x[4 * n + 2 * r];
                                 return are_counted[r] ? float2{factor * two[0], factor * two[1]} : float2{};
                             });
}

}  // namespace minimal_attn::hopper
