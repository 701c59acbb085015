// backward.h: the kernels of the backward pass for float16 and bfloat16. The launch fills `rows`.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// dK, dV and dQ by one kernel, for d up to 128. Blocks add to dQ, in the plan's workspace, in any order, or if
// g.deterministic in order: the last keys of a head first.
Plan plan_fused(const Gradient &g, const Device &device);
const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream);

// dK and dV by one kernel, then dQ by another, for d above 128. The same bits on every run.
Plan plan_separate(const Gradient &g, const Device &device);
const char *launch_separate(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream);

}  // namespace minimal_attn::hopper
