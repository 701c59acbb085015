// backward_fused.h: what the roles of backward_fused.cu share: work tiles, shared memory, parameters, the tile queue.
#pragma once
#include "hopper/key_tiles.h"

namespace minimal_attn::hopper {

// A work tile: a tile of keys, or a slice of it.
struct KeyWork {
    int tile;   // kNoTile: no more
    int slice;  // its number among the slices of all split tiles, or kWhole
};
constexpr int kNoTile = -1, kWhole = -1;

template <int D_, int Br_, int QStages_, int dOStages_, int ProducerRegisters_>
struct FusedTile {
    static constexpr int D = D_, Br = Br_, Bc = 128, QStages = QStages_, dOStages = dOStages_, dSStages = 2;
    static constexpr int Consumers = Bc / 64, Threads = 128 * (1 + Consumers), BlocksPerSM = 1;
    static constexpr int ProducerRegisters = ProducerRegisters_;
    static constexpr int Boxes = D / kBoxColumns, QBytes = Br * Boxes * 128, KBytes = 64 * Boxes * 128;
    static constexpr int QueryBoxes = Br / 64;
    static constexpr bool TakesTurns = true;                       // for PingPong
    enum NamedBarrier { kTurn = 1, kZeroed = kTurn + Consumers };  // + the consumer; 0 is __syncthreads
    static_assert(kGradientRows % Br == 0);
    // Each consumer computes one part of dQi, the box of these queries and columns.
    static_assert(Boxes * QueryBoxes == Consumers);
    __device__ static int query_box(int consumer) { return consumer % QueryBoxes; }
    __device__ static int column_box(int consumer) { return consumer / QueryBoxes; }
};

constexpr int kBufferBytes = 2 * 64 * 128;  // of warp 3: 64 x 64 of O and of dO, or 16 KB of dQ

// KB, all stages | d 64 | d 128
// Kj, Vj         | 32   | 64
// Qi, dOi        | 64   | 80
// dS, dQi        | 96   | 64
// buffer         | 16   | 16
template <class Tile>
struct FusedStorage {
    alignas(1024) unsigned char Kj[Tile::Consumers][Tile::KBytes], Vj[Tile::Consumers][Tile::KBytes];
    unsigned char Qi[Tile::QStages][Tile::QBytes], dOi[Tile::dOStages][Tile::QBytes];
    unsigned char dS[Tile::dSStages][Tile::QueryBoxes][Tile::Bc * 128];  // a row for each key, boxes of 64 queries
    unsigned char dQi[Tile::Consumers][2][64 * 128];                     // a row for each query, boxes of 32 columns
    unsigned char buffer[kBufferBytes];                                  // of warp 3
    float lse[Tile::QStages][Tile::Br], Di[Tile::dOStages][Tile::Br];
    KeyWork work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], KV[1], Q[Tile::QStages], dO[Tile::dOStages];
    StageBarriers dS_ready[Tile::dSStages], dQ[Tile::Consumers][1], buffer_ready[1];
};

struct FusedParameters : GradientParameters {
    TensorMap dQ;          // float32, the rows of a head padded
    const float *dQ_data;  // the same memory
    const float *lse, *dlse;
    bool fills_rows;        // whether warp 3 computes lse and D
    bool in_order;          // each part of dQ is added in the order of tile_in_order
    int interleaved;        // tile_in_order alternates between so many key heads
    int starts_apart;       // a mask of all bits or none, for KeySlice::start
    Divisor units_of_head;  // of a query head
    int units_of_group;     // of all query heads of a key head
    int units;              // of all heads
    int whole_tiles;        // so many tiles of keys, the first ones in the order of work_tile, are whole,
    int log_slices;         // the next ones are split into up to 2^log_slices slices each
    float4 *slices;         // dK and dV of slices, as the consumer warps hold them
    int *units_taken, *added, *filled, *stored, *steps_stored;  // counters
};

// A slice of a tile of keys, or all of it, and how it walks the queries. A step is one tile of queries of one head.
// Each slice has the next steps_of_slice steps of its tile, the last slices fewer or none.
template <class Tile>
struct KeySlice : KeyTile<Tile> {
    using KeyTile<Tile>::i0, KeyTile<Tile>::i1, KeyTile<Tile>::j0, KeyTile<Tile>::band;
    int start;      // the query where the walk of each head begins
    int all_steps;  // of the tile
    int index, steps_of_slice;
    int h, i;   // where this slice begins
    int steps;  // of this slice; below 1: none

    __device__ KeySlice(const FusedParameters &p, const KeyWork &work) : KeyTile<Tile>(p, work.tile) {
        // Where all queries see the keys, each tile of keys begins at other queries: so blocks add to different dQi.
        start = i0 == 0 && i1 == p.a.Nq ? (j0 & p.starts_apart) % i1 / Tile::Br * Tile::Br : i0;
        const int steps_of_head = (i1 - i0 + Tile::Br - 1) / Tile::Br;
        all_steps = steps_of_head * (this->unseen ? 1 : (int)p.group);
        const int log_slices = work.slice == kWhole ? 0 : p.log_slices;
        index = work.slice & ((1 << log_slices) - 1), steps_of_slice = ((all_steps - 1) >> log_slices) + 1;
        int before = index * steps_of_slice;
        steps = min(steps_of_slice, all_steps - before);
        h = this->h0;
        for (; before >= steps_of_head; before -= steps_of_head) ++h;  // no division: it has no uniform result
        i = start + before * Tile::Br;
        if (i >= i1) i -= steps_of_head * Tile::Br;
    }
    // In order: how many tiles of keys add to dQi of the queries from i on before this one. They are all that the same
    // queries see of later keys.
    __device__ int tiles_before(int i) const {
        return (min(i + Tile::Br + band.last, band.keys.end) - 1 - j0) / Tile::Bc;
    }
    // use(h, i, is_first) for each step. One loop: two would take more registers.
    template <class Use>
    __device__ void for_each_step(const Use &use) const {
        int h = this->h, i = this->i;
        for (int n = 0; n < steps; ++n) {
            use(h, i, n == 0);
            i += Tile::Br;
            if (i >= i1) i = i0;
            if (i == start) ++h;
        }
    }
};

// use(work) for each work tile of this block.
template <class Tile, class Use>
__device__ void for_each_key_work(FusedStorage<Tile> &shared, const Use &use) {
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const KeyWork &work = shared.work[tile_queue.stage()];
        if (work.tile == kNoTile) return;
        use(work);
    }
}

// Waits until a counter is large enough. Each acquiring load empties the L1 cache, so only the last one acquires. What
// TMA loads next is ordered behind it, too.
__device__ inline void wait_for(const int &counter, int count) {
    while (*(const volatile int *)&counter < count) __nanosleep(100);
    load_acquire(counter);
    fence_async_global();
}

}  // namespace minimal_attn::hopper
