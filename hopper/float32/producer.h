// producer.h: what both producers use: `produce` (forward.cu) and `produce_and_split` (single.h).
#pragma once
#include "hopper/float32/tile.h"

namespace minimal_attn::hopper {

// Writes the n-th work tile, or that there is none, to the tile queue. The caller then arrives at its `full`.
template <class Tile>
__device__ WorkTile describe_work(const Parameters &p, ConsumerMemory<Tile> &shared,
                                  const Pipeline<kQueueStages> &tile_queue, int n) {
    const WorkTile tile = TileScheduler<Tile>{p}.tile(n);
    Float32Work &work = shared.work[tile_queue.stage()];
    static_cast<WorkTile &>(work) = tile;
    work.n = n, work.position = tile_queue.position, work.fallback = false;
    if (tile.b < 0) return tile;
    for (int i0 = tile.i0, warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup, i0 += 64) {
        const bool has_rows = i0 < tile.i1;
        work.ends[warpgroup] =
            has_rows ? min(keys_of_any(tile.band, i0, min(i0 + 64, tile.i1)).end, tile.visible.end) : 0;
        work.fully_visible[warpgroup] = fully_visible_keys(p, tile, i0);
    }
    return tile;
}

// 8. Qi, 64 rows for each consumer
template <class Tile>
__device__ void produce_Q(const Parameters &p, ConsumerMemory<Tile> &shared, int i0, int h, int b, Pipeline<1> &Q) {
    for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
        Q.barriers = shared.Q[warpgroup];
        Q.producer_acquire();
        load_tile<64, Tile::Boxes, 32>(shared.Qi[warpgroup], p.Q, i0 + 64 * warpgroup, h, b, Q.full());
    }
    Q.advance();
}

}  // namespace minimal_attn::hopper
