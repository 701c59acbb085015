// tma.h: tiles in shared memory, as TMA loads them; tensor maps, which describe a tensor in global memory to TMA. The
// host makes the maps for each call.
#pragma once
#include "hopper/pipeline.h"

namespace minimal_attn::hopper {

constexpr int kBoxColumns = 64;  // of 16-bit numbers: 128 bytes, the width of the swizzle

struct TensorMap {
    CUtensorMap map;
    int head, batch;  // factors of the indices: 0 where all heads or batches are the same data (stride 0), else 1
};

// Loads a tile of `Rows` rows from `row` on, box by box, and announces its bytes to `full`. By one thread.
template <int Rows, int Boxes, int BoxColumns = kBoxColumns>
__device__ void load_tile(unsigned char *tile, const TensorMap &tensor, int row, int h, int b, Barrier &full) {
    arrive_expect_tx(full, Rows * Boxes * 128);
    for (int box = 0; box < Boxes; ++box)
        tma_load(tile + box * Rows * 128, tensor.map, box * BoxColumns, row, h * tensor.head, b * tensor.batch, full);
}

// Sets rows of a tile to 0 where is_hidden(row): 0 times NaN is NaN. All `Threads` neighbours call it, and meet at the
// barrier.
template <int Rows, int Boxes, int Threads = 128, class IsHidden>
__device__ void zero_rows(unsigned char *tile, const IsHidden &is_hidden, int barrier) {
    for (int at = opaque(threadIdx.x) % Threads * 16; at < Rows * 128; at += Threads * 16)
        if (is_hidden(at / 128))
            for (int box = 0; box < Boxes; ++box) *(uint4 *)(tile + box * Rows * 128 + at) = uint4{};
    fence_async();
    named_barrier_sync(barrier, Threads);
}

// The rows before `begin` and from `end` on, if there are any. The bounds are the same in all threads. By zero_rows the
// kernels that call it would get another order of instructions.
template <int Rows, int Boxes, int Threads = 128>
__device__ void zero_rows_outside(unsigned char *tile, int begin, int end, int barrier) {
    if (begin <= 0 && end >= Rows) return;
    for (int at = opaque(threadIdx.x) % Threads * 16; at < Rows * 128; at += Threads * 16)
        if (at / 128 < begin || at / 128 >= end)
            for (int box = 0; box < Boxes; ++box) *(uint4 *)(tile + box * Rows * 128 + at) = uint4{};
    fence_async();
    named_barrier_sync(barrier, Threads);
}

// Step 8: a producer loads Qi, 64 rows for each consumer.
template <class Tile, int BoxColumns = kBoxColumns, class SharedStorage, int Stages>
__device__ void load_Q(SharedStorage &shared, const TensorMap &tensor, int i0, int h, int b, Pipeline<Stages> &Q) {
    for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
        Q.barriers = shared.Q[warpgroup];
        Q.producer_acquire();
        load_tile<64, Tile::Boxes, BoxColumns>(shared.Qi[warpgroup][Q.stage()], tensor, i0 + 64 * warpgroup, h, b,
                                               Q.full());
    }
    Q.advance();
}

// The driver's encoder, found at run time, so that nothing needs to be linked with the driver.
inline auto tensor_map_encoder() {
    static void *function;
    static cudaDriverEntryPointQueryResult result;
    static const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess ? (decltype(&cuTensorMapEncodeTiled))function : nullptr;
}

// Describes a (B, H, N, d) tensor. A box is 128 bytes wide and `rows` high. False: the driver refuses the tensor.
inline bool make_tensor_map(TensorMap &tensor, Dtype dtype, const void *data, const Strides &stride, uint64_t B,
                            uint64_t H, uint64_t N, uint64_t d, uint32_t rows) {
    tensor.batch = stride.batch != 0 && B > 1, tensor.head = stride.head != 0 && H > 1;
    const uint32_t element = element_size(dtype);
    const cuuint64_t size[4] = {d, N, tensor.head ? H : 1, tensor.batch ? B : 1};
    // A dimension of size 1 may have any stride, but TMA checks that it is a multiple of 16 bytes.
    const auto bytes = [&](bool matters, uint64_t elements) { return matters ? elements * element : 16; };
    const cuuint64_t strides[3] = {bytes(N > 1, stride.row), bytes(tensor.head, stride.head),
                                   bytes(tensor.batch, stride.batch)};
    const cuuint32_t box[4] = {128 / element, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    const auto type = dtype == Dtype::float32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                      : dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return tensor_map_encoder()(&tensor.map, type, 4, (void *)data, size, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace minimal_attn::hopper
