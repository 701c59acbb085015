// backward.cu: the backward pass of float16 and bfloat16 on Hopper. Its kernels:
//
//     d            in any order                  deterministic, or short heads
//     up to 128    backward_fused.cu             backward_fused.cu without dQ, then backward_dq.cu
//     above        backward_dkdv.cu, then backward_dq.cu
//
// Before them gradient_rows.h (portable/) computes lse and D of the rows.
#include "hopper/backward.h"

namespace minimal_attn::hopper {
namespace {

// Heads of so many queries or fewer don't add dQ in float32: its rows are padded to kGradientRows, so that many short heads
// would need ten times the memory of q.
constexpr int kShortHead = 64;

// The plans of the kernels that run one after the other, and where the workspace of each begins.
struct Kernels {
    bool is_fused;  // one kernel computes all three; else `keys` computes dK and dV, `queries` dQ
    Plan keys, queries;
    int64_t keys_at, queries_at, bytes;

    Kernels(const Gradient &g, const Device &device)
        : is_fused(g.a.d <= 128 && g.a.Nq > kShortHead && !g.deterministic) {
        keys = g.a.d <= 128 ? plan_fused(g, device, is_fused) : plan_dkdv(g, device);
        queries = is_fused ? Plan{} : plan_dq(g, device);
        keys_at = gradient_rows_bytes(g);
        queries_at = keys_at + (keys.workspace + 255) / 256 * 256;
        bytes = queries_at + queries.workspace;
    }
};

}  // namespace

Plan plan_half_backward(const Gradient &g, const Device &device) {
    const Kernels kernels(g, device);
    Plan plan = kernels.keys;
    plan.kernel = kernels.is_fused ? "half backward, fused" : "half backward, two kernels";
    plan.workspace = kernels.bytes;
    return plan;
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Kernels kernels(g, {plan.multiprocessors, 0});
    const GradientRows rows = gradient_rows_in(g, workspace);
    void *const for_keys = (char *)workspace + kernels.keys_at;
    void *const for_queries = (char *)workspace + kernels.queries_at;
    const char *why = launch_gradient_rows(g, rows, stream);
    if (why) return why;
    why = g.a.d <= 128 ? launch_fused(g, rows, kernels.keys, for_keys, stream)
                       : launch_dkdv(g, rows, kernels.keys, stream);
    if (why || kernels.is_fused) return why;
    return launch_dq(g, rows, kernels.queries, for_queries, stream);
}

}  // namespace minimal_attn::hopper
