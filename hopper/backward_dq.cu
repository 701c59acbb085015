// backward_dq.cu: dQ for float16 and bfloat16 on Hopper, without atomics: the same bits on every run. docs/backward.md
// has its budget and measurements. half.cu is the forward kernel of the same form: read it first.
//
// A block computes one work tile after another: Br queries of one head, 64 for each consumer warpgroup, which keep Qi
// and dOi in shared memory and walk the tiles of keys.
//
//     thread 0          thread 32         thread 64
//     work tile, Kj     Qi, dOi           Vj               shared memory       each consumer warpgroup, in registers
//         |                |                 |
//         +----------------|-----------------|--> tile_queue, 2 stages ------> which rows of which head
//         |                +-----------------|--> Qi, dOi -------------+       lse_i, Di from HBM
//         +----------------------------------|--> Kj, KStages --+------+-----> Sij = Qi Kj^T            (wgmma)
//                                            |                  |      |       Pij = exp(Sij - lse_i)
//                                            +--> Vj, VStages --|------+-----> dPij = dOi Vj^T          (wgmma)
//                                                               |              dSij = Pij o (dPij - Di)
//                                                               +------------> dQi += dSij Kj           (wgmma)
//     dQ in HBM <------------------------------------------------------------- softmax_scale dQi
//
// | role                | warps         | registers a thread | does                                                  |
// |---------------------|---------------|--------------------|-------------------------------------------------------|
// | scheduler, K        | 0 (thread 0)  | 32                 | takes work tiles, publishes them, loads Kj            |
// | Q, dO               | 1 (thread 32) | 32                 | loads Qi and dOi                                      |
// | V                   | 2 (thread 64) | 32                 | loads Vj                                              |
// | none                | 3             | 32                 | ends                                                  |
// | consumer warpgroups | 4 to 11 or 15 | 232 or 160 for     | Sij, dPij, dSij, dQi of 64 rows each; writes dQ       |
// |                     |               | 2 or 3 consumers   |                                                       |
//
// | barrier                 | arrives                   | waits                             | then                    |
// |-------------------------|---------------------------|-----------------------------------|-------------------------|
// | tile_queue full         | thread 0                  | threads 32, 64; consumers         | work tile is published  |
// | tile_queue empty        | threads 32, 64; consumers | thread 0                          | its slot is free        |
// | Q full (per consumer)   | thread 32; TMA            | that consumer                     | Qi and dOi have arrived |
// | Q empty (per consumer)  | that consumer             | thread 32                         | Qi and dOi are read     |
// | K full, V full          | thread 0 or 64; TMA       | consumers                         | Kj or Vj has arrived    |
// | K empty                 | consumers                 | thread 0                          | dSij Kj has read it     |
// | V empty                 | consumers                 | thread 64                         | Vj is read              |
// | named kTurn + index     | the consumer before it    | that consumer                     | it may issue products   |
// | named kZeroed + index   | that consumer             | that consumer                     | hidden rows of Kj are 0 |
//
// full and empty are mbarriers, on which a consumer warp arrives once. index is the consumer's.
#include "hopper/gradient.h"
#include "hopper/launch.h"

namespace minimal_attn::hopper {
namespace {

template <int D_, int Br_, int Bc_, int KStages_, int VStages_>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, KStages = KStages_, VStages = VStages_, BlocksPerSM = 1;
    static constexpr bool kTakesTurns = true, kAlignKeys = false;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);
    static constexpr int ProducerRegisters = 32;
    static constexpr int Boxes = (D + kBoxColumns - 1) / kBoxColumns;
    static constexpr int QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    enum NamedBarrier { kTurn = 1, kZeroed = kTurn + Consumers };  // + the consumer; 0 is __syncthreads
    static_assert(Bc % 16 == 0 && D % 32 == 0 && Br % 64 == 0 && KStages > 1);
};

template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QBytes], dOi[Tile::Consumers][Tile::QBytes];
    unsigned char Kj[Tile::KStages][Tile::KBytes], Vj[Tile::VStages][Tile::KBytes];
    WorkTile work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], Q[Tile::Consumers][1], K[Tile::KStages], V[Tile::VStages];
};

struct GradientParameters : Parameters {
    TensorMap dO;
    GradientTensor dq;
    GradientRows rows;
    float c;  // softmax_scale log2(e)
};

// ------------------------------------------------------------------------------ producer threads

template <class Tile>
__device__ void load_Q_and_dO(const GradientParameters &p, SharedStorage<Tile> &shared) {
    Pipeline<1> Q{};
    for_each_work_tile(shared, [&](const WorkTile &work, const WorkTile &) {
        for (int warpgroup = 0; work.b >= 0 && warpgroup < Tile::Consumers; ++warpgroup) {
            const int i0 = work.i0 + 64 * warpgroup;
            Q.barriers = shared.Q[warpgroup];
            Q.producer_acquire();
            load_tile<64, Tile::Boxes>(shared.Qi[warpgroup], p.Q, i0, work.h, work.b, Q.full());
            load_tile<64, Tile::Boxes>(shared.dOi[warpgroup], p.dO, i0, work.h, work.b, Q.full());
        }
        Q.advance();
    });
}

template <class Tile>
__device__ void load_V(const GradientParameters &p, SharedStorage<Tile> &shared) {
    Pipeline V{shared.V};
    for_each_work_tile(shared, [&](const WorkTile &work, const WorkTile &) {
        if (work.b >= 0) load_tiles<Tile::Bc>(p.V, work, V, shared.Vj, [] {});
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

template <class T, class Tile>
__device__ void consume(const GradientParameters &p, SharedStorage<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc;
    const int warpgroup = consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // a thread's rows of the work tile: this one and row + 8
    const PingPong<Tile> ping_pong{warpgroup};
    if (warpgroup == Tile::Consumers - 1) ping_pong.pass_turn();  // the first turn is warpgroup 0's
    Pipeline tile_queue{shared.tile_queue};
    Pipeline Q{shared.Q[warpgroup]};
    Pipeline K{shared.K}, K_of_dQ{shared.K};  // of the next Sij; of the next dSij Kj
    Pipeline V{shared.V};
    float dQ[D / 2], Sij[Bc / 2], dPij[Bc / 2];
    uint32_t dSij[Bc / 4];

    const Descriptor tiles = descriptor(&shared), Qi = tiles + warpgroup * Tile::QBytes;
    const Descriptor Kj = tiles + 2 * Tile::Consumers * Tile::QBytes;
    // Of the next tile of keys. Unless addresses are opaque, ptxas computes all descriptors once and spills them.
    const auto issue_S = [&] {
        const Descriptor Q = {opaque(Qi.low)}, K0 = {opaque(Kj.low)};
        issue_ABt<T, D>(Sij, Q, K0 + K.stage() * Tile::KBytes);
        K.advance();
    };
    const auto issue_dP = [&] {
        const Descriptor Q = {opaque(Qi.low)}, K0 = {opaque(Kj.low)};
        issue_ABt<T, D>(dPij, Q + Tile::Consumers * Tile::QBytes, K0 + (Tile::KStages + V.stage()) * Tile::KBytes);
    };
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const WorkTile &work = shared.work[tile_queue.stage()];
        if (work.b < 0) return;
        const int end = broadcast_lane0(work.visible.end);
        const int my_end = broadcast_lane0(end_of_keys(work, work.i0 + 64 * warpgroup));
        float lse[2], Di[2];
        for (int r = 0; r < 2; ++r) {
            const int i = work.i0 + row + 8 * r;
            const int64_t at = (int64_t)(work.b * p.Hq + work.h) * p.rows.head_stride + i;
            lse[r] = i < work.i1 ? p.rows.lse[at] : INFINITY;
            Di[r] = i < work.i1 ? p.rows.D[at] : 0.f;
        }
        Q.consumer_wait(), K.consumer_wait(), V.consumer_wait();
        ping_pong.wait_turn();
        issue_S();
        issue_dP();
        ping_pong.pass_turn();
#pragma unroll
        for (int x = 0; x < D / 2; ++x) dQ[x] = 0.f;

        int j0 = broadcast_lane0(work.visible.begin);
        for (;; j0 += Bc) {  // ends with dSij of the last tile; its dSij Kj stands behind the loop
            wgmma_wait<1>(Sij);
#pragma unroll
            for (int x = 0; x < Bc / 2; ++x) Sij[x] = exp2_fast(fmaf(Sij[x], p.c, -lse[x / 2 % 2]));  // Pij
            wgmma_wait<0>(dPij);
            V.consumer_release();
#pragma unroll
            for (int x = 0; x < Bc / 2; ++x) dPij[x] = Sij[x] * (dPij[x] - Di[x / 2 % 2]);
            const int i = work.i0 + row, first = work.i0 + 64 * warpgroup;  // read again to save registers
            const Keys fully_visible = keys_of_all(work.band, first, first + 64);
            if (j0 < fully_visible.begin || j0 + Bc > fully_visible.end)
                mask_columns(dPij, {keys_of_row(work.band, i), keys_of_row(work.band, i + 8)}, j0, 0.f);
            pack_operand<T>(dSij, dPij);
            if (j0 + Bc >= my_end) break;
            ping_pong.wait_turn();
            issue_AB<T>(dQ, dSij, Kj + K_of_dQ.stage() * Tile::KBytes);
            K.consumer_wait();
            issue_S();
            wgmma_wait<1>(dQ);  // dPij takes the registers of dSij
            K_of_dQ.consumer_release();
            V.consumer_wait();
            issue_dP();
            ping_pong.pass_turn();
        }
        Q.consumer_release();
        if (work.band.keys.end < p.a.Nk)  // TMA has set rows from Nk on to 0
            zero_rows_outside<Bc, Tile::Boxes>(shared.Kj[K_of_dQ.stage()], 0, work.band.keys.end - j0,
                                               Tile::kZeroed + warpgroup);
        ping_pong.wait_turn();
        issue_AB<T>(dQ, dSij, Kj + K_of_dQ.stage() * Tile::KBytes);
        ping_pong.pass_turn();
        wgmma_wait<0>(dQ);
        K_of_dQ.consumer_release();
        // Tiles that only other warpgroups need. Stages come before the turn: its owner may wait for the next Vj.
        for (j0 += Bc; j0 < end; j0 += Bc) {
            K_of_dQ.skip_stage(), K.advance();
            V.skip_stage();
            ping_pong.wait_turn();
            ping_pong.pass_turn();
        }
        store_gradient<T>(p.dq, work.b, work.h, work.i0 + row, work.i1, p.a.d, p.a.softmax_scale, dQ,
                          [&](int i) { return !empty(keys_of_row(work.band, i)); });
        __syncwarp();  // all lanes have read `work`
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    dq_hopper_kernel(const __grid_constant__ GradientParameters p) {
    auto &shared = shared_storage<SharedStorage<Tile>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + 2);
        for (auto &Q : shared.Q) init_pipeline(Q, 4, 2);
        init_pipeline(shared.K, warps), init_pipeline(shared.V, warps);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) schedule_and_load_K<Tile>(p, shared);
        if (threadIdx.x == 32) load_Q_and_dO<Tile>(p, shared);
        if (threadIdx.x == 64) load_V<Tile>(p, shared);
    };
    run_roles<Tile>(init_barriers, produce, [&] { consume<T, Tile>(p, shared); });
}

// ------------------------------------------------------------------------------ the sizes of the tiles

// D, Br, Bc, stages of K, of V. Accumulators and operands take (5 Bc + 2 D) / 4 registers of a consumer's thread: at most
// 208 of 232, with three consumers 132 of 160. Shared memory in bytes: 2 D (2 Br + (stages of K and V) Bc).
using Tiles = TileList<
    // Three consumers, since exponentials are two thirds of the work: 128 x 128 was 2 to 9 % slower, 192 x 64 up to 12 %
    Tile<64, 192, 80, 3, 2>,
    // 128 x 96: full, from N 2048 on, up to 6 % slower; causal, N 1024 and 2048, 1 to 4 % faster
    Tile<96, 128, 128, 2, 2>,
    // Bc 80 and 128 were up to 4 % slower, 112 the same
    Tile<128, 128, 96, 3, 2>,
    // Two stages of K and Bc 80 were 8 to 15 % slower
    Tile<192, 128, 64, 3, 2>,
    // All that fits. V has one stage: so the wait for Vj stands behind Sij, which was worth 13 to 19 %
    Tile<256, 128, 64, 2, 1>>;

int tile_of(const Attention &a) { return a.d <= 64 ? 0 : a.d <= 96 ? 1 : a.d <= 128 ? 2 : a.d <= 192 ? 3 : 4; }

}  // namespace

Plan plan_dq(const Gradient &g, const Device &device) {
    return with_tile(tile_of(g.a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        return make_plan<Tile, SharedStorage<Tile>>(g.a, device, "dQ", tile_of(g.a));
    });
}

const char *launch_dq(const Gradient &g, const GradientRows &rows, const Plan &plan, void *workspace,
                      CUstream_st *stream) {
    return with_tile(plan.tile, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        GradientParameters p{g.a};
        p.dq = gradient_tensor(g, g.dq, g.dq_stride);
        p.rows = rows, p.c = g.a.softmax_scale * kLog2e;
        if (!make_tensor_map(p.dO, g.a.dtype, g.do_, g.do_stride, g.a.B, g.a.Hq, g.a.Nq, g.a.d, 64))
            return "cuTensorMapEncodeTiled refused do";
        const auto kernel =
            g.a.dtype == Dtype::float16 ? dq_hopper_kernel<__half, Tile> : dq_hopper_kernel<__nv_bfloat16, Tile>;
        return launch_kernel<Tile>(kernel, p, plan, Zeros(workspace, plan.workspace, stream), stream);
    });
}

}  // namespace minimal_attn::hopper
