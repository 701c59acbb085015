// backward.h: the kernels of the backward pass for float16 and bfloat16.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// For d up to 128: dK, dV and dQ by one kernel. The launch fills `rows`. Blocks add to dQ, in the plan's workspace, in
// any order, or if g.deterministic in order: the last keys of a head first.
Plan plan_fused(const Gradient &g, const Device &device);
const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream);

// For d above 128: dK and dV by one kernel, then dQ by another. Both read `rows`. The same bits on every run.
Plan plan_dK_dV(const Gradient &g, const Device &device);
const char *launch_dK_dV(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream);
const char *launch_dQ(const Gradient &g, const GradientRows &rows, int multiprocessors, CUstream_st *stream);

// dS^T (B, Hq, Nk, Nq) in q's dtype, rows padded for TMA, which the fused kernel stores for the gradient of a bias.
// Above kMostBytesOfdS portable/bias_gradient.cu computes it again.
constexpr int64_t kMostBytesOfdS = int64_t(4) << 30;
MINIMAL_ATTN_HOST_DEVICE inline Strides dS_stride(const Attention &a) {
    const int64_t row = (a.Nq + 7) / 8 * 8;
    return {a.Hq * a.Nk * row, a.Nk * row, row};
}
inline int64_t dS_bytes(const Attention &a) { return a.B * dS_stride(a).batch * 2; }
const char *launch_dS_sums(const Gradient &g, const void *dS, CUstream_st *stream);

}  // namespace minimal_attn::hopper
