// backward.h: the kernels of the backward pass for float16 and bfloat16.
#pragma once
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {

// The fused kernel computes dK, dV and dQ for d up to 128. Blocks add their parts of dQ in any order, in the plan's
// workspace. The counters of `rows` must be 0; the kernel changes them.
Plan plan_fused(const Gradient &g, const Device &device);
const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream);

// dK and dV alone; or dQ alone, launched right behind it, since it runs beside the end of the first. The same bits on
// every run. Each takes work tiles from a counter of `rows` that must be 0.
enum class Part { dQ, dK_dV };
Plan plan_separate(const Gradient &g, const Device &device, Part part);
const char *launch_separate(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream);

}  // namespace minimal_attn::hopper
