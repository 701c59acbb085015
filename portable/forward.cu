// forward.cu: the portable backend, for every NVIDIA GPU since Turing. It has three kernels:
//
//     dtype       compute capability   kernel
//     all         any                  decode.cu, where few queries share many keys. Other calls:
//     float32     any                  float32.cu, FMA units
//     float16     any                  half.cu, tensor cores
//     bfloat16    8.0 and newer        half.cu, tensor cores
//     bfloat16    7.5                  float32.cu: Turing's tensor cores have no bfloat16
//
// All compute the same steps, which common.cuh describes.
#include "portable/portable.h"

namespace minimal_attn {

namespace {

// Null or an error.
const char *has_tensor_cores_for(Dtype dtype, bool &yes) {
    yes = dtype != Dtype::float32;
    return dtype == Dtype::bfloat16 ? portable::has_bfloat16_tensor_cores(yes) : nullptr;
}

}  // namespace

bool portable::reads_pages(const Attention &a, const Device &device) {
    bool on_tensor_cores;
    return !has_tensor_cores_for(a.dtype, on_tensor_cores) && takes_decode(a, device, on_tensor_cores);
}

Plan plan_portable(const Attention &a, const Device &device) {
    bool on_tensor_cores;
    const char *error = has_tensor_cores_for(a.dtype, on_tensor_cores);
    Plan plan = portable::takes_decode(a, device, on_tensor_cores) ? portable::plan_decode(a, device, on_tensor_cores)
                : on_tensor_cores                                  ? portable::plan_half(a, device)
                                                                   : portable::plan_float32(a, device);
    plan.error = error;
    return plan;
}

const char *launch_portable(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return plan.kernel == portable::kDecode ? portable::launch_decode(a, plan, workspace, stream)
           : plan.kernel == portable::kHalf ? portable::launch_half(a, plan, workspace, stream)
                                            : portable::launch_float32(a, plan, workspace, stream);
}

}  // namespace minimal_attn
