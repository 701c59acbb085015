// gradient.h: what the backward kernels of half types have in common: their parameters, and how they store gradients.
#pragma once
#include "hopper/backward.h"
#include "hopper/epilogue.h"
#include "hopper/half.h"
#include "hopper/launch.h"
#include "scores.h"

namespace minimal_attn::hopper {

// dP less D, after dropout, which leaves `of_kept` (hopper/dropped.h).
template <class T>
__device__ float dP_less_D(float dP, float D, float of_kept) {
    return fmaf(dP, of_kept * (kScalesP<T> ? 1.f / kPScale<T> : 1.f), -D);
}

// dQ, dK or dV, in T or float32.
struct GradientTensor {
    void *data;
    Strides stride;
    Dtype dtype;
    bool aligned;  // rows begin and end at multiples of 16 bytes
};

struct GradientParameters : Parameters {
    TensorMap dO;
    GradientTensor dq, dk, dv;
    GradientRows rows;
    float c;  // softmax_scale log2(e)
};

// All but the tensor maps and what launch_kernels sets.
inline GradientParameters gradient_parameters(const Gradient &g, const GradientRows &rows) {
    const auto tensor = [&](void *data, const Strides &stride, int d) -> GradientTensor {
        return {data, stride, g.out_dtype, is_aligned(data, stride, element_size(g.out_dtype), d)};
    };
    GradientParameters p{g.a};
    p.dq = tensor(g.dq, g.dq_stride, g.a.d), p.dk = tensor(g.dk, g.dk_stride, g.a.d);
    p.dv = tensor(g.dv, g.dv_stride, g.a.d_v);
    p.rows = rows, p.c = g.a.softmax_scale * kLog2e;
    return p;
}

// Stores factor times an accumulator to rows i and i + 8 of head h, if they are below `rows`. A row becomes 0 where
// counts(i) is false: a query that sees no key, or a key that no query sees.
template <class T, int Count, class Counts>
__device__ void store_gradient(const GradientTensor &to, int b, int h, int i, int rows, int d, float factor,
                               const float (&x)[Count], const Counts &counts) {
    const int first = threadIdx.x % 4 * 2;  // of a thread's columns, in float32
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        const int64_t row = b * to.stride.batch + h * to.stride.head + i * to.stride.row;
        const int columns = i < rows ? d : 0;
        const float weight = counts(i) ? factor : 0.f;
        const auto two = [&](int n) {
            return weight == 0.f ? float2{} : float2{weight * x[4 * n + 2 * r], weight * x[4 * n + 2 * r + 1]};
        };
        if (to.dtype == Dtype::float32)
            store_row<Count / 2>((float *)to.data + row + first, columns - first, to.aligned, two);
        else
            store_half_row<Count / 2>((T *)to.data + row, columns, to.aligned,
                                      [&](int n) { return pack<T>(two(n).x, two(n).y); });
    }
}

}  // namespace minimal_attn::hopper
