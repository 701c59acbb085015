#pragma once
#include <algorithm>
#include <type_traits>
#include "device.h"
#include "flash.h"
#include "hopper/ptx.h"
#include "hopper/pipeline.h"
namespace minimal_attn {
namespace {

using namespace hopper;

constexpr int kBox = 64;   // columns of a box of TMA: 128 bytes, the width of the swizzle; of float32s half as many

constexpr int kWorks = 2;  // one ends, the next is loaded and begun

// What TMA must know of a tensor, and whether its heads and batches are one and the same (stride 0).
struct TensorMap {
    CUtensorMap map;
    int head, batch;  // 1, or 0: what the indices are multiplied by
};

// Division of 0 <= x < 2^31 by a number that the host knows, as a multiplication (CUTLASS has it as FastDivmod): else
// up to six divisions, of 20 to 30 instructions each, would come before a work's first load, where nothing hides them.
struct Divisor {
    int divisor, shift;
    uint32_t inverse;  // 2^shift / divisor, rounded down, + 1: too large by so little that quotients are right

    Divisor() = default;
    Divisor(int x) : divisor(x), shift(31) {
        while (int64_t(1) << (shift - 31) < x) ++shift;
        inverse = uint32_t((uint64_t(1) << shift) / x + 1);
    }
    __host__ __device__ operator int() const { return divisor; }
};
__device__ int operator/(int x, const Divisor &y) { return int((uint64_t)(uint32_t)x * y.inverse >> y.shift); }
__device__ int operator%(int x, const Divisor &y) { return x - x / y * y.divisor; }

struct Parameters {
    Attention a;
    TensorMap Q, K, V, O;
    Divisor Hq, Hkv, group;  // a's, to divide by; query heads of a key head
    Divisor Tr;              // tiles of queries of a head
    Divisor grid;            // blocks
    int tiles;               // of all heads
    int alone;               // so many of the heads are worked on one after the other,
    Divisor together;        // and then so many together
    bool same_band;          // no array says what differs by batch: `band` is that of all, worked out by the host
    BandOf<int> band;
    int *next;  // counts the tiles taken after each block's first, unless workspace has heads; null: see tile_after
    bool tma_stores_O;    // where it can, see leaves_O
    bool aligned;         // rows of O begin and end at multiples of 16 bytes
};

// The driver's encoder, found at run time, so that nothing has to be linked with the driver.
auto encoder() {
    static const auto encode = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return (decltype(&cuTensorMapEncodeTiled))function;
    }();
    return encode;
}

const char *why_no_encoder() { return encoder() ? nullptr : "the driver has no cuTensorMapEncodeTiled"; }

// A (B, H, N, d) tensor, of which a box has 128 bytes of so many rows.
bool describe(TensorMap &tensor, Dtype dtype, const void *data, const Strides &stride, uint64_t B, uint64_t H,
              uint64_t N, uint64_t d, uint32_t rows) {
    tensor.batch = stride.batch != 0 && B > 1, tensor.head = stride.head != 0 && H > 1;
    const uint32_t element = dtype == Dtype::float32 ? 4 : 2;
    const cuuint64_t size[4] = {d, N, tensor.head ? H : 1, tensor.batch ? B : 1};
    // The stride of a dimension of size 1 doesn't matter, but must look like one.
    const auto bytes = [&](bool matters, uint64_t elements) { return matters ? elements * element : 16; };
    const cuuint64_t strides[3] = {bytes(N > 1, stride.row), bytes(tensor.head, stride.head),
                                   bytes(tensor.batch, stride.batch)};
    const cuuint32_t box[4] = {128 / element, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    const auto type = dtype == Dtype::float32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                      : dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encoder()(&tensor.map, type, 4, (void *)data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace
}  // namespace minimal_attn

