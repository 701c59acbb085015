// single.h: what forward.cu knows of small.cu.
#pragma once
#include "flash.h"

namespace minimal_attn::hopper {

inline bool is_single_tile(const Attention &a) { return a.d <= 64 && a.Nq <= 64 && a.Nk <= 64; }
Plan plan_single_tile(const Attention &a, const Device &device);
const char *launch_single_tile(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream);

}  // namespace minimal_attn::hopper
