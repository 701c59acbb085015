// gradient.h: what the backward kernels of half types have in common.
#pragma once
#include "hopper/backward.h"
#include "hopper/epilogue.h"
#include "hopper/half.h"

namespace minimal_attn::hopper {

// dQ, dK or dV, in T or float32.
struct GradientTensor {
    void *data;
    Strides stride;
    Dtype dtype;
    bool aligned;  // rows begin and end at multiples of 16 bytes
};

inline GradientTensor gradient_tensor(const Gradient &g, void *data, const Strides &stride) {
    return {data, stride, g.out_dtype, is_aligned(data, stride, element_size(g.out_dtype), g.a.d)};
}

// Stores factor times an accumulator to rows i and i + 8 of head h, if they are below `rows`. Rows where counts(i) is
// false become 0.
template <class T, int Count, class Counts>
__device__ void store_gradient(const GradientTensor &to, int b, int h, int i, int rows, int d, float factor,
                               const float (&x)[Count], const Counts &counts) {
    const int quad = threadIdx.x % 4, of_floats = quad * 2, of_halves = quad % 2 * 8 + quad / 2 * 4;
    const bool odd = quad % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        const int64_t row = b * to.stride.batch + h * to.stride.head + i * to.stride.row;
        const int columns = i < rows ? d : 0;
        const float weight = counts(i) ? factor : 0.f;
        const auto two = [&](int n) {
            return weight == 0.f ? float2{} : float2{weight * x[4 * n + 2 * r], weight * x[4 * n + 2 * r + 1]};
        };
        if (to.dtype == Dtype::float32) {
            store_row<Count / 2>((float *)to.data + row + of_floats, columns - of_floats, to.aligned, two);
            continue;
        }
        store_row<Count / 2>((T *)to.data + row + of_halves, columns - of_halves, to.aligned, [&](int n) {
            const uint32_t even_block = pack<T>(two(2 * n).x, two(2 * n).y);
            const uint32_t odd_block = pack<T>(two(2 * n + 1).x, two(2 * n + 1).y);
            const uint32_t received = __shfl_xor_sync(~0u, odd ? even_block : odd_block, 1);  // as in store_O
            return odd ? uint2{received, odd_block} : uint2{even_block, received};
        });
    }
}

}  // namespace minimal_attn::hopper
