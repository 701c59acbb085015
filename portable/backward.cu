// backward.cu: the portable backend's backward pass. Its kernels:
//
//     dtype                    GPUs                       kernel
//     float16                  any                        half_backward.cu, tensor cores
//     bfloat16                 8.0 and newer              half_backward.cu, tensor cores
//     float32                  8.0, 8.7, 9.0, 10.x        tf32_backward.cu, tensor cores
//     float32                  8.6, 8.9, 12.x: reckoned   tf32_backward.cu; docs/backward.md reckons with data sheets
//     float32, bfloat16        7.5                        flash_backward.cu, paper's
//     d or d_v from 257 to 512: half_backward.cu for half types since 9.0, but 12.x; else, and above, flash_backward.cu
#include "portable/portable.h"

namespace minimal_attn {

constexpr int kSharedMemorySinceAmpere = 99 << 10;  // that each GPU since 8.0 lets a block have

Plan plan_portable_backward(const Gradient &g, const Device &device) {
    const bool is_float32 = g.a.dtype == Dtype::float32;
    const int least = portable::is_wide(g.a) ? portable::kSharedMemoryOfWideBackward
                      : is_float32           ? kSharedMemorySinceAmpere
                                             : 0;
    if (device.shared_memory < least || portable::is_for_paper(g.a)) return plan_paper_backward(g, device);
    bool since_ampere = true;  // float16 needs no such code
    const char *error = g.a.dtype == Dtype::float16 ? nullptr : portable::is_code_since_ampere(since_ampere);
    Plan plan = !since_ampere ? plan_paper_backward(g, device)
                : is_float32  ? portable::plan_tf32_backward(g, device)
                              : portable::plan_half_backward(g, device);
    plan.error = error;
    return plan;
}

const char *launch_portable_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return plan.kernel == portable::kHalfBackward   ? portable::launch_half_backward(g, plan, workspace, stream)
           : plan.kernel == portable::kTf32Backward ? portable::launch_tf32_backward(g, plan, workspace, stream)
                                                    : launch_paper_backward(g, plan, workspace, stream);
}

}  // namespace minimal_attn
