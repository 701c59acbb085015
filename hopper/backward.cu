// backward.cu: the backward pass of float16 and bfloat16 on Hopper. Its kernels:
//
//     backward_fused.cu    d up to 128: dK, dV and dQ in one kernel; another one for large rows, and ranges that don't grow
//     bias_gradient.cu     d up to 128: then the gradient of a bias, from the dS that the fused kernel stores
//     backward_dk_dv.cu    d above 128: dK and dV
//     backward_dq.cu       d above 128: then dQ
//
// portable/gradient_rows.cu computes log2_l and D of the rows before, unless the fused kernel does, and large_rows.cu
// those of large rows. The workspace begins with them (gradient_rows.h). Behind them a kernel may have more (its
// Workspace).
#include "hopper/backward.h"

namespace minimal_attn::hopper {

// Not heads of at most 64 queries with d up to 128: the fused kernel pads dQ, float32, to kGradientRows rows a head,
// which would be ten times the memory of q, or more.
bool serves_backward(const Gradient &g) {
    return g.a.dtype != Dtype::float32 && (most_columns(g.a) > 128 || g.a.Nq > 64);
}

bool sums_bias(const Gradient &g) { return most_columns(g.a) <= 128 && dS_bytes(g.a) <= kMostBytesOfdS; }

Plan plan_half_backward(const Gradient &g, const Device &device) {
    Plan plan = most_columns(g.a) <= 128 ? plan_fused(g, device) : plan_dK_dV(g, device);
    plan.workspace += gradient_rows_bytes(g);
    return plan;
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const GradientRows rows = gradient_rows_in(g, workspace);
    void *const behind_rows = (char *)workspace + gradient_rows_bytes(g);
    if (most_columns(g.a) <= 128) return launch_fused(g, rows, plan, behind_rows, stream);
    const char *why = launch_gradient_rows(g, rows, stream);
    if (!why) why = launch_large_rows(g, rows, stream);
    if (!why) why = launch_dK_dV(g, rows, plan, behind_rows, stream);
    // dQ right behind, since it runs beside the end of dK and dV.
    return why ? why : launch_dQ(g, rows, plan.multiprocessors, stream);
}

}  // namespace minimal_attn::hopper
