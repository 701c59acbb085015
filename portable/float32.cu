// float32.cu: attention in float32 on the FMA units, for GPUs whose tensor cores have no TF32 or are slow in it
// (forward.cu). bfloat16 comes here, too, where no tensor core multiplies it.
// float32_block.cuh computes a block. docs/portable.md has the budget and what was tried.
//
//     role        | warps              | registers                   | does
//     every warp  | Tile::Threads / 32 | Oi, Sij, li, mi and two     | loads a part of each tile, computes its rows of
//                 |                    | sets of operands: up to 255 | Sij, Pij and Oi
#include "portable/float32_block.cuh"

namespace minimal_attn {
namespace {

template <class T, class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    float_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned, float *sums) {
    if constexpr (!on_tensor_cores<T>() && !kOnHopperAlone) {
        extern __shared__ __align__(16) float shared[];
        const auto block = block_of<T, Mask>(a, first_block + blockIdx.x, Tile::Br);
        float_block<Tile>(a, block, aligned, shared, sums, WholeBlock());
    } else {
        __trap();
    }
}

// Tiles in order of preference: D, Br, Bc, TX, TY, blocks on a multiprocessor. Beside each: shared memory, TFLOP/s on
// an H200 at 16k tokens and N 2048 (commit dd4d463 and earlier), and why it is in the list.
struct FloatKernels {
    static constexpr int TilesOfSum = kTilesOfSum;
    template <class T, class Tile, class Mask>
    static auto kernel() {
        return float_kernel<T, Tile, Mask>;
    }
    using D64 = TileList<FloatTile<64, 64, 64, 8, 16, 3>,     // 68 KB: 36
                         FloatTile<64, 32, 64, 16, 8, 3>>;    // 52 KB: 29; fits a T4
    using D128 = TileList<FloatTile<128, 64, 48, 16, 8, 2>,   // 98 KB: 35
                          FloatTile<128, 32, 32, 16, 8, 2>>;  // 55 KB: 28; fits a T4
    using D256 = TileList<FloatTile<256, 32, 16, 16, 8, 1>,   // 69 KB
                          FloatTile<256, 16, 16, 16, 4, 1>>;  // 51 KB; fits a T4
    using D512 = D256;                                        // never taken (portable.h)
};

}  // namespace

namespace portable {

Plan plan_float32(const Attention &a, const Device &device) {
    return plan_kernel<FloatKernels>(a, device, a.dtype == Dtype::float32 ? kFloat32 : kBfloat16OnFmaUnits);
}

const char *launch_float32(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return a.dtype == Dtype::float32 ? launch_kernel<FloatKernels, float>(a, plan, workspace, stream)
                                     : launch_kernel<FloatKernels, __nv_bfloat16>(a, plan, workspace, stream);
}

}  // namespace portable
}  // namespace minimal_attn
