// backward.cu: the portable backend's backward pass. Its kernels:
//
//     dtype       GPUs                                       kernel
//     float16     any                                        half_backward.cu, tensor cores
//     bfloat16    8.0 and newer                              half_backward.cu, tensor cores
//     any other call                                         flash_backward.cu, paper's
#include "portable/portable.h"

namespace minimal_attn {

Plan plan_portable_backward(const Gradient &g, const Device &device) {
    if (g.a.dtype == Dtype::float32) return plan_paper_backward(g, device);
    bool on_tensor_cores = true;
    const char *error = g.a.dtype == Dtype::bfloat16 ? portable::is_code_since_ampere(on_tensor_cores) : nullptr;
    Plan plan = on_tensor_cores ? portable::plan_half_backward(g, device) : plan_paper_backward(g, device);
    plan.error = error;
    return plan;
}

const char *launch_portable_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return plan.kernel == portable::kHalfBackward ? portable::launch_half_backward(g, plan, workspace, stream)
                                                  : launch_paper_backward(g, plan, workspace, stream);
}

}  // namespace minimal_attn
