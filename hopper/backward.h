// backward.h: the kernels of the backward pass for float16 and bfloat16.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// dQ alone, by a block for each tile of queries: the same bits on every run. Needs the plan's workspace.
Plan plan_dq(const Gradient &g, const Device &device);
const char *launch_dq(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                      CUstream_st *stream);

// dK and dV alone, by a block for each tile of keys: the same bits on every run. For d above 128.
Plan plan_dkdv(const Gradient &g, const Device &device);
const char *launch_dkdv(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream);

// Both, one after the other. For d above 128.
Plan plan_wide_backward(const Gradient &g, const Device &device);
const char *launch_wide_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream);

}  // namespace minimal_attn::hopper
