// backward.h: the kernels of the backward pass for float16 and bfloat16.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// dK, dV and dQ by one kernel, for d up to 128. Blocks add to dQ in any order, in the plan's workspace. launch_fused
// fills `rows`, too.
Plan plan_fused(const Gradient &g, const Device &device);
const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream);

// dK and dV alone, or dQ alone. The same bits on every run. dQ must be launched right behind dK and dV, since it runs
// beside their end. launch_gradient_rows must have filled `rows`.
enum class Part { dQ, dK_dV };
Plan plan_separate(const Gradient &g, const Device &device, Part part);
const char *launch_separate(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream);

}  // namespace minimal_attn::hopper
