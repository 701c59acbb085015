// backward_fused.h: what the roles of backward_fused.cu share: a tile's sizes, shared memory, parameters, the queue.
#pragma once
#include "hopper/key_slices.h"

namespace minimal_attn::hopper {

template <int D_, int Br_, int QStages_, int dOStages_, int ProducerRegisters_>
struct FusedTile {
    static constexpr int D = D_, Br = Br_, Bc = 128, QStages = QStages_, dOStages = dOStages_, dSStages = 2;
    static constexpr int Consumers = Bc / 64, Threads = 128 * (1 + Consumers), BlocksPerSM = 1;
    static constexpr int ProducerRegisters = ProducerRegisters_;
    static constexpr int Boxes = D / kBoxColumns, QBytes = Br * Boxes * 128, KBytes = 64 * Boxes * 128;
    static constexpr int QueryBoxes = Br / 64;
    static constexpr int SumsOfThread = D;  // of dK and dV
    static constexpr SplitCosts Costs{2, 1.5 * D / 64, 0};
    static constexpr bool AddsDQ = true, TakesTurns = true;        // for PingPong
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
// m_l, Di        | 3    | 2
template <class Tile, class Mask>
struct FusedStorage {
    alignas(1024) unsigned char Kj[Tile::Consumers][Tile::KBytes], Vj[Tile::Consumers][Tile::KBytes];
    unsigned char Qi[Tile::QStages][Tile::QBytes], dOi[Tile::dOStages][Tile::QBytes];
    unsigned char dS[Tile::dSStages][Tile::QueryBoxes][Tile::Bc * 128];  // a row for each key, boxes of 64 queries
    unsigned char dQi[Tile::Consumers][2][64 * 128];                     // a row for each query, boxes of 32 columns
    unsigned char buffer[kBufferBytes];                                  // of warp 3
    float m_l[Tile::QStages][2][Tile::Br];                               // m_i and log2_l_i
    float Di[Tile::dOStages][1][Tile::Br];
    KeyWorkOf<Mask> work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], KV[1], Q[Tile::QStages], dO[Tile::dOStages];
    StageBarriers dS_ready[Tile::dSStages], dQ[Tile::Consumers][1], buffer_ready[1];
    // With terms, of each Qi: whether an attn_mask shows the tile of scores as a whole, and no range cuts it. A bias
    // may still hide pairs. Last, and there with all ranges: plan_fused asks for the size with Ranges.
    std::conditional_t<kIsRanges<Mask>, int[Tile::QStages], char> is_whole;
};

struct FusedParameters : KeyParameters {
    TensorMap dQ;          // float32, the rows of a head padded
    const float *dQ_data;  // the same memory
    const float *lse, *dlse;
    bool fills_rows;                             // whether warp 3 computes lse and D
    bool keeps_D;                                // large_rows.cu has stored D of large rows
    bool in_order;                               // each part of dQ is added in the order of tile_in_order
    int interleaved;                             // tile_in_order alternates between so many key heads
    Divisor units_of_head;                       // of a query head
    int units_of_group;                          // of all query heads of a key head
    int units;                                   // of all heads
    int *units_taken, *added, *filled, *stored;  // counters
    TensorMap dS;                                // dS^T, for the gradient of a bias, if the kernel stores_dS
    bool stores_dS;
};

// use(work) for each work tile of this block.
template <class Tile, class Mask, class Use>
__device__ void for_each_key_work(FusedStorage<Tile, Mask> &shared, const Use &use) {
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const KeyWorkOf<Mask> &work = shared.work[tile_queue.stage()];
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
