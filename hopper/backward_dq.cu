// backward_dq.cu: dQ alone, for float16 and bfloat16 on Hopper, d above 128. One block computes each sum: the same bits
// on every run. docs/backward.md has its budget and measurements. Read half.cu first: it has the same form.
//
//     S = Q K^T,  P = exp(S - lse),  dP = dO V^T,  dS = P o (dP - D),  dQ = dS K
//
// A block computes one work tile after another: 128 queries of one head, 64 for each consumer warpgroup.
//
//     thread 0          thread 32         thread 64
//     work tile, Kj     Qi, dOi           Vj               shared memory       each consumer warpgroup, in registers
//         |                |                 |
//         +----------------|-----------------|--> tile_queue, 2 stages ------> which rows of which head
//         |                +-----------------|--> Qi, dOi -------------+
//         +----------------------------------|--> Kj, KStages ---+-----+-----> Sij = Qi Kj^T            (wgmma)
//                                            |                   |     |       Pij = exp(Sij - lse_i)
//                                            +--> Vj, VStages ---|-----+-----> dPij = dOi Vj^T          (wgmma)
//     lse_i, Di in HBM --------------------------------------------|-----------> dSij = Pij o (dPij - Di)
//                                                                +-----------> dQi += dSij Kj           (wgmma)
//     dq in HBM <------------------------------------------------------------- softmax_scale dQi
//
// | role                | warps           | registers a thread | does                                              |
// |---------------------|-----------------|--------------------|---------------------------------------------------|
// | scheduler, K        | 0 (thread 0)    | 32                 | takes work tiles, publishes them, loads Kj        |
// | Q, dO               | 1 (thread 32)   | 32                 | loads Qi and dOi                                  |
// | V                   | 2 (thread 64)   | 32                 | loads Vj                                          |
// | dependency          | 3 (thread 96)   | 32                 | waits for the kernel before, which computes dK    |
// |                     |                 |                    | and dV meanwhile. With ranges first the scheduler |
// | consumer warpgroups | 4 to 7, 8 to 11 | 232                | Sij, dPij and dQi of 64 queries each; writes dq   |
//
// | barrier                 | arrives                   | waits                         | then                      |
// |-------------------------|---------------------------|-------------------------------|---------------------------|
// | tile_queue full         | thread 0; or 96, and TMA  | threads (0), 32, 64; consumers | work tile is published   |
// | tile_queue empty        | the threads that wait     | thread 0 or 96                | its slot is free          |
// | Q full (per consumer)   | thread 32, twice; TMA     | that consumer                 | Qi and dOi have arrived   |
// | Q empty (per consumer)  | that consumer             | thread 32                     | Qi and dOi are read       |
// | K full, V full          | thread 0 or 64; TMA       | consumers                     | Kj or Vj has arrived      |
// | K empty, V empty        | consumers                 | thread 0 or 64                | all products have read it |
// | named kTurn + index     | the consumer before it    | that consumer                 | it may issue products     |
// | named kZeroed + index   | that consumer             | that consumer                 | hidden rows of Kj are 0   |
//
// full and empty are mbarriers, on which a consumer warp arrives once. index is the consumer's. tile_counter, in
// memory, counts the work tiles that the scheduler has taken.
//
// General kernels add what scores.h and dropout.h ask for beside dP: terms.h has add_terms and clear_hidden, dropped.h
// KeptWeights, gradient.h dP_less_D.
#include "hopper/dropped.h"
#include "hopper/gradient.h"
#include "hopper/terms.h"

namespace minimal_attn::hopper {
namespace {

// V and dO have D_v columns.
template <int D_, int KStages_, int VStages_, int D_v_ = D_>
struct DqTile {
    static constexpr int D = D_, D_v = D_v_, Br = 128, Bc = 64, KStages = KStages_, VStages = VStages_, BlocksPerSM = 1;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers), ProducerRegisters = 32;
    static constexpr bool TakesTurns = true, AlignKeys = false;
    static constexpr int Boxes = D / kBoxColumns, TileBytes = 64 * Boxes * 128;  // of 64 rows
    static constexpr int VBoxes = D_v / kBoxColumns, VTileBytes = 64 * VBoxes * 128;
    enum NamedBarrier { kTurn = 1, kZeroed = kTurn + Consumers };  // + the consumer; 0 is __syncthreads
    static_assert(D % kBoxColumns == 0 && D_v % kBoxColumns == 0 &&
                  KStages > 1);  // Kj is released after the wait for the next one
};

template <class Tile, class Mask>
struct SharedStorage {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::TileBytes], dOi[Tile::Consumers][Tile::VTileBytes];
    unsigned char Kj[Tile::KStages][Tile::TileBytes], Vj[Tile::VStages][Tile::VTileBytes];
    WorkTileOf<Mask> work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], Q[Tile::Consumers][1], K[Tile::KStages], V[Tile::VStages];
    std::conditional_t<kIsRanges<Mask>, RangeEntries<Tile>[kQueueStages], char> ranges;
};

// ------------------------------------------------------------------------------ producer threads

template <class Tile, class Mask>
__device__ void load_Q_and_dO(const GradientParameters &p, SharedStorage<Tile, Mask> &shared) {
    Pipeline<1> Q{};
    for_each_work_tile(shared, [&](const auto &work, const auto &) {
        for (int n = 0; work.b >= 0 && n < Tile::Consumers; ++n) {
            Q.barriers = shared.Q[n];
            Q.producer_acquire();
            load_tile<64, Tile::Boxes>(shared.Qi[n], p.Q, work.i0 + 64 * n, work.h, work.b, Q.full());
            load_tile<64, Tile::VBoxes>(shared.dOi[n], p.dO, work.i0 + 64 * n, work.h, work.b, Q.full());
        }
        Q.advance();
    });
}

template <class Tile, class Mask>
__device__ void load_V(const GradientParameters &p, SharedStorage<Tile, Mask> &shared) {
    Pipeline V{shared.V};
    for_each_work_tile(shared, [&](const auto &work, const auto &) {
        if (work.b >= 0) load_tiles<Tile>(p, p.V, work, V, shared.Vj, [] {});
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

// dPij of the next tile is issued when the product dSij Kj has ended: then the registers of dSij are free.
template <class T, class Tile, class Mask>
__device__ void consume(const GradientParameters &p, SharedStorage<Tile, Mask> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc;
    const int warpgroup = consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // a thread's rows of the work tile: this one and row + 8
    const PingPong<Tile> ping_pong{warpgroup};
    if (warpgroup == Tile::Consumers - 1) ping_pong.pass_turn();  // the first turn is warpgroup 0's
    Pipeline tile_queue{shared.tile_queue};
    Pipeline Q{shared.Q[warpgroup]};
    Pipeline K{shared.K}, K_of_dQ{shared.K};  // of the next Sij; of the next dSij Kj
    Pipeline V{shared.V};
    float dQ[D / 2], S[Bc / 2], dP[Bc / 2];
    uint32_t dS[Bc / 4];

    // Unless addresses are opaque, ptxas computes all descriptors once and spills them.
    const Descriptor tiles = descriptor(&shared), Qi = tiles + warpgroup * Tile::TileBytes;
    const Descriptor Kj = tiles + Tile::Consumers * (Tile::TileBytes + Tile::VTileBytes);
    const auto issue_S = [&] {  // of the next tile of keys
        issue_ABt<T, D>(S, {opaque(Qi.low)}, Descriptor{opaque(Kj.low)} + K.stage() * Tile::TileBytes);
        K.advance();
    };
    const auto issue_dP = [&] {
        constexpr int Less = Tile::TileBytes - Tile::VTileBytes;
        const Descriptor dOi = Descriptor{opaque(Qi.low)} + (Tile::Consumers * Tile::TileBytes - warpgroup * Less);
        const Descriptor Vj = Descriptor{opaque(Kj.low)} + Tile::KStages * Tile::TileBytes;
        issue_ABt<T, Tile::D_v>(dP, dOi, Vj + V.stage() * Tile::VTileBytes);
    };
    const auto issue_dQ = [&] { issue_AB<T>(dQ, dS, Kj + K_of_dQ.stage() * Tile::TileBytes); };
    const bool may_be_large = __ldcg(p.rows.any_large);
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const WorkTileOf<Mask> &work = shared.work[tile_queue.stage()];
        if (work.b < 0) return;
        float log2_l[2], D_of_rows[2];
        for (int r = 0; r < 2; ++r) {
            const int i = work.i0 + row + 8 * r;
            const int64_t at = (int64_t)(work.b * p.Hq + work.h) * p.rows.head_stride + i;
            // Past L1, which may have these rows of an earlier launch: the kernel doesn't wait before it reads.
            log2_l[r] = i < work.i1 ? __ldcg(p.rows.log2_l + at) : INFINITY;
            D_of_rows[r] = i < work.i1 ? __ldcg(p.rows.D + at) : 0.f;
        }
        Q.consumer_wait(), K.consumer_wait(), V.consumer_wait();
        ping_pong.wait_turn();
        issue_S();
        issue_dP();
        ping_pong.pass_turn();
#pragma unroll
        for (float &x : dQ) x = 0.f;

        const auto tiles_until = [&](int end) {
            return broadcast_lane0(max((end - work.visible.begin + Bc - 1) / Bc, 1));
        };
        const int needed = tiles_until(end_of_keys(work, work.i0 + 64 * warpgroup));
        for (int n = 1, j0 = broadcast_lane0(work.visible.begin);; ++n) {
            // `work` is read again in each step: registers are short.
            const int i = work.i0 + row, i64 = work.i0 + 64 * warpgroup;
            const Keys all_see = keys_of_all(work.mask, i64, i64 + 64);
            const bool masked = j0 < all_see.begin || j0 + Bc > all_see.end;
            wgmma_wait<1>(S);
            KeptWeights<Bc / 2> kept;
            if constexpr (kIsGeneral<Mask> && !kHasTerms<Mask>) {  // dP waits for no P, which takes the place of S
                change<T, true>(p.a.scores, S);
                wgmma_wait<0>(dP);
#pragma unroll
                for (int x = 0; x < Bc / 2; ++x) dP[x] = slope_of(S[x]) * subtract_D<T>(dP[x], D_of_rows[x / 2 % 2]);
            }
            if constexpr (kHasTerms<Mask>) {  // beside dP
                if (has_dropout(p.a)) kept.template draw<false>({p.a, work.b, work.h}, i, j0);
                add_terms<T>(S, p.a, work.b, work.h, i, j0);
            }
            if (__builtin_expect(may_be_large, false)) {
                const float *const m = p.rows.m + (int64_t)(work.b * p.Hq + work.h) * p.rows.head_stride + i;
                const float m_of_rows[2] = {__ldcg(m), __ldcg(m + 8)};
#pragma unroll
                for (int x = 0; x < Bc / 2; ++x) S[x] = less_m<T>(S[x], m_of_rows[x / 2 % 2], log2_l[x / 2 % 2], p.c);
            }
#pragma unroll
            for (int x = 0; x < Bc / 2; ++x) S[x] = exp2_fast(fmaf(S[x], p.c, -log2_l[x / 2 % 2]));  // P
            if constexpr (!kIsGeneral<Mask> || kHasTerms<Mask>) wgmma_wait<0>(dP);
            V.consumer_release();
            if (kHasTerms<Mask> && has_dropout(p.a)) kept.drop(dP);
            const float of_kept = kHasTerms<Mask> ? factor_of_kept(p.a) : 1.f;
#pragma unroll
            for (int x = 0; x < Bc / 2; ++x) {  // dS
                const float D = D_of_rows[x / 2 % 2];
                dP[x] = S[x] * (kHasTerms<Mask>    ? dP_less_D<T>(dP[x], D, of_kept)
                                : kIsGeneral<Mask> ? dP[x]
                                                   : subtract_D<T>(dP[x], D));
            }
            if (kHasTerms<Mask> && may_hide(p.a)) clear_hidden(dP, S);
            if (masked) mask_columns(dP, {keys_of_row(work.mask, i), keys_of_row(work.mask, i + 8)}, j0, 0.f);
            pack_operand<T>(dS, dP);
            if (kHasTerms<Mask> && j0 < work.mask.keys.begin)  // rows before the first key may hold anything
                zero_rows_outside<Bc, Tile::Boxes>(shared.Kj[K_of_dQ.stage()], work.mask.keys.begin - j0, Bc,
                                                   Tile::kZeroed + warpgroup);
            if (n == needed && work.mask.keys.end < p.a.Nk)  // TMA has set rows from Nk on to 0
                zero_rows_outside<Bc, Tile::Boxes>(shared.Kj[K_of_dQ.stage()], 0, work.mask.keys.end - j0,
                                                   Tile::kZeroed + warpgroup);
            if (n == needed) break;  // the product of the last tile stands behind the loop
            ping_pong.wait_turn();
            issue_dQ();
            K.consumer_wait();
            issue_S();
            wgmma_wait<1>(dQ);
            K_of_dQ.consumer_release();
            V.consumer_wait();
            issue_dP();
            ping_pong.pass_turn();
            j0 += Bc;
        }
        Q.consumer_release();
        ping_pong.wait_turn();
        issue_dQ();
        ping_pong.pass_turn();
        wgmma_wait<0>(dQ);
        K_of_dQ.consumer_release();
        // Tiles that only the other warpgroup needs. Stages are released before the wait for the turn: the warpgroup
        // that has it may wait for the next Vj.
        const int all = tiles_until(work.visible.end);
        for (int n = needed; n < all; ++n) {
            K_of_dQ.skip_stage(), K.advance();
            V.skip_stage();
            ping_pong.wait_turn();
            ping_pong.pass_turn();
        }
        store_gradient<T>(p.dq, work.b, work.h, work.i0 + row, work.i1, p.a.d, p.a.scores.scale, dQ,
                          [&](int i) { return !empty(keys_of_row(work.mask, i)); });
        __syncwarp();  // all lanes have read `work`
    }
}

template <class T, class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    dQ_kernel(const __grid_constant__ GradientParameters p) {
    auto &shared = shared_storage<SharedStorage<Tile, Mask>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + (kIsRanges<Mask> ? 3 : 2));
        for (auto &Q : shared.Q) init_pipeline(Q, 4, 2);
        init_pipeline(shared.K, warps), init_pipeline(shared.V, warps);
        // Empties L1, which may have tables of an earlier launch, since this one doesn't wait before it reads.
        if (kIsRanges<Mask>) load_acquire(*p.rows.any_large);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) load_K<Tile, Mask>(p, shared);
        if (threadIdx.x == 32) load_Q_and_dO(p, shared);
        if (threadIdx.x == 64) load_V(p, shared);
        if constexpr (kIsRanges<Mask>)
            if (threadIdx.x == 96) schedule<Tile, Mask>(p, shared);
        if (threadIdx.x == 96) cudaGridDependencySynchronize();
    };
    // It is launched behind dK and dV. What it reads was written before these began.
    run_roles<Tile, WaitsAt::end>(init_barriers, produce, [&] { consume<T, Tile>(p, shared); });
}

// ------------------------------------------------------------------------------ the launch

// D, stages of K, of V, D_v. A consumer's thread has 80 + D / 2 registers in accumulators and operands, at most 208 of
// 232. Bytes of shared memory: 128 D (2 + KStages) + 128 D_v (2 + VStages).
using Tiles = TileList<
    // Two stages of K and 80 keys were 8 to 15 % slower
    DqTile<192, 3, 2>,
    // All that fits. V has one stage: so the wait for Vj stands behind Sij (docs/backward.md)
    DqTile<256, 2, 1>,
    // d_v up to 128. Two stages of V were up to 2 % slower
    DqTile<192, 3, 3, 128>>;
int tile_of(const Attention &a) { return most_columns(a) > 192 ? 1 : a.d_v <= 128 ? 2 : 0; }

}  // namespace

const char *launch_dQ(const Gradient &g, const GradientRows &rows, int multiprocessors, CUstream_st *stream) {
    return with_tile(tile_of(g.a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        const Attention &a = g.a;
        GradientParameters p = gradient_parameters(g, rows);
        p.tile_counter = rows.tile_counter;
        if (!make_tensor_map(p.dO, a.dtype, g.do_, g.do_stride, a.B, a.Hq, a.Nq, a.d_v, 64))
            return "cuTensorMapEncodeTiled refused do";
        return with_mask_and_scores(a, [&](auto mask) {
            using Mask = Narrow<decltype(mask)>;
            const Plan plan =
                make_plan<Tile, SharedStorage<Tile, Mask>>(a, {multiprocessors, 0}, "half backward, dQ", tile_of(a));
            const auto kernel = with_or_without_terms<Mask>(a, [&](auto mask) {
                using Mask = decltype(mask);
                return a.dtype == Dtype::float16 ? dQ_kernel<__half, Tile, Mask> : dQ_kernel<__nv_bfloat16, Tile, Mask>;
            });
            return launch_kernels<Tile>({kernel}, p, plan, Zeros(nullptr, 0, stream), stream);
        });
    });
}

}  // namespace minimal_attn::hopper
