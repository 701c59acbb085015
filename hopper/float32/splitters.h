// splitters.h: K and V are split for the workspace. The producer's last warps do it all the time, and each consumer
// warpgroup while it waits for its next work tile.
#pragma once
#include "hopper/float32/workspace.h"

namespace minimal_attn::hopper {

// A consumer warpgroup takes split jobs until its next work tile has arrived. It reads their tiles from global
// memory. The threads vote whether the work tile has arrived, so that all take the same branch.
template <class Tile, class Mask>
__device__ void split_while_waiting(const Float32Parameters &p, SharedStorage<Tile, Mask> &shared, int warpgroup,
                                    const Pipeline<kQueueStages> &tile_queue) {
    if (!p.workspace.heads || p.a.d % 4 != 0) return;
    const int barrier = barrier_of_group(warpgroup);
    SplitJob &next = shared.next_job[warpgroup];
    while (!named_barrier_any(barrier, 128, tile_queue.is_full())) {
        if (threadIdx.x % 128 == 0 && next.head >= 0) next = take_split_job<Tile, Mask>(p);
        named_barrier_sync(barrier, 128);
        SplitJob job = next;
        if (job.head < 0) return;
        for (; job.n < job.end; ++job.n) {
            const Strides &stride = job.is_V() ? p.a.v_stride : p.a.k_stride;
            const float *const first = (const float *)(job.is_V() ? p.a.v : p.a.k) + job.head / p.Hkv * stride.batch +
                                       job.head % p.Hkv * stride.head + job.j() * Tile::Bc * stride.row;
            const float inverse_scale = split_registers(
                SplitterGroup<Tile::D, Tile::Bc, 4>{shared.groups[warpgroup], warpgroup}, job.valid_rows<Tile>(), true,
                hi_lo_tile<Tile>(p.workspace, job.head, job.n),
                [&](int row, int x) { return x < p.a.d ? *(const float4 *)(first + row * stride.row + x) : float4{}; });
            named_barrier_sync(barrier, 128);  // all have written their part
            if (threadIdx.x % 128 == 0) publish<Mask>(p.workspace, job, inverse_scale);
            __syncwarp();
        }
    }
}

// A splitter group of the producer, with one float32 tile. Its first thread takes jobs, loads and publishes. The next
// tile arrives while the last one is published. The thread publishes before it waits for `tiles_taken`: a producer warp
// may need that tile before it can take its next work tile.
template <class Tile, class Mask>
__device__ void run_splitter(const Float32Parameters &p, SharedStorage<Tile, Mask> &shared, int splitter) {
    constexpr int Warps = Tile::SplitterWarps;
    const int group = Tile::Consumers + splitter;
    // Jobs are in shared memory, since registers are short.
    SplitJob &job = shared.current_job[splitter], &next = shared.next_job[group];
    const auto is_leader = [] { return opaque(threadIdx.x) % (32 * Warps) == 0; };
    const auto load_next = [&] {  // false: it is too early
        if (next.not_before > *(volatile int *)p.workspace.tiles_taken) return false;
        if (next.head >= 0)
            load_tile<Tile::Bc, Tile::Boxes, 32>(shared.float32_tiles[splitter], next.is_V() ? p.V : p.K,
                                                 next.j() * Tile::Bc, next.head % p.Hkv, next.head / p.Hkv,
                                                 shared.tile_loaded[splitter]);
        return true;
    };
    if (is_leader()) next = take_split_job<Tile, Mask>(p);
    float inverse_scale;  // of `job`
    for (int parity = 0;; parity ^= 1) {
        if (is_leader()) {  // all threads have met since they read `job`
            const bool is_loaded = load_next();
            if (job.head >= 0) publish<Mask>(p.workspace, job, inverse_scale);
            while (!is_loaded && !load_next()) __nanosleep(100);
            job = next;
            if (job.head >= 0 && ++next.n >= next.end) next = take_split_job<Tile, Mask>(p);
        }
        __syncwarp();
        named_barrier_sync(barrier_of_group(group), 32 * Warps);
        if (job.head < 0) return;
        wait(shared.tile_loaded[splitter], parity);
        inverse_scale = split_rows(
            SplitterGroup<Tile::D, Tile::Bc, Warps>{shared.groups[group], group}, shared.float32_tiles[splitter], p.a.d,
            [&] { return job.valid_rows<Tile>(); }, [&] { return hi_lo_tile<Tile>(p.workspace, job.head, job.n); });
    }
}

}  // namespace minimal_attn::hopper
