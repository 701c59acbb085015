// backward.cu: the backward pass of float16 and bfloat16 on Hopper. Its kernels:
//
//     backward_fused.cu       d up to 128: dK, dV and dQ in one kernel, which adds to dQ in any order
//     backward_separate.cu    d above 128, deterministic, or short heads: dK and dV in one kernel, then dQ in another
//
// portable/gradient_rows.cu computes lse and D of the rows before, unless the fused kernel does.
#include "hopper/backward.h"

namespace minimal_attn::hopper {
namespace {

// The most queries of a short head. The fused kernel pads dQ, float32, to kGradientRows rows a head: many short heads
// would need ten times the memory of q, or more.
constexpr int kShortHead = 64;

// The plans of one kernel, or of two that run one after the other.
struct Kernels {
    bool is_fused;  // `first` computes dK, dV and dQ; else `first` computes dK and dV, `second` dQ
    Plan first, second;

    Kernels(const Gradient &g, const Device &device)
        : is_fused(g.a.d <= 128 && g.a.Nq > kShortHead && !g.deterministic) {
        first = is_fused ? plan_fused(g, device) : plan_separate(g, device, Part::dK_dV);
        if (!is_fused) second = plan_separate(g, device, Part::dQ);
    }
};

}  // namespace

Plan plan_half_backward(const Gradient &g, const Device &device) {
    const Kernels kernels(g, device);
    Plan plan = kernels.first;
    plan.kernel = kernels.is_fused ? "half backward, fused" : "half backward, two kernels";
    plan.workspace += gradient_rows_bytes(g);
    return plan;
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Kernels kernels(g, {plan.multiprocessors, 0});
    const GradientRows rows = gradient_rows_in(g, workspace);
    if (kernels.is_fused)
        return launch_fused(g, rows, kernels.first, (char *)workspace + gradient_rows_bytes(g), stream);
    const char *why = launch_gradient_rows(g, rows, stream);
    if (!why) why = launch_separate(g, rows, kernels.first, stream);
    return why ? why : launch_separate(g, rows, kernels.second, stream);
}

}  // namespace minimal_attn::hopper
