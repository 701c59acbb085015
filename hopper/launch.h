// launch.h: what the launches of all Hopper kernels have in common. Host code.
#pragma once
#include "hopper/params.h"

namespace minimal_attn::hopper {

template <class Tile>
bool make_input_maps(Parameters &p, const Attention &a) {
    // Without any key a tile of q is loaded instead, and masked.
    const void *k = a.Nk > 0 ? a.k : a.q, *v = a.Nk > 0 ? a.v : a.q;
    const int64_t B = a.Nk > 0 ? a.B : 1, Hkv = a.Nk > 0 ? a.Hkv : 1;
    return make_tensor_map(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, 64) &&
           make_tensor_map(p.K, a.dtype, k, a.k_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc) &&
           make_tensor_map(p.V, a.dtype, v, a.v_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc);
}

// Sets `counters`, if not null, to 0, and launches. Without counters the kernel may begin while the one before it in
// the stream ends (programmatic dependent launch).
template <class Parameters>
const char *launch_kernel(void (*kernel)(Parameters), const Parameters &p, const Plan &plan, void *counters,
                          int64_t counter_bytes, cudaStream_t stream) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_memory);
    if (error == cudaSuccess && counters) error = cudaMemsetAsync(counters, 0, counter_bytes, stream);
    cudaLaunchAttribute overlap{cudaLaunchAttributeProgrammaticStreamSerialization};
    overlap.val.programmaticStreamSerializationAllowed = !counters;
    const cudaLaunchConfig_t config{dim3(plan.grid), dim3(plan.threads), (size_t)plan.shared_memory,
                                    stream,          &overlap,           1};
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
    return why_not(error);
}

}  // namespace minimal_attn::hopper
