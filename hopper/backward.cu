// backward.cu: the backward pass of float16 and bfloat16 on Hopper. Its kernels:
//
//     backward_fused.cu       d up to 128: all three in one kernel, dQ in any order
//     backward_separate.cu    d above 128, deterministic or short heads: dK and dV, then dQ
//
// lse and D of the rows come from gradient_rows.h (portable/), before; or the fused kernel computes them.
#include "hopper/backward.h"

namespace minimal_attn::hopper {
namespace {

// Heads of so many queries or fewer don't add dQ in float32: its rows are padded to kGradientRows, so that many short heads
// would need ten times the memory of q.
constexpr int kShortHead = 64;

// The plans of the kernels that run one after the other.
struct Kernels {
    bool is_fused;  // one kernel computes all three; else `keys` computes dK and dV, then `queries` dQ
    Plan keys, queries;

    Kernels(const Gradient &g, const Device &device)
        : is_fused(g.a.d <= 128 && g.a.Nq > kShortHead && !g.deterministic) {
        keys = is_fused ? plan_fused(g, device) : plan_separate(g, device, Part::dK_dV);
        if (!is_fused) queries = plan_separate(g, device, Part::dQ);
    }
};

}  // namespace

Plan plan_half_backward(const Gradient &g, const Device &device) {
    const Kernels kernels(g, device);
    Plan plan = kernels.keys;
    plan.kernel = kernels.is_fused ? "half backward, fused" : "half backward, two kernels";
    plan.workspace += gradient_rows_bytes(g);
    return plan;
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Kernels kernels(g, {plan.multiprocessors, 0});
    const GradientRows rows = gradient_rows_in(g, workspace);
    if (kernels.is_fused)
        return launch_fused(g, rows, kernels.keys, (char *)workspace + gradient_rows_bytes(g), stream);
    const char *why = launch_gradient_rows(g, rows, stream);
    if (!why) why = launch_separate(g, rows, kernels.keys, stream);
    return why ? why : launch_separate(g, rows, kernels.queries, stream);
}

}  // namespace minimal_attn::hopper
