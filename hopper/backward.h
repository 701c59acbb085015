// backward.h: the kernels of the backward pass for float16 and bfloat16.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// dQ alone, by a block for each tile of queries: the same bits on each run. Needs the plan's workspace.
Plan plan_dq(const Gradient &g, const Device &device);
const char *launch_dq(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                      CUstream_st *stream);

}  // namespace minimal_attn::hopper
