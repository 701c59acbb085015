// gradient_rows.h: lse and D, which the backward kernels of portable and hopper read beside Q and dO.
#pragma once

#include "flash.h"

namespace minimal_attn {

// The rows of a head are padded to a multiple of this, so that no kernel checks where a head ends.
constexpr int kGradientRows = 128;
inline int64_t padded_rows(const Attention &a) {
    return (a.Nq + kGradientRows - 1) / kGradientRows * (int64_t)kGradientRows;
}

// float32, head h of batch b at (b * Hq + h) * head_stride. lse is in base 2: lse * log2(e). D = rowsum(dO o O) - dlse.
// Rows that see no key and padding rows have lse = +inf, so that P = 0, and D = 0.
struct GradientRows {
    float *lse, *D;
    int64_t head_stride;
    int *tile_counter;  // hopper/backward_dq.cu takes work tiles from it; 0 before
};

int64_t gradient_rows_bytes(const Gradient &g);  // of the workspace, a multiple of 256
GradientRows gradient_rows_in(const Gradient &g, void *workspace);

// Fills lse and D, and sets the counter to 0.
const char *launch_gradient_rows(const Gradient &g, const GradientRows &rows, CUstream_st *stream);

}  // namespace minimal_attn
