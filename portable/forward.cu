// forward.cu: the portable backend, for every NVIDIA GPU since Turing. It has five kernels:
//
//     dtype       GPUs                                       kernel
//     all         all                                        decode.cu and latent.cu: few queries, many keys, a band; else:
//     float32     compute capability 8.0, 8.7, 9.0, 10.x     tf32.cu, tensor cores
//     float32     7.5, 8.6, 8.9, 12.x                        float32.cu, FMA units
//     float16     any                                        half.cu, tensor cores
//     bfloat16    8.0 and newer                              half.cu, tensor cores
//     bfloat16    7.5                                        float32.cu: Turing's tensor cores have no bfloat16
//     d or d_v above 256: half types up to 512 but for bfloat16 on 7.5 have half.cu, all others flash.cu, paper's
//
// All compute the same steps, which common.cuh describes.
#include "portable/portable.h"

namespace minimal_attn {

namespace {

Plan plan_many_queries(const Attention &a, const Device &device) {
    if (portable::is_for_paper(a)) return plan_paper(a, device);
    if (a.dtype == Dtype::float16) return portable::plan_half(a, device);
    if (a.dtype == Dtype::float32 && device.shared_memory < portable::kSharedMemoryOfFastTf32)
        return portable::plan_float32(a, device);
    bool since_ampere = true;
    const char *error = portable::is_code_since_ampere(since_ampere);
    Plan plan = !since_ampere               ? (portable::is_wide(a) ? plan_paper : portable::plan_float32)(a, device)
                : a.dtype == Dtype::float32 ? portable::plan_tf32(a, device)
                                            : portable::plan_half(a, device);
    plan.error = error;
    return plan;
}

// Whether this GPU's decode.cu multiplies on tensor cores; an error if there is no code for it.
const char *find_tensor_cores(const Attention &a, bool &on_tensor_cores) {
    on_tensor_cores = a.dtype != Dtype::float32;
    return a.dtype == Dtype::bfloat16 ? portable::is_code_since_ampere(on_tensor_cores) : nullptr;
}

// Whether decode.cu takes the call, and on tensor cores.
bool finds_decode(const Attention &a, const Device &device, bool &on_tensor_cores) {
    return !find_tensor_cores(a, on_tensor_cores) && portable::takes_decode(a, device, on_tensor_cores);
}

}  // namespace

bool portable::takes_decode(const Attention &a, const Device &device) {
    bool on_tensor_cores;
    return finds_decode(a, device, on_tensor_cores);
}

portable::FewQueries portable::plan_few_queries(const Attention &a, const Device &device) {
    bool on_tensor_cores;
    return find_tensor_cores(a, on_tensor_cores) ? FewQueries{} : plan_few_queries(a, device, on_tensor_cores);
}

Plan plan_portable(const Attention &a, const Device &device) {
    bool on_tensor_cores;
    return finds_decode(a, device, on_tensor_cores) ? portable::plan_decode(a, device, on_tensor_cores)
                                                    : plan_many_queries(a, device);
}

const char *launch_portable(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return portable::is_decode(plan)        ? portable::launch_decode(a, plan, workspace, stream)
           : plan.kernel == portable::kHalf ? portable::launch_half(a, plan, workspace, stream)
           : plan.kernel == portable::kTf32 ? portable::launch_tf32(a, plan, workspace, stream)
           : portable::is_wide(a)           ? launch_paper(a, plan, workspace, stream)
                                            : portable::launch_float32(a, plan, workspace, stream);
}

}  // namespace minimal_attn
