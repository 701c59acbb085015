// device.h: what the GPU backends share, in kernels and at the launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "flash.h"

namespace minimal_attn {

constexpr float kLog2e = 1.44269504f;

// 2^x as one instruction; exp2f would spend three more on subnormal results.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline __half2 round_pair(__half, float x, float y) { return __floats2half2_rn(x, y); }
__device__ inline __nv_bfloat162 round_pair(__nv_bfloat16, float x, float y) { return __floats2bfloat162_rn(x, y); }

// Two numbers rounded to T, as one register with x in its low half.
template <class T>
__device__ uint32_t pack(float x, float y) {
    const auto two = round_pair(T(), x, y);
    return *(const uint32_t *)&two;
}

constexpr float kLeastScale = 1e-45f;

// c in exp(softmax_scale (s - m)) = exp2(c s - c m), for scores s in units of `unit`. c and 2 c are kept away from 0
// and inf, since 0 * -inf (a hidden score) and inf * 0 are NaN.
__device__ inline float scale_of(const Attention &a, float unit = 1.f, float log2e = kLog2e) {
    return fminf(fmaxf(fabsf(a.softmax_scale) * (log2e * unit), kLeastScale), 1.5e38f);
}

// Tells nvcc that all lanes of the warp have the same x.
template <class T>
__device__ T broadcast_lane0(T x) {
    return __shfl_sync(~0u, x, 0);
}

// Hides x's value from the compiler, which otherwise computes what depends on x ahead of all loops: then it
// takes registers, or is spilled.
template <class T>
__device__ T opaque(T x) {
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(x));
    else if constexpr (std::is_same_v<T, float>)
        asm volatile("" : "+f"(x));
    else
        asm volatile("" : "+r"(x));
    return x;
}

// Over the Lanes neighbours in a warp that share a row.
template <int Lanes>
__device__ float row_max(float x) {
#pragma unroll
    for (int lane = 1; lane < Lanes; lane *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

template <int Lanes>
__device__ float row_sum(float x) {
#pragma unroll
    for (int lane = 1; lane < Lanes; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// Counters in global memory. A thread that reads the new value also sees what the adding thread, and those that it met
// at a barrier, wrote before.
__device__ inline void add_release(int &counter, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(&counter), "r"(x) : "memory");
}

// Returns what the counter was.
__device__ inline int add_acquire_release(int &counter, int x) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(&counter), "r"(x) : "memory");
    return before;
}

// Sets the counter to x if it is 0. Returns what it was.
__device__ inline int set_if_0_acquire(int &counter, int x) {
    int before;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, %2;" : "=r"(before) : "l"(&counter), "r"(x) : "memory");
    return before;
}

__device__ inline int load_acquire(const int &counter) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(&counter) : "memory");
    return x;
}

// Programmatic dependent launch, from compute capability 9.0 on: a kernel's blocks start while the kernel before ends,
// and wait here until it has ended and its writes can be read.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may start once all blocks have called this. If that kernel reads before it waits, this one
// must wait before.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Sets the rows of lse from Nq on, at most 32, after a head's last tile, which ends at i1. `thread` is of a whole warp.
__device__ inline void pad_lse(const Attention &a, int64_t b, int64_t h, int i1, unsigned thread) {
    if (a.lse && i1 == a.Nq && thread < a.lse_rows - a.Nq) lse_of_row(a, b, h, a.Nq + (int)thread) = INFINITY;
}

// Whether a tensor's rows begin and end at multiples of 16 bytes.
inline bool is_aligned(const void *tensor, const Strides &stride, int64_t element, int64_t d) {
    const auto bytes = [&](int64_t elements) { return elements * element % 16 == 0; };
    return (uintptr_t)tensor % 16 == 0 && bytes(stride.batch) && bytes(stride.head) && bytes(stride.row) && bytes(d);
}

// Likewise q, k and v.
inline bool has_aligned_inputs(const Attention &a) {
    const int element = element_size(a.dtype);
    return is_aligned(a.q, a.q_stride, element, a.d) && is_aligned(a.k, a.k_stride, element, a.d) &&
           is_aligned(a.v, a.v_stride, element, a.d_v);
}

template <class... Tiles>
struct TileList {};

// Machine code for compute capability 9.0a runs on Hopper alone, where a block may have 227 KB of shared memory. So
// nvcc compiles tiles for smaller GPUs to a trap there, which is faster. MINIMAL_ATTN_TILES=all keeps them for tests.
#if defined __CUDA_ARCH_FEAT_SM90_ALL && !defined MINIMAL_ATTN_ALL_TILES
constexpr bool kOnHopperAlone = true;
#else
constexpr bool kOnHopperAlone = false;
#endif

// use(Tile()) of the index-th tile of a list.
template <class Use, class Tile, class... More>
auto with_tile(int index, TileList<Tile, More...>, const Use &use) {
    if constexpr (sizeof...(More) > 0)
        if (index > 0) return with_tile(index - 1, TileList<More...>(), use);
    return use(Tile());
}

template <class Tile, class First, class... More>
constexpr bool is_first(TileList<First, More...>) {
    return std::is_same_v<Tile, First>;
}

template <class Tile, class First, class... More>
constexpr bool is_last(TileList<First, More...>) {
    if constexpr (sizeof...(More) > 0) return is_last<Tile>(TileList<More...>());
    return sizeof...(More) == 0 && std::is_same_v<Tile, First>;
}

// Allows a kernel's blocks all shared memory that the device has for one, and prefers it to L1. Each host thread tells
// CUDA only once a device, since that takes 0.6 us. ptx_version becomes the compute capability that the kernel's code
// was compiled for, 90 for 9.0.
cudaError_t allow_shared_memory(const void *kernel, int *ptx_version = nullptr);
template <class... Parameters>
cudaError_t allow_shared_memory(void (*kernel)(Parameters...), int *ptx_version = nullptr) {
    return allow_shared_memory((const void *)kernel, ptx_version);
}

// Launches a kernel of which each block calls wait_for_kernel_before. Code for GPUs before 9.0 has no wait, so it
// doesn't overlap.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), int64_t grid, int threads, int shared_memory,
                               CUstream_st *stream, const Arguments &...arguments) {
    int ptx_version;
    const cudaError_t error = allow_shared_memory(kernel, &ptx_version);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute overlap{cudaLaunchAttributeProgrammaticStreamSerialization};
    overlap.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{dim3((int)grid), dim3(threads), (size_t)shared_memory,
                                    stream,          &overlap,      ptx_version >= 90};
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Null, or why nothing was launched.
inline const char *why_not(cudaError_t error) {
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // clear it, or the next launch of another library reports it
    return cudaGetErrorString(error);
}

constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;  // of one launch

// launch(first, grid), which returns an error, for all blocks, at most `most` of them at a time: `grid` blocks from
// number `first` on.
template <class Launch>
cudaError_t launch_all(int64_t blocks, int64_t most, const Launch &launch) {
    for (int64_t first = 0; first < blocks; first += most) {
        const cudaError_t error = launch(first, (int)std::min(blocks - first, most));
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// A launch's counters, 0 when its kernel begins. They are the next part of the stream's array, which one memset clears
// for at least four launches, mostly for hundreds: a memset each takes 1.2 us of host time and ends the overlap with
// the kernel before. A memset clears the workspace instead in three cases: a graph, since its replays use a part again;
// no array; many counters.
struct Zeros {
    void *memory;                 // null for 0 bytes
    struct ZerosOfStream *array;  // the stream's, locked; or null
    cudaError_t error = cudaSuccess;

    // It must exist until the kernel is launched: else another thread could use up the stream's array and clear it.
    // Threads that launch to another stream don't wait.
    Zeros(void *workspace, int64_t bytes, CUstream_st *stream);
    Zeros(const Zeros &) = delete;
    ~Zeros();
};

// Launches all blocks of a plan. The kernel's last parameter is the number of the launch's first block.
template <class Kernel, class... Arguments>
const char *launch_blocks(Kernel *kernel, const Plan &plan, CUstream_st *stream, const Arguments &...arguments) {
    cudaError_t error = allow_shared_memory(kernel);
    if (error == cudaSuccess)
        error = launch_all(plan.grid, kMostBlocks, [&](int64_t first, int grid) {
            kernel<<<grid, plan.threads, plan.shared_memory, stream>>>(arguments..., first);
            return cudaGetLastError();
        });
    return why_not(error);
}

}  // namespace minimal_attn
