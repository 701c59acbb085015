// backward.cu: the backward pass of float16 and bfloat16 on Hopper: which kernels compute it.
//
//     gradient_rows    lse and D of each query
//     backward_fused   dK, dV, and dQ in float32, added by TMA
//     convert_dq       dQ to dq
#include "hopper/backward.h"

namespace minimal_attn::hopper {

bool serves_half_backward(const Gradient &g) {
    return g.a.dtype != Dtype::float32 && g.a.d <= 128 && !g.deterministic;
}

Plan plan_half_backward(const Gradient &g, const Device &device) {
    Plan plan = plan_fused(g, device, true);
    plan.workspace += gradient_rows_bytes(g);
    return plan;
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const GradientRows rows = gradient_rows_in(g, workspace);
    Plan fused = plan;
    fused.workspace -= gradient_rows_bytes(g);
    void *const at = (char *)workspace + gradient_rows_bytes(g);
    const char *error = launch_gradient_rows(g, rows, stream);
    if (!error) error = launch_fused(g, rows, fused, at, stream);
    if (!error) error = launch_convert_dq(g, dQ_of_fused(at), plan.D, g.a.softmax_scale, stream);
    return error;
}

}  // namespace minimal_attn::hopper
