// single.h: the producer warpgroup for at most 64 queries and 64 keys a head, d up to 64. Each query head is then one
// work tile with one tile of keys. So its block splits Kj and Vj in place, without a workspace. Query heads that
// share a key head split it again. Two blocks share a multiprocessor.
//
// Each step runs once a head, so nothing hides latencies. Loads come first, before the work tile is described. The code
// is short and has few branches, since the warps wait while each of its lines is fetched into the instruction cache.
//
// role                | warps  | registers | does
// producer warpgroup  | 0 to 3 | 96        | thread 0 loads Kj, Qi and Vj; all split Kj, then Vj, in place
// consumer warpgroup  | 4 to 7 | 160       | as in forward.cu, one tile of keys
//
// barrier                | arrives                   | waits                | then
// tile_queue full, empty | thread 0; all 256 threads | all; thread 0        | a work tile's description: written; read
// Q full, empty          | thread 0, TMA; consumer   | consumer; thread 0   | Qi has arrived, as float32s; Sij is done
// tile_loaded            | thread 0, TMA             | producer             | Kj or Vj is in shared memory, as float32s
// KV full, empty         | thread 0; consumer        | consumer; thread 0   | Kj or Vj: split; read
// named, 1 and 2         | consumer; producer        | the same             | what its threads exchange when they split
// named, kAllConsumers   | consumer                  | consumer             | as in forward.cu
#pragma once
#include "hopper/float32/splitters.h"

namespace minimal_attn::hopper {

template <class Tile, class Mask>
__device__ void produce_and_split(const Parameters &p, SharedStorage<Tile, Mask> &shared) {
    Pipeline<1> Q{};
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    int parity = 0;  // of this work tile's phase of `tile_loaded` and KV
    const auto load = [&](bool is_V, int key_head, int b) {
        wait(shared.KV[is_V].empty, parity ^ 1);
        load_tile<Tile::Bc, Tile::Boxes, 32>(shared.tiles[is_V], is_V ? p.V : p.K, 0, key_head, b,
                                             shared.tile_loaded[is_V]);
    };
    const auto split = [&](bool is_V, Float32Work<Mask> &work) {
        wait(shared.tile_loaded[is_V], parity);
        const float inverse_scale =
            split_in_place(SplitterGroup<Tile::D, Tile::Bc, 4>{shared.groups[1], 1}, shared.tiles[is_V],
                           {work.mask.keys, is_V}, shared.inverse_scale[is_V].x);
        if (threadIdx.x == 0) {
            (is_V ? work.inverse_scale_V : work.inverse_scale_K) =
                is_V ? inverse_scale : nonzero_inverse_scale(inverse_scale);
            arrive(shared.KV[is_V].full);
        }
    };
    for (int n = -1;; parity ^= 1, tile_queue.consumer_release_by_each()) {
        if (threadIdx.x == 0) {
            tile_queue.producer_acquire();
            n = TileScheduler<Tile, Mask>{p}.next(n);
            if (n < p.work_tiles) {  // work tile n is head n
                const int b = n / p.Hq, h = n % p.Hq, key_head = h / p.group;
                load(false, key_head, b);
                load_Q<Tile, 32>(shared, p.Q, 0, h, b, Q);
                load(true, key_head, b);
            }
            describe_work(p, shared, tile_queue, n);
            arrive(tile_queue.full());
        }
        __syncwarp();
        tile_queue.consumer_wait();
        Float32Work<Mask> &work = shared.work[tile_queue.stage()];
        if (work.b < 0) return;
        split(false, work);
        split(true, work);
    }
}

}  // namespace minimal_attn::hopper
