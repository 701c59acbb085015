// backward.cu: the backward pass of float16 and bfloat16 on Hopper. Its kernels:
//
//     backward_fused.cu       d up to 128: dK, dV and dQ in one kernel
//     backward_separate.cu    d above 128: dK and dV in one kernel, then dQ in another
//
// portable/gradient_rows.cu computes lse and D of the rows before, unless the fused kernel does. The workspace has lse
// and D, float32, rows padded (gradient_rows.h). Behind them the fused kernel has more (its Workspace).
#include "hopper/backward.h"

namespace minimal_attn::hopper {

// The fused kernel pads dQ, float32, to kGradientRows rows a head: many short heads would need ten times the memory of
// q, or more.
bool serves_backward(const Gradient &g) { return g.a.dtype != Dtype::float32 && (g.a.d > 128 || g.a.Nq > 64); }

Plan plan_half_backward(const Gradient &g, const Device &device) {
    Plan plan = g.a.d <= 128 ? plan_fused(g, device) : plan_separate(g, device);
    plan.workspace += gradient_rows_bytes(g);
    return plan;
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const GradientRows rows = gradient_rows_in(g, workspace);
    if (g.a.d > 128) return launch_separate(g, rows, plan, stream);
    return launch_fused(g, rows, plan, (char *)workspace + gradient_rows_bytes(g), stream);
}

}  // namespace minimal_attn::hopper
