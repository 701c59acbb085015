// portable.h: the backend's kernels, between which forward.cu and backward.cu choose. Each plans a call on the host and
// launches it; each takes the dtypes that the comment above its plan function names.
#pragma once

#include "flash.h"
#include "sequences.h"

namespace minimal_attn::portable {

// Names of the kernels, as minimal_attn.explain shows them. forward.cu and backward.cu compare the pointers.
inline constexpr char kTf32[] = "float32 on tensor cores", kFloat32[] = "float32 on FMA units", kHalf[] = "half",
                      kBfloat16OnFmaUnits[] = "bfloat16 on FMA units", kDecode[] = "decode",
                      kDecodeRows[] = "decode, whole rows", kLatent[] = "decode, latent",
                      kHalfBackward[] = "half backward, two passes",
                      kTf32Backward[] = "float32 backward on tensor cores";

// Shared memory tells GPUs apart: 163 KB or more a block, or at most 99. Dense TF32 / 3 and float32 in TFLOP/s, from
// NVIDIA's data sheets: A100 52 and 19.5, H100 165 and 67 (the first kind); RTX 3090 12 and 36, RTX 4090 28 and 83, L4
// 20 and 30 (the second).
inline constexpr int kSharedMemoryOfFastTf32 = 163 << 10;

// Tiles serve d and d_v up to kMostColumns; those of half.cu and half_backward.cu up to kMostOfHalf. Above, paper
// computes, but for latent.cu. Above kMostColumns half_backward.cu needs the shared memory below, which an A100 lacks.
inline constexpr int kMostColumns = 256, kMostOfHalf = 512;
inline constexpr int kSharedMemoryOfWideBackward = 201 << 10;
inline bool is_wide(const Attention &a) { return most_columns(a) > kMostColumns; }
// Whether paper computes it, whatever the GPU.
inline bool is_for_paper(const Attention &a) {
    return most_columns(a) > (a.dtype == Dtype::float32 ? kMostColumns : kMostOfHalf);
}

// float32.cu: float32, and bfloat16 where no tensor core multiplies it, on the FMA units.
Plan plan_float32(const Attention &a, const Device &device);
const char *launch_float32(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream);

// tf32.cu: float32 on the tensor cores.
Plan plan_tf32(const Attention &a, const Device &device);
const char *launch_tf32(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream);

// tf32_backward.cu: the gradients of float32 on the tensor cores, for every GPU since 8.0.
Plan plan_tf32_backward(const Gradient &g, const Device &device);
const char *launch_tf32_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream);

// half.cu: float16 and bfloat16, on the tensor cores.
Plan plan_half(const Attention &a, const Device &device);
const char *launch_half(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream);

// half_backward.cu: their gradients.
Plan plan_half_backward(const Gradient &g, const Device &device);
const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream);

// decode.cu: few queries over many keys, whole rows of 16 bytes. Whether it serves the call, and is faster.
bool takes_decode(const Attention &a, const Device &device, bool on_tensor_cores);
bool takes_decode(const Attention &a, const Device &device);  // forward.cu
Plan plan_decode(const Attention &a, const Device &device, bool on_tensor_cores);
const char *launch_decode(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream);
inline bool is_decode(const Plan &plan) {
    return plan.kernel == kDecode || plan.kernel == kDecodeRows || plan.kernel == kLatent;
}

// latent.cu, which decode.cu calls: likewise, where V is the first columns of K.
bool takes_latent(const Attention &a, const Device &device, bool on_tensor_cores);
Plan plan_latent(const Attention &a, const Device &device);
const char *launch_latent(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream);

// decode.cu for the documents with few queries. sequences.few is 0 if it can't read q, k or v.
struct FewQueries {
    SequencePlan sequences;
    Plan decode;
};
FewQueries plan_few_queries(const Attention &a, const Device &device, bool on_tensor_cores);
FewQueries plan_few_queries(const Attention &a, const Device &device);  // forward.cu
const char *launch_few_queries(const Attention &a, const FewQueries &few, void *workspace, CUstream_st *stream);

// half.cu: whether the code that this device loaded is for compute capability 8.0 or newer, whose tensor cores multiply
// bfloat16 and TF32. Returns null or an error.
const char *is_code_since_ampere(bool &yes);

}  // namespace minimal_attn::portable
