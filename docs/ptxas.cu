// The smallest kernels that we know for ptxas's warnings about wgmma, see ptxas.md. They compute nothing of use.
//
//     nvcc -std=c++17 --expt-relaxed-constexpr -rdc=true -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -I. -c docs/ptxas.cu -o /dev/null
//
// WITHOUT_WARNING is the pattern that all of hopper/ follows: fence, products, commit, wait, only then the accumulator.
#include "hopper/ptx.h"
using namespace minimal_attn::hopper;

// One product, begun: A (64 x 16) in registers, B (16 x 2 Count) in shared memory, x the accumulator.
template <int Count>
__device__ __forceinline__ void begin(float (&x)[Count], const uint32_t *A, const Descriptor &B) {
    wgmma_fence();
    wgmma_AB(__half(), x, A, B);
    wgmma_commit();
}

template <int Count>
__device__ __forceinline__ float sum(const float (&x)[Count]) {
    float s = 0.f;
    for (int i = 0; i < Count; ++i) s += x[i] * x[i];
    return s;
}

extern __device__ float elsewhere(float);  // in another file

#define KERNEL(NAME)                                                                                                  \
    static __device__ __forceinline__ float NAME(const Descriptor &B, uint32_t (&A)[4], const int *flags, float *out, \
                                                 int n);                                                              \
    __global__ void __launch_bounds__(128) NAME##_kernel(const int *flags, float *out, int n) {                       \
        extern __shared__ __align__(1024) unsigned char tile[];                                                       \
        uint32_t A[4] = {(uint32_t)flags[threadIdx.x], (uint32_t)flags[threadIdx.x + 128], 1, 2};                     \
        out[threadIdx.x] = NAME(descriptor(tile, 0), A, flags, out, n);                                               \
    }                                                                                                                 \
    static __device__ __forceinline__ float NAME(const Descriptor &B, uint32_t (&A)[4], const int *flags, float *out, \
                                                 int n)

KERNEL(WITHOUT_WARNING) {
    float x[32] = {}, y[32] = {};
    begin(x, A, B), begin(y, A, B + 64);
    wgmma_wait<1>(x);
    const float s = sum(x);
    wgmma_wait<0>(y);
    return s + sum(y);
}

KERNEL(C7509_extern_call) {
    float x[32] = {};
    begin(x, A, B);
    const float s = elsewhere(n);
    wgmma_wait<0>(x);
    return s + sum(x);
}

KERNEL(C7511_shared_accumulator) {
    float x[64] = {}, s = 0.f;
    for (int j = 0; j < n; ++j) {
        begin(x, A, B);
        begin(*(float (*)[32])x, A, B + 64);
        wgmma_wait<1>(x);
        for (int i = 0; i < 64; ++i) s += x[i];
        wgmma_wait<0>(x);
    }
    for (int i = 0; i < 64; ++i) out[128 * i] += x[i];
    return s;
}

KERNEL(C7513_operand_written_while_pending) {
    float x[32] = {};
    for (int j = 0; j < n; ++j) {
        begin(x, A, B);
        for (int i = 0; i < 4; ++i) A[i] += flags[j];
    }
    wgmma_wait<0>(x);
    return sum(x);
}

KERNEL(C7514_wait_under_a_condition) {
    float x[32] = {}, s = 0.f;
    for (int j = 0; j < n; ++j) {
        begin(x, A, B);
        if (flags[j]) wgmma_wait<0>(x);
        s += sum(x);
    }
    return s;
}

KERNEL(C7517_read_before_the_wait) {
    float x[32] = {};
    begin(x, A, B);
    out[1 << 20] = x[3];
    wgmma_wait<0>(x);
    return sum(x);
}

KERNEL(C7518_wait_in_a_divergent_path) {
    float x[32] = {}, s = 0.f;
    for (int j = 0; j < n; ++j) {
        if (flags[j] & 1) begin(x, A, B);
        for (int i = 0; i < 4; ++i) A[i] += j;
        if (flags[j + threadIdx.x] & 2) {
            wgmma_wait<0>(x);
            s += sum(x);
        }
    }
    return s;
}

KERNEL(C7519_written_after_the_fence) {
    float x[32] = {};
    wgmma_fence();
    wgmma_AB(__half(), x, A, B);
    for (int i = 0; i < 4; ++i) A[i] = 3 * A[i] + n;
    wgmma_AB(__half(), x, A, B + 64);
    wgmma_commit();
    wgmma_wait<0>(x);
    return sum(x);
}

KERNEL(C7520_fence_in_a_divergent_path) {
    float x[32] = {};
    for (int j = 0; j < n; ++j) {
        wgmma_AB(__half(), x, A, B);  // no fence: ptxas adds it
        if (flags[j + threadIdx.x]) wgmma_commit();
    }
    return sum(x);
}
