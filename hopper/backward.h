// backward.h: the kernels of the backward pass for float16 and bfloat16.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// The fused kernel computes dK and dV, with computes_dQ also dQ, for d up to 128. Blocks add their parts of dQ in any
// order, in the plan's workspace. The counters of `rows` must be 0; the kernel changes them.
Plan plan_fused(const Gradient &g, const Device &device, bool computes_dQ);
const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream);

// dQ alone, by a block for each tile of queries: the same bits on every run. Needs the plan's workspace.
Plan plan_dq(const Gradient &g, const Device &device);
const char *launch_dq(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                      CUstream_st *stream);

// dK and dV alone, by a block for each tile of keys: the same bits on every run. For d above 128.
Plan plan_dkdv(const Gradient &g, const Device &device);
const char *launch_dkdv(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream);

}  // namespace minimal_attn::hopper
