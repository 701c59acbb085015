// hopper.h: the instructions of Hopper (sm_90a) that flash_sm90.cu speaks, a few lines each. Nothing here knows what
// attention is. The PTX manual calls them by the names in the comments; cuda::ptx has those that it knows.
#pragma once

#include <cuda.h>  // CUtensorMap
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cuda/ptx>

namespace minimal_attn::hopper {

namespace ptx = cuda::ptx;

// ------------------------------------------------------------------------------ mbarriers
// A barrier in shared memory. A phase ends when all have arrived and all bytes announced are there; waiters name its
// parity: 0 for the first phase, 1 for the second, 0 for the third.

using Barrier = uint64_t;

__device__ inline void init(Barrier &barrier, int arrivals) { ptx::mbarrier_init(&barrier, arrivals); }

__device__ inline void arrive(Barrier &barrier) { ptx::mbarrier_arrive(&barrier); }

__device__ inline void arrive_expecting(Barrier &barrier, int bytes) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier, bytes);
}

__device__ inline bool is_over(Barrier &barrier, int parity) {
    return ptx::mbarrier_test_wait_parity(&barrier, parity);
}

__device__ inline void wait(Barrier &barrier, int parity) {
    while (!ptx::mbarrier_try_wait_parity(&barrier, parity)) {
    }
}

// Makes initialised barriers, and ordinary writes to shared memory, visible to TMA and wgmma; likewise of global
// memory.
__device__ inline void fence_async() { ptx::fence_proxy_async(ptx::space_shared); }
__device__ inline void fence_async_global() { ptx::fence_proxy_async(ptx::space_global); }

// ------------------------------------------------------------------------------ counters in global memory
// Who reads that something was added sees what its adder, and who met the adder at a barrier, wrote before.

__device__ inline void add_release(int &counter, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(&counter), "r"(x) : "memory");
}

__device__ inline int load_acquire(const int &counter) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(&counter) : "memory");
    return x;
}

// ------------------------------------------------------------------------------ named barriers
// bar.sync, bar.arrive: one of 16 barriers of the block, for so many threads, those that wait and those that don't.

__device__ inline void sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether x is true of any of them
__device__ inline bool any(int barrier, int threads, bool x) {
    int result;
    asm volatile(
        "{ .reg .pred x, any; setp.ne.b32 x, %1, 0; barrier.cta.red.or.aligned.pred any, %2, %3, x; selp.b32 %0, 1, 0, "
        "any; }"
        : "=r"(result)
        : "r"((int)x), "r"(barrier), "r"(threads)
        : "memory");
    return result;
}

__device__ inline void arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------ registers
// setmaxnreg: a warpgroup gives registers back, another takes them.

template <int Registers>
__device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ------------------------------------------------------------------------------ TMA
// cp.async.bulk.tensor: one thread has a box of a 4-dimensional tensor copied to shared memory, zeros where it reaches
// beyond the tensor; the barrier hears of the bytes.

__device__ inline void load_box(void *to, const CUtensorMap &map, int x, int row, int head, int batch,
                                Barrier &barrier) {
    const int32_t at[4] = {x, row, head, batch};
    ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, to, &map, at, &barrier);
}

// The same, to the L2 cache alone.
__device__ inline void prefetch_box(const CUtensorMap &map, int x, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x),
                 "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// cp.async.bulk: the same with bytes in a row, 16 or a multiple of them.
__device__ inline void load_bytes(void *to, const void *from, uint32_t bytes, Barrier &barrier) {
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, bytes, &barrier);
}

// The other way, cp.async.bulk.tensor and commit_group: a box goes from shared memory to the tensor, but for what
// reaches beyond it. It is there when the kernel has ended.
__device__ inline void store_box(const CUtensorMap &map, const void *from, int x, int row, int head, int batch) {
    const int32_t at[4] = {x, row, head, batch};
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map, at, from);
    ptx::cp_async_bulk_commit_group();
}

// wait_group.read: until all that this thread had stored so is read from shared memory
__device__ inline void wait_until_read() { ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>()); }

// ------------------------------------------------------------------------------ wgmma
// A warpgroup multiplies 64 x 16 by 16 x N, asynchronously, and adds the product to an accumulator in registers, N / 2
// floats a thread. Thread t of a warpgroup has in x[4 n + 2 r + c] row 16 (t / 32) + t % 32 / 4 + 8 r, column
// 8 n + 2 (t % 4) + c. Operands in shared memory are named by descriptors.
//
// Between fence() and the end of wait_for() nobody else may touch the accumulators or the registers of A.

// A tile of 16-bit numbers as TMA writes it with a 128-byte swizzle: columns in boxes of 64, a box being rows of 128
// bytes, 8 of which are one swizzle pattern of 1024 bytes. `box_bytes` is from one box to the next, which only matters
// where N (not the 16) runs along the columns. Adding bytes moves it along. In the high half stand the 1024 and the
// kind of swizzle (1 in the top two bits: 128 bytes).
struct Descriptor {
    uint32_t low;  // what differs: the address, and box_bytes, in units of 16 bytes

    __device__ Descriptor operator+(int bytes) const { return {low + bytes / 16}; }
    __device__ operator uint64_t() const { return uint64_t(1 << 30 | 1024 / 16) << 32 | low; }
};

__device__ inline Descriptor descriptor(const void *tile, int box_bytes) {
    return {((uint32_t)__cvta_generic_to_shared(tile) & 0x3ffff) / 16 | (uint32_t)(box_bytes / 16) << 16};
}

__device__ inline void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last Pending groups are done. x are the accumulators that may be read from here on.
template <int Pending, int Count>
__device__ void wait_for(float (&x)[Count]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(x[i])::"memory");  // no use of x moves before the wait
}

// The accumulator's registers %0 to %(COUNT - 1) in an instruction's text, and as its operands: x[0] to x[COUNT - 1].
#define TEN(t) ", %" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define REGS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9" TEN(1) TEN(2) ", %30, %31"
#define REGS_40 REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGS_48 REGS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_56 REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGS_64 REGS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_96 REGS_64 ", %64, %65, %66, %67, %68, %69" TEN(7) TEN(8) ", %90, %91, %92, %93, %94, %95"
#define REGS_128 REGS_96 ", %96, %97, %98, %99" TEN(10) TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define X_4(i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define X_8(i) X_4(i), X_4(i + 4)
#define X_16 X_8(0), X_8(8)
#define X_32 X_16, X_8(16), X_8(24)
#define X_40 X_32, X_8(32)
#define X_48 X_40, X_8(40)
#define X_56 X_48, X_8(48)
#define X_64 X_56, X_8(56)
#define X_96 X_64, X_8(64), X_8(72), X_8(80), X_8(88)
#define X_128 X_96, X_8(96), X_8(104), X_8(112), X_8(120)

// wgmma.mma_async for numbers of type T, TYPE in PTX, and an accumulator x of COUNT floats; I0 to I5 number the
// operands after it. The first argument, of any value, says T. Both add to x if `adds`, or else x begins as 0.
//   A B^T, both in shared memory, the 16 running along the columns of both
//   A B, A in registers, the 16 running along the rows of B
#define WGMMA(T, TYPE, N, COUNT, I0, I1, I2, I3, I4, I5)                                                             \
    __device__ inline void multiply_transposed(T, float(&x)[COUNT], uint64_t A, uint64_t B, bool adds) {             \
        asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N        \
                     "k16.f32." TYPE "." TYPE " {" REGS_##COUNT "}, %" #I0 ", %" #I1 ", adds, 1, 1, 0, 0; }"         \
                     : X_##COUNT                                                                                     \
                     : "l"(A), "l"(B), "r"((int)adds));                                                              \
    }                                                                                                                \
    __device__ inline void multiply(T, float(&x)[COUNT], const uint32_t *A, uint64_t B, bool adds = true) {          \
        asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %" #I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N        \
                     "k16.f32." TYPE "." TYPE " {" REGS_##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 \
                                                                ", adds, 1, 1, 1; }"                                 \
                     : X_##COUNT                                                                                     \
                     : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B), "r"((int)adds));                          \
    }
#define WGMMA_HALF_TYPES(N, COUNT, I0, I1, I2, I3, I4, I5) \
    WGMMA(__half, "f16", N, COUNT, I0, I1, I2, I3, I4, I5) \
    WGMMA(__nv_bfloat16, "bf16", N, COUNT, I0, I1, I2, I3, I4, I5)

WGMMA(__half, "f16", 32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_HALF_TYPES(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_HALF_TYPES(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_HALF_TYPES(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_HALF_TYPES(112, 56, 56, 57, 58, 59, 60, 61)
WGMMA_HALF_TYPES(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_HALF_TYPES(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_HALF_TYPES(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace minimal_attn::hopper
