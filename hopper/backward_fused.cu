// backward_fused.cu: dK, dV and dQ for float16 and bfloat16 on Hopper, d up to 128. docs/backward.md has its budget and
// measurements. Read half.cu first.
//
//     S = Q K^T,  P = exp(S - lse),  dP = dO V^T,  dS = P o (dP - D)          dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// A block computes one work tile after another: Bc keys of one head, 64 for each consumer warpgroup. It walks the tiles
// of Br queries that see one of the keys, in each query head of the group. So no other block adds to this dK and dV.
//
//     thread 0, thread 96   shared memory      each consumer warpgroup, in registers           threads 32, 64
//         +-- once ----> Kj, Vj ---------+
//         +------------> Qi, lse_i ------+-> S^T = Kj Qi^T       (wgmma)   P^T = exp(S^T - lse)
//         +------------> dOi, Di --------+-> dP^T = Vj dOi^T     (wgmma)   dS^T = P^T o (dP^T - D)
//                             |          +-> dV += P^T dOi       (wgmma, A = P^T in registers)
//                             +----------+-> dK += dS^T Qi       (wgmma, A = dS^T in registers)
//                        dS <------------+   dS^T of 64 keys
//                         +----------------> dQ^T = Kj^T dS^T    (wgmma), 64 x 64 of it
//                        dQi <-----------+--------------------------------------------> TMA adds it to dQ in HBM
//
// Nothing sets dQ to 0 before: the first block that has a part of it stores the part, later ones add (add_dQ).
//
// With S^T instead of S the accumulators P^T and dS^T are the operand A of the next product as they are. dQ of a tile is
// computed one tile later. By then the other consumer has stored its half of dS, so the consumers rarely wait.
//
// Work tiles from number key_tiles on have no keys. Each converts dQ of 128 queries, float32 in the workspace, to dq, once
// dQ of all query heads of their key head is complete. So a block converts when no tile of keys is left to take, while
// slower blocks compute the last ones.
//
// | role                | warps              | registers a thread | does                                           |
// |---------------------|--------------------|--------------------|------------------------------------------------|
// | scheduler, K, Q     | 0 (thread 0)       | 24                 | takes work tiles, loads Kj, all Qi and lse_i   |
// | adders of dQ        | 1, 2 (lane 0)      | 24                 | store or add what their consumer staged of dQi |
// | V, dO               | 3 (thread 96)      | 24                 | loads Vj, all dOi and Di                       |
// | consumer warpgroups | 4 to 11            | 240                | 64 keys each: S^T to dK, dV; its part of dQi.  |
// |                     |                    |                    | Or 64 queries each: dQ to dq                   |
//
// | barrier                 | arrives                      | waits                        | then                       |
// |-------------------------|------------------------------|------------------------------|----------------------------|
// | tile_queue full         | thread 0                     | thread 96, adders, consumers | a work tile is published   |
// | tile_queue empty        | thread 96, adders, consumers | thread 0                     | the slot is free           |
// | KV full                 | threads 0 and 96; TMA        | consumers                    | Kj and Vj have arrived     |
// | Q full, dO full         | thread 0 or 96, twice; TMA   | consumers                    | Qi or dOi has arrived      |
// | KV, Q, dO empty         | consumers                    | threads 0, 96                | consumers have read them   |
// | dS full                 | consumers                    | consumers                    | dS of all keys is stored   |
// | dS empty                | consumers                    | consumers                    | the product dQ has read dS |
// | dQ full (per consumer)  | that consumer                | its adder                    | dQi is staged              |
// | dQ empty (per consumer) | its adder                    | that consumer                | TMA has read dQi           |
// | named kTurn + index     | the consumer before it       | that consumer                | it may issue S^T, dP^T     |
// | named kZeroed + index   | that consumer                | that consumer                | hidden rows = 0            |
//
// full and empty are mbarriers, on which a consumer warp arrives once. index is the consumer's.
//
// | counter in device memory      | counts                                        | waits    | until                    |
// |-------------------------------|-----------------------------------------------|----------|--------------------------|
// | rows.counters: a part of dQ   | 1 while a block stores the part, 2 afterwards | adders   | 2: then they add         |
// | added: a key head             | tiles of keys that each adder has ended       | thread 0 | all: then dQ is complete |
//
// No wait is circular. An adder waits for a store that has begun, which waits for nothing. Thread 0 waits for tiles of keys
// that running blocks have taken. It has issued all loads of its own tile before, so that tile ends meanwhile.
#include "hopper/key_tiles.h"

namespace minimal_attn::hopper {
namespace {

template <int D_, int Br_, int QStages_, int dOStages_>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = 128, QStages = QStages_, dOStages = dOStages_, dSStages = 2;
    static constexpr int Consumers = Bc / 64, Threads = 128 * (1 + Consumers), BlocksPerSM = 1;
    static constexpr int ProducerRegisters = 24;
    static constexpr int Boxes = D / kBoxColumns, QBytes = Br * Boxes * 128, KBytes = 64 * Boxes * 128;
    static constexpr int QueryBoxes = Br / 64;
    static constexpr bool kTakesTurns = true, kStartsApart = true;
    enum NamedBarrier { kTurn = 1, kZeroed = kTurn + Consumers };  // + the consumer; 0 is __syncthreads
    static_assert(kGradientRows % Br == 0);
    static_assert(Boxes * QueryBoxes == Consumers);  // each computes 64 x 64 of dQi:
    __device__ static int query_box(int consumer) { return consumer % QueryBoxes; }
    __device__ static int column_box(int consumer) { return consumer / QueryBoxes; }
};

// KB, all stages | d 64 | d 128
// Kj, Vj         | 32   | 64
// Qi, dOi        | 64   | 80
// dS, dQi        | 96   | 64
template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char Kj[Tile::Consumers][Tile::KBytes], Vj[Tile::Consumers][Tile::KBytes];
    unsigned char Qi[Tile::QStages][Tile::QBytes], dOi[Tile::dOStages][Tile::QBytes];
    unsigned char dS[Tile::dSStages][Tile::QueryBoxes][Tile::Bc * 128];  // a row for each key, boxes of 64 queries
    unsigned char dQi[Tile::Consumers][2][64 * 128];                     // a row for each query, boxes of 32 columns
    float lse[Tile::QStages][Tile::Br], Di[Tile::dOStages][Tile::Br];
    int work[kQueueStages];  // numbers of work tiles
    StageBarriers tile_queue[kQueueStages], KV[1], Q[Tile::QStages], dO[Tile::dOStages];
    StageBarriers dS_ready[Tile::dSStages], dQ[Tile::Consumers][1];
};

struct FusedParameters : GradientParameters {
    TensorMap dQ;            // float32, the rows of a head padded
    const float *sums;       // its data
    Divisor units_of_head;   // of a query head: a work tile converts a unit, kGradientRows rows of dQ
    Divisor units_of_group;  // of all query heads of a key head
    int *added;              // the counters of key heads
};

// use(n) for each work tile of this block.
template <class Tile, class Use>
__device__ void for_each_work_tile(const FusedParameters &p, SharedStorage<Tile> &shared, const Use &use) {
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const int n = shared.work[tile_queue.stage()];
        if (n >= p.work_tiles) return;
        use(n);
    }
}

// ------------------------------------------------------------------------------ producer threads

// Loads Kj, then all Qi with lse_i, of a work tile; or Vj, then all dOi with Di.
template <class Tile, int Stages>
__device__ void load(const FusedParameters &p, const KeyTile<Tile> &keys, const TensorMap &K_or_V, Pipeline<1> &KV,
                     unsigned char (&Kj)[Tile::Consumers][Tile::KBytes], const TensorMap &Q_or_dO, const float *rows,
                     Pipeline<Stages> &Q, unsigned char (&Qi)[Stages][Tile::QBytes],
                     float (&numbers)[Stages][Tile::Br]) {
    KV.producer_acquire();
    for (int n = 0; n < Tile::Consumers; ++n)
        load_tile<64, Tile::Boxes>(Kj[n], K_or_V, keys.j0 + 64 * n, keys.key_head, keys.b, KV.full());
    KV.advance();
    load_queries(p, keys, Q_or_dO, rows, Q, Qi, numbers);
}

// Thread 0 takes a work tile when it has begun to load the last Qi of the one before. A work tile that converts dQ it
// publishes once all adders, this block's included, have ended the tiles of its key head.
template <class Tile>
__device__ void schedule_and_load_K_Q(const FusedParameters &p, SharedStorage<Tile> &shared) {
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    Pipeline<1> KV{shared.KV};
    Pipeline<Tile::QStages> Q{shared.Q};
    for (;;) {
        const int n = atomicAdd(p.tile_counter, 1);
        tile_queue.producer_acquire();
        if (p.key_tiles <= n && n < p.work_tiles)
            while (load_acquire(p.added[(n - p.key_tiles) / p.units_of_group]) < p.Tc * Tile::Consumers) {
            }
        shared.work[tile_queue.stage()] = n;
        arrive(tile_queue.full());
        tile_queue.advance();
        if (n >= p.work_tiles) return;
        if (n < p.key_tiles)
            load(p, KeyTile<Tile>(p, n), p.K, KV, shared.Kj, p.Q, p.rows.lse, Q, shared.Qi, shared.lse);
    }
}

template <class Tile>
__device__ void load_V_dO(const FusedParameters &p, SharedStorage<Tile> &shared) {
    Pipeline<1> KV{shared.KV};
    Pipeline<Tile::dOStages> dO{shared.dO};
    for_each_work_tile(p, shared, [&](int n) {
        if (n < p.key_tiles)
            load(p, KeyTile<Tile>(p, n), p.V, KV, shared.Vj, p.dO, p.rows.D, dO, shared.dOi, shared.Di);
    });
}

// An adder stores or adds what its consumer staged: parts of dQ of 64 queries x 64 columns. The block that sets a part's
// counter from 0 to 1 stores, and sets it to 2 when the part is in global memory. From then on blocks add.
template <class Tile>
__device__ void add_dQ(const FusedParameters &p, SharedStorage<Tile> &shared, int consumer) {
    Pipeline<1> dQ{shared.dQ[consumer]};
    for_each_work_tile(p, shared, [&](int n) {
        if (n >= p.key_tiles) return;
        const KeyTile<Tile> keys(p, n);
        keys.for_each_query_tile([&](int h, int i0, bool) {
            dQ.consumer_wait();
            if (keys.none) return dQ.consumer_release();
            const auto send = [&](const auto &store_or_add) {
                for (int box = 0; box < 2; ++box)
                    store_or_add(p.dQ.map, shared.dQi[consumer][box], 64 * Tile::column_box(consumer) + 32 * box,
                                 i0 + 64 * Tile::query_box(consumer), h * p.dQ.head, keys.b * p.dQ.batch);
            };
            const unsigned row = (keys.b * p.Hq + h) * (unsigned)p.rows.head_stride + i0;  // 2^32 rows of dQ are 1 TB
            // The consumers' parts are neighbours: at d 64 in rows, at d 128 in columns.
            int &counter = p.rows.counters[row / 64 * Tile::Boxes + consumer];
            const int state = set_if_0_acquire(counter, 1);
            while (state == 1 && load_acquire(counter) == 1) {
            }
            fence_async_global();
            if (state == 0)
                send(tma_store);
            else
                send(tma_add);
            tma_store_wait_read();
            dQ.consumer_release();
            if (state != 0) return;
            tma_store_wait();
            fence_async_global();
            add_release(counter, 1);
        });
        tma_store_wait();
        fence_async_global();
        add_release(p.added[n / p.Tc], 1);
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

// Starts dQ^T = Kj^T dS^T, 64 columns of Kj x 64 queries.
template <class T, class Tile>
__device__ void issue_dQ(float (&dQ)[32], const unsigned char (&Kj)[Tile::Consumers][Tile::KBytes], int column_box,
                         const unsigned char (&dS)[Tile::Bc * 128]) {
    const Descriptor K = descriptor(Kj[0] + column_box * 64 * 128, 0), S = descriptor(dS, 0);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16)
        wgmma_shared<Product::AtB>(T(), dQ, K + j / 64 * Tile::KBytes + j % 64 * 128, S + j * 128, j > 0);
    wgmma_commit();
}

// dq = softmax_scale dQ, 64 rows of a unit for each consumer. A thread reads dQ as if it were in an accumulator. No block
// has stored dQ of rows that see no key: store_gradient sets these to 0.
template <class T, class Tile>
__device__ void convert_dQ(const FusedParameters &p, int unit) {
    const int thread = opaque(threadIdx.x) - 128, row = thread / 32 * 16 + thread % 32 / 4;
    const int head = unit / p.units_of_head, b = head / p.Hq;
    const float *const from = p.sums + (int64_t(unit) * kGradientRows + row) * Tile::D + thread % 4 * 2;
    float dQ[Tile::D / 2];
#pragma unroll
    for (int x = 0; x < Tile::D / 2; x += 2) {
        const float2 two = __ldcg((const float2 *)(from + x / 2 % 2 * 8 * Tile::D + x / 4 * 8));
        dQ[x] = two.x, dQ[x + 1] = two.y;
    }
    const BandOf<int> band = band_of_batch(p, b);
    store_gradient<T>(p.dq, b, head % p.Hq, unit % p.units_of_head * kGradientRows + row, p.a.Nq, p.a.d,
                      p.a.softmax_scale, dQ, [&](int i) { return !empty(keys_of_row(band, i)); });
    __syncwarp();  // all lanes have read the work tile's number, which the first lane releases
}

// dS^T of 64 keys to shared memory, with the swizzle that wgmma expects. `thread` is of the warpgroup.
template <int Boxes, int BoxBytes, int Count>
__device__ void stage_dS(unsigned char (&boxes)[Boxes][BoxBytes], const uint32_t (&dS)[Count], int consumer,
                         int thread) {
    const int row = 64 * consumer + thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int n = 0; n < Count / 4; ++n)  // 16 queries each
        store_matrices(boxes[n / 4] + row * 128 + ((n % 4 * 2 + thread / 16 % 2) ^ row % 8) * 16, &dS[4 * n]);
    fence_async();
}

// dQ^T, 64 columns x 64 queries, to two boxes of 32 columns, with the swizzle that TMA expects.
__device__ inline void stage_dQ(unsigned char (&boxes)[2][64 * 128], const float (&dQ)[32], int thread) {
    const int query = thread % 4 * 2, column = thread / 32 % 2 * 16 + thread % 32 / 4;
    unsigned char *const tile = boxes[0] + thread / 64 * (64 * 128) + query * 128 + column % 4 * 4;
#pragma unroll
    for (int x = 0; x < 32; ++x) {  // query + 8 (x / 4) + x % 2, column + 8 (x / 2 % 2)
        const int swizzle = (column / 4 ^ query) ^ (x / 2 % 2 * 2 ^ x % 2);
        *(float *)(tile + (x / 4 * 8 + x % 2) * 128 + swizzle * 16) = dQ[x];
    }
    fence_async();
}

template <class T, class Tile>
__device__ void consume(const FusedParameters &p, SharedStorage<Tile> &shared) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc;
    const Attention &a = p.a;
    const int consumer = consumer_index(), thread = threadIdx.x % 128;
    const PingPong<Tile> ping_pong{consumer};
    if (consumer == Tile::Consumers - 1) ping_pong.pass_turn();  // the first turn is consumer 0's
    Pipeline<1> KV{shared.KV}, dQ_staged{shared.dQ[consumer]};
    Pipeline<Tile::QStages> Q{shared.Q};
    Pipeline<Tile::dOStages> dO{shared.dO};
    Pipeline<Tile::dSStages> dS_written{shared.dS_ready}, dS_read{shared.dS_ready};

    for_each_work_tile(p, shared, [&](int n) {
        if (n >= p.key_tiles) return convert_dQ<T, Tile>(p, n - p.key_tiles);
        const KeyTile<Tile> keys(p, n);
        float dK[D / 2], dV[D / 2];
        const BandOf<int> &band = keys.band;
        const auto zero_hidden = [&](unsigned char (&tiles)[Tile::Consumers][Tile::KBytes]) {
            const int end = band.keys.end == a.Nk ? keys.j0 + Bc : band.keys.end;  // TMA has set rows from Nk on to 0
            for (int x = 0; x < Tile::Consumers; ++x)
                zero_rows_outside<64, Tile::Boxes>(tiles[x], band.keys.begin - keys.j0 - 64 * x, end - keys.j0 - 64 * x,
                                                   Tile::kZeroed + consumer);
        };
        const auto zero_blind = [&](unsigned char *tile, int i0) {
            zero_blind_rows<Tile>(tile, keys.band, i0, a.Nq, Tile::kZeroed + consumer);
        };
        // Tiles of queries from full_begin to full_end see all keys of this warpgroup.
        const int j64 = keys.j0 + 64 * consumer, j = j64 + thread / 32 * 16 + thread % 32 / 4;  // keys j and j + 8
        const bool all_exist = band.keys.begin <= j64 && j64 + 64 <= band.keys.end;
        const int full_begin = broadcast_lane0(all_exist ? j64 + 63 - band.last : 1 << 30);
        const int full_end = broadcast_lane0(j64 - band.first - Br + 1);

        const auto issue_dQ_of_last_tile = [&](float (&dQ)[32], bool exists) {
            if (exists) dS_read.consumer_wait();
            issue_dQ<T, Tile>(dQ, shared.Kj, Tile::column_box(consumer),
                              shared.dS[dS_read.stage()][Tile::query_box(consumer)]);
        };
        const auto store_dQ = [&](const float (&dQ)[32]) {
            dS_read.consumer_release();
            dQ_staged.producer_acquire();
            stage_dQ(shared.dQi[consumer], dQ, thread);
            __syncwarp();
            if (thread % 32 == 0) arrive(dQ_staged.full());
            dQ_staged.advance();
        };

        KV.consumer_wait();
        zero_hidden(shared.Kj), zero_hidden(shared.Vj);
#pragma unroll
        for (int x = 0; x < D / 2; ++x) dK[x] = dV[x] = 0.f;
        keys.for_each_query_tile([&](int, int i0, bool is_first) {
            float S[Br / 2], dP[Br / 2], dQ[32];  // here, so that no registers keep those of the last tile
            uint32_t P[Br / 4], dS[Br / 4];
            Q.consumer_wait();
            zero_blind(shared.Qi[Q.stage()], i0);
            ping_pong.wait_turn();
            issue_ABt<T, D>(S, descriptor(shared.Kj[consumer], 0), descriptor(shared.Qi[Q.stage()], 0));
            dO.consumer_wait();
            zero_blind(shared.dOi[dO.stage()], i0);
            issue_ABt<T, D>(dP, descriptor(shared.Vj[consumer], 0), descriptor(shared.dOi[dO.stage()], 0));
            ping_pong.pass_turn();
            wgmma_wait<1>(S);
            compute_P(S, shared.lse[Q.stage()] + thread % 4 * 2, p.c);  // beside dP^T
            if (i0 < full_begin || i0 > full_end) mask_columns(S, {keys.queries(j), keys.queries(j + 8)}, i0, 0.f);
            pack_operand<T>(P, S);
            wgmma_wait<0>(dP);
            issue_AB<T>(dV, P, descriptor(shared.dOi[dO.stage()], 0));
            __syncwarp();                                               // keeps what follows behind the products
            compute_dS(dP, S, shared.Di[dO.stage()] + thread % 4 * 2);  // beside dV
            pack_operand<T>(dS, dP);
            dS_written.producer_acquire();
            stage_dS(shared.dS[dS_written.stage()], dS, consumer, thread);
            __syncwarp();
            if (thread % 32 == 0) arrive(dS_written.full());
            dS_written.advance();
            // Under an if, ptxas would wait for the product at once (C7517, docs/ptxas.md).
            issue_dQ_of_last_tile(dQ, !is_first);
            issue_AB<T>(dK, dS, descriptor(shared.Qi[Q.stage()], 0));
            __syncwarp();
            wgmma_wait<1>(dV);
            dO.consumer_release();
            wgmma_wait<1>(dQ);
            if (!is_first) store_dQ(dQ);  // beside dK
            wgmma_wait<0>(dK);
            Q.consumer_release();
        });
        float dQ[32];
        issue_dQ_of_last_tile(dQ, true);
        wgmma_wait<0>(dQ);
        store_dQ(dQ);
        KV.consumer_release();
        const auto counts = [&](int key) { return keys.is_seen(key, a.Nq); };
        store_gradient<T>(p.dv, keys.b, keys.key_head, j, a.Nk, a.d, 1.f, dV, counts);
        store_gradient<T>(p.dk, keys.b, keys.key_head, j, a.Nk, a.d, a.softmax_scale, dK, counts);
    });
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    fused_backward_kernel(const __grid_constant__ FusedParameters p) {
    auto &shared = shared_storage<SharedStorage<Tile>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + 1 + Tile::Consumers);
        init_pipeline(shared.KV, warps, 2 * Tile::Consumers);
        init_pipeline(shared.Q, warps, 2), init_pipeline(shared.dO, warps, 2);
        init_pipeline(shared.dS_ready, warps, warps);
        for (auto &dQ : shared.dQ) init_pipeline(dQ, 1, 4);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) schedule_and_load_K_Q(p, shared);
        if (threadIdx.x == 96) load_V_dO(p, shared);
#pragma unroll  // or the adders spill
        for (int consumer = 0; consumer < Tile::Consumers; ++consumer)
            if (threadIdx.x == 32 + 32 * consumer) add_dQ(p, shared, consumer);
    };
    run_roles<Tile>(init_barriers, produce, [&] { consume<T, Tile>(p, shared); });
}

// ------------------------------------------------------------------------------ the launch

// D, Br, stages of Q, of dO
using Tiles = TileList<Tile<64, 128, 2, 2>, Tile<128, 64, 3, 2>>;
int tile_of(const Attention &a) { return a.d <= 64 ? 0 : 1; }

int64_t units_of(const Gradient &g) { return g.a.B * g.a.Hq * padded_rows(g.a) / kGradientRows; }

}  // namespace

Plan plan_fused(const Gradient &g, const Device &device) {
    return with_tile(tile_of(g.a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        const Attention &a = g.a;
        Plan plan = make_plan<Tile, SharedStorage<Tile>>(a, device, "dK, dV, dQ", tile_of(a));
        const int64_t work_tiles = key_tiles_of(a, Tile::Bc) + units_of(g);
        plan.grid = std::min<int64_t>(work_tiles, device.multiprocessors);
        plan.workspace = a.B * a.Hq * padded_rows(a) * Tile::D * 4;
        return plan;
    });
}

const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                         CUstream_st *stream) {
    float *const dQ = (float *)workspace;
    return with_tile(plan.tile, Tiles(), [&](auto tile) -> const char * {
        using Tile = decltype(tile);
        const Attention &a = g.a;
        const auto kernel = a.dtype == Dtype::float16 ? fused_backward_kernel<__half, Tile>
                                                      : fused_backward_kernel<__nv_bfloat16, Tile>;
        FusedParameters p{gradient_parameters(g, rows, Tile::Bc)};
        const int64_t head = rows.head_stride * Tile::D;
        if (!make_tensor_map(p.dO, a.dtype, g.do_, g.do_stride, a.B, a.Hq, a.Nq, a.d, Tile::Br) ||
            !make_tensor_map(p.dQ, Dtype::float32, dQ, {a.Hq * head, head, Tile::D}, a.B, a.Hq, rows.head_stride,
                             Tile::D, 64))
            return "cuTensorMapEncodeTiled refused do";
        p.sums = dQ, p.added = rows.head_counters, p.tile_counter = rows.tile_counter;
        p.units_of_head = rows.head_stride / kGradientRows, p.units_of_group = p.units_of_head * int(a.Hq / a.Hkv);
        return launch_kernel<Tile>(kernel, p, plan, Zeros(nullptr, 0, stream), stream, Tile::Br, 64,
                                   p.key_tiles + units_of(g));
    });
}

}  // namespace minimal_attn::hopper
