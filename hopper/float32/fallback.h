// fallback.h: portable's block computes by FMAs, from the float32 inputs, what hi and lo cannot represent
// (portable/float32_block.cuh). Each consumer decides for its 64 rows of a work tile.
//
// The block needs the memory of Qi, Kj and Vj, so it runs after the last work tile. Until then each consumer keeps a
// linked list of deferred work tiles. Shared memory holds the number of the most recent one. The first row of its O
// holds the number of the one before it.
#pragma once
#include "hopper/float32/consumer.h"
#include "hopper/float32/workspace.h"

namespace minimal_attn::hopper {

// The threads of a consumer, as float_block asks for them
template <class Tile>
struct ConsumerThreads {
    int warpgroup;
    __device__ unsigned index() const { return opaque(threadIdx.x) % 128; }
    __device__ unsigned block() const { return blockIdx.x * Tile::Consumers + warpgroup; }
    __device__ void sync() const { named_barrier_sync(barrier_of_group(warpgroup), 128); }
};

// Where a consumer's list continues after `work`
template <class Mask>
__device__ int &next_deferred(const Parameters &p, const WorkTileOf<Mask> &work, int warpgroup) {
    return ((int *)p.a.o)[row_offset(p.a.o_stride, work, work.i0 + 64 * warpgroup)];
}

// Puts a consumer's rows of a work tile on its list. The link overwrites an element of O. Thread 0 does both stores, so
// they stay in order.
template <class Tile, class Mask>
__device__ void defer(const Parameters &p, SharedStorage<Tile, Mask> &shared, const Float32Work<Mask> &work,
                      int warpgroup) {
    if (opaque(threadIdx.x) % 128 != 0 || work.i0 + 64 * warpgroup >= work.i1) return;
    next_deferred(p, work, warpgroup) = shared.deferred[warpgroup], shared.deferred[warpgroup] = work.n;
}

// All deferred work tiles of a consumer, the last one first. Each consumer has a part of the memory of Qi, Kj and Vj.
template <class Tile, class Mask>
__device__ void run_deferred(const Float32Parameters &p, SharedStorage<Tile, Mask> &shared, int warpgroup) {
    using Fallback = typename Tile::Fallback;
    using WideMask = std::conditional_t<kIsRanges<Mask>, Ranges, Band>;
    static_assert(Fallback::Threads == 128);
    static_assert(Fallback::SharedBytes * Tile::Consumers <= sizeof(shared.Qi) + sizeof(shared.tiles));
    const ConsumerThreads<Tile> threads{warpgroup};
    float *const memory = (float *)shared.Qi + warpgroup * Fallback::Floats;
    for (int n = shared.deferred[warpgroup]; n >= 0;) {
        const WorkTileOf<Mask> work = TileScheduler<Tile, Mask>{p}.tile(n);
        n = next_deferred(p, work, warpgroup);
        const int i1 = min(work.i0 + 64 * (warpgroup + 1), work.i1);
        for (int i0 = work.i0 + 64 * warpgroup; i0 < i1; i0 += Fallback::Br) {
            threads.sync();  // every thread has read n, which O may overwrite, and has stored O of the block before
            const auto block = block_at<float, WideMask>(p.a, work.b, work.h, i0, min(Fallback::Br, i1 - i0));
            float_block<Fallback>(p.a, block, p.aligned, memory, p.workspace.sums, threads);
        }
    }
}

}  // namespace minimal_attn::hopper
