// backends.h: the list of this build's backends. call.cpp takes one of them for each call.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "binding/call.h"
#include "binding/checks.h"
#include "binding/tensors.h"
#include "portable/portable.h"
#include "scores.h"

#ifdef WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#endif

namespace minimal_attn {
namespace {

#ifdef WITH_CUDA
std::string refusal_of_hopper(const Tensor &q) {
    const auto *gpu = at::cuda::getDeviceProperties(q.device().index());
    if (gpu->major != 9 || gpu->minor != 0)
        return c10::str("compute capability 9.0, but q is on ", q.device(), ", a ", gpu->name,
                        " of compute capability ", gpu->major, ".", gpu->minor);
    if (std::string_view(cuda_architectures()).find("9.0a") == std::string_view::npos)
        return c10::str("compute capability 9.0, but this build has code for ", cuda_architectures(),
                        "; code for it is built by TORCH_CUDA_ARCH_LIST=9.0 make build");
    const SymInt tiles = q.sym_size(0) * q.sym_size(1) * ((q.sym_size(2) + 63) / 64);
    if (!may_hold(tiles.sym_le(int64_t(1) << 30)))
        return c10::str("at most 2^30 tiles of 64 queries, but q has shape ", q.sym_sizes(), ": pass fewer batches");
    return "";
}

// The hopper backend. It takes kernels of portable for few queries, and where it has no kernel: for some gradients.
bool hopper_takes_decode(const Attention &a, const Device &device) {
    return portable::takes_decode(a, device, a.dtype != Dtype::float32);
}
// Whether portable computes a call of hopper. It does so for
//     every dtype     d or d_v above 256; softcap beside terms or dropout; masks and biases with strides from 2^28 on,
//                     whose offsets hopper/terms.h cannot hold
//     float32         d_v other than d; calls by sequence; general calls
//     bfloat16        a softcap above kMostApproximated (scores.h)
bool hopper_passes_on(const Attention &a) {
    const auto are_far = [](const PairStrides &stride) { return std::max(stride.row, stride.key) >= 1 << 28; };
    if (has_softcap(a) && (has_terms(a) || has_dropout(a))) return true;
    if (portable::is_wide(a) || are_far(a.terms.mask_stride) || are_far(a.terms.bias_stride)) return true;
    if (a.dtype == Dtype::float32) return a.d_v != a.d || a.by_sequence || a.is_general;
    return a.dtype == Dtype::bfloat16 && a.is_general && !is_approximated(a);
}

// In half types TMA reads pages of a multiple of 16 keys. half.cu, to which wide calls are passed on, reads none.
bool hopper_reads_pages(const Attention &a, const Device &device) {
    if (hopper_takes_decode(a, device)) return true;
    return a.dtype != Dtype::float32 && a.page_size % 16 == 0 && !has_ranges(a) && !hopper_passes_on(a);
}

Plan plan_hopper(const Attention &a, const Device &device) {
    if (hopper_takes_decode(a, device)) return portable::plan_decode(a, device, a.dtype != Dtype::float32);
    if (hopper_passes_on(a)) return plan_portable(a, device);
    return a.dtype == Dtype::float32 ? hopper::plan_float32(a, device) : hopper::plan_half(a, device);
}

const char *launch_hopper(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    if (portable::is_decode(plan)) return portable::launch_decode(a, plan, workspace, stream);
    if (hopper_passes_on(a)) return launch_portable(a, plan, workspace, stream);
    return a.dtype == Dtype::float32 ? hopper::launch_float32(a, plan, workspace, stream)
                                     : hopper::launch_half(a, plan, workspace, stream);
}

bool hopper_serves_backward(const Gradient &g) { return hopper::serves_backward(g) && !hopper_passes_on(g.a); }
bool hopper_sums_bias(const Gradient &g) { return hopper_serves_backward(g) && hopper::sums_bias(g); }
// The tiles of d above 128 aren't those of a mask's tables.
bool hopper_skips_tiles(const Attention &a, bool backward) {
    const bool serves = backward ? hopper_serves_backward({a}) : a.dtype != Dtype::float32 && !hopper_passes_on(a);
    return serves && most_columns(a) <= 128;
}

Plan plan_hopper_backward(const Gradient &g, const Device &device) {
    return hopper_serves_backward(g) ? hopper::plan_half_backward(g, device) : plan_portable_backward(g, device);
}

const char *launch_hopper_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return hopper_serves_backward(g) ? hopper::launch_half_backward(g, plan, workspace, stream)
                                     : launch_portable_backward(g, plan, workspace, stream);
}

bool sums_no_bias(const Gradient &) { return false; }
#endif

constexpr int kRowsAlikeOfPortable = 16;

// How this build computes attention. docs/reading.md says how one is added.
struct Backend {
    std::string name;
    at::DeviceType device;
    std::string (*refusal)(const Tensor &q);  // empty, or which tensors it serves instead of q
    bool (*reads)(const Tensor &);            // whether it reads q, k or v where they are; else they are copied
    bool (*reads_pages)(const Attention &, const Device &);  // likewise the pages of this call
    Plan (*plan)(const Attention &, const Device &);
    const char *(*launch)(const Attention &, const Plan &, void *workspace, CUstream_st *);  // null, or why not
    Plan (*plan_backward)(const Gradient &, const Device &);
    const char *(*launch_backward)(const Gradient &, const Plan &, void *workspace, CUstream_st *);
    // Whether launch_backward computes Gradient::dbias, too; null: it always does. Else plan_bias_cuda's pass does.
    bool (*sums_bias)(const Gradient &) = nullptr;
    // Whether decode.cu takes the call. Null where no kernel reads the tables of sequences.h, or is general (scores.h).
    bool (*takes_decode)(const Attention &, const Device &) = nullptr;
    // Whether the kernels of a general call skip tiles that a mask hides (ranges.h). Null: none does.
    bool (*skips_tiles)(const Attention &, bool backward) = nullptr;
    int rows_alike = 0;  // with ranges, for isolate_rows_cuda (ranges.h); 0 on a CPU
};

// The fastest of each device first: "auto" takes the first that serves q.
const std::vector<Backend> &backends() {
    static const auto serves_all = [](const Tensor &) { return std::string(); };
    static const auto always = [](const Attention &, const Device &) { return true; };
    static const std::vector<Backend> list = {
#ifdef WITH_CUDA
        {"hopper", at::kCUDA, refusal_of_hopper, has_aligned_rows, hopper_reads_pages, plan_hopper, launch_hopper,
         plan_hopper_backward, launch_hopper_backward, hopper_sums_bias, hopper_takes_decode, hopper_skips_tiles,
         64},  // rows of a warpgroup
        {"portable", at::kCUDA, serves_all, has_contiguous_rows, portable::takes_decode, plan_portable, launch_portable,
         plan_portable_backward, launch_portable_backward, sums_no_bias, portable::takes_decode, nullptr,
         kRowsAlikeOfPortable},  // rows of a warp
        {"paper", at::kCUDA, serves_all, has_contiguous_rows, always, plan_paper, launch_paper, plan_paper_backward,
         launch_paper_backward, sums_no_bias, nullptr, nullptr, 1},  // a row skips tiles of keys that it doesn't see
#endif
        {"cpu", at::kCPU, serves_all, has_contiguous_rows, always, plan_cpu, launch_cpu, plan_cpu_backward,
         launch_cpu_backward},
    };
    return list;
}

}  // namespace
}  // namespace minimal_attn
