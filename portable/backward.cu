// backward.cu: the portable backend's backward pass. Its kernels:
//
//     dtype       GPUs                                       kernel
//     float16     any                                        half_backward.cu, tensor cores
//     bfloat16    8.0 and newer                              half_backward.cu, tensor cores
//     others                                                 flash_backward.cu, paper's
#include "portable/portable.h"

namespace minimal_attn {

Plan plan_portable_backward(const Gradient &g, const Device &device) { return plan_paper_backward(g, device); }

const char *launch_portable_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return launch_paper_backward(g, plan, workspace, stream);
}

}  // namespace minimal_attn
